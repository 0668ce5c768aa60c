"""What happens around an optimizer step: parameter groups, learning rates, resuming, averaging."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared.errors import UserError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into those with weight decay and those without.

    Matrices and convolution kernels decay; norms, biases and everything else with fewer than two
    dimensions do not (He et al., Bag of Tricks for Image Classification with Convolutional Neural
    Networks, 2019, section 3.1). Embeddings are matrices, so they decay.

    Returns:
        Groups for an optimizer, the decayed one first; an empty group is left out. A parameter
        that several modules share is in them once, a frozen one not at all. The split depends on
        the model alone, so that a run can be resumed with another `weight_decay`.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                (decayed if _decays(module, name, parameter) else kept).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    # The two norms whose weights can have more than one dimension.
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return False
    # PyTorch's names are bias, bias_ih_l0, bias_k; other people's often rel_pos_bias.
    is_bias = name.startswith("bias") or name.endswith("bias")
    return parameter.ndim >= 2 and not is_bias


class Schedule(Protocol):
    """The learning rate over a run. The training loop makes both calls, whatever the schedule.

    Which of the two moves the learning rate is the schedule's own affair, so one that counts
    epochs cannot be advanced at every step by mistake, nor the other way round.

    A schedule's state says how far the run has come, not what it was configured with: a resumed run
    follows the lengths and factors it is given now.
    """

    @property
    def lr(self) -> float:
        """The current learning rate of the first parameter group."""

    def step_ended(self) -> None:
        """Call after every optimizer step that was taken (not after one that a scaler skipped)."""

    def epoch_ended(self, metric: float) -> None:
        """Call after every epoch. `metric`: the validation loss; lower is better."""

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as numbers and lists, loadable with `weights_only=True`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the progress of `state`, and set the learning rate that follows from it.

        Raises:
            UserError: the state is that of another kind of schedule.
        """


class _Schedule(ABC):
    """What the three schedules have in common."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def lr(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def _set_lrs(self, lrs: list[float]) -> None:
        for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **self._progress()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kind = type(self).__name__
        if state["kind"] != kind:
            raise UserError(
                f"the checkpoint continues a {state['kind']}, which a {kind} cannot take over: "
                "resume with the schedule that the run began with"
            )
        self._set_progress(state)

    @abstractmethod
    def _progress(self) -> dict[str, Any]: ...

    @abstractmethod
    def _set_progress(self, state: dict[str, Any]) -> None: ...


class _FactorSchedule(_Schedule):
    """The configured learning rate times a function of how often the schedule was advanced."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        super().__init__(optimizer)
        self._factor = factor
        self._scheduler = LambdaLR(optimizer, factor)

    def _progress(self) -> dict[str, Any]:
        return {"count": self._scheduler.last_epoch}

    def _set_progress(self, state: dict[str, Any]) -> None:
        # LambdaLR.load_state_dict would also bring back the saved base_lrs.
        count = state["count"]
        self._scheduler.last_epoch = count
        self._set_lrs([float(base) * self._factor(count) for base in self._scheduler.base_lrs])


class StepSchedule(_FactorSchedule):
    """A schedule that counts optimizer steps.

    Args:
        optimizer: its groups' learning rates are what `factor` multiplies.
        factor: of the number of steps taken so far.
    """

    def step_ended(self) -> None:
        """Set the learning rate of the next step."""
        self._scheduler.step()

    def epoch_ended(self, metric: float) -> None:
        """Do nothing: the unit is the step."""


class EpochSchedule(_FactorSchedule):
    """A schedule that counts epochs.

    Args:
        optimizer: its groups' learning rates are what `factor` multiplies.
        factor: of the number of epochs completed so far.
    """

    def step_ended(self) -> None:
        """Do nothing: the unit is the epoch."""

    def epoch_ended(self, metric: float) -> None:
        """Set the learning rate of the next epoch."""
        self._scheduler.step()


class PlateauSchedule(_Schedule):
    """A schedule that lowers the learning rate when the validation loss stops falling.

    Args:
        optimizer: the optimizer whose groups' learning rates are lowered.
        factor: what the learning rate is multiplied by, in (0, 1).
        patience: epochs without a better loss that are put up with; the next one lowers.
    """

    def __init__(self, optimizer: Optimizer, factor: float, patience: int) -> None:
        super().__init__(optimizer)
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._scheduler = ReduceLROnPlateau(optimizer, factor=factor, patience=patience)

    def step_ended(self) -> None:
        """Do nothing: the unit is the epoch."""

    def epoch_ended(self, metric: float) -> None:
        """Lower the learning rate if the loss has not improved for more than `patience` epochs."""
        self._scheduler.step(metric)

    def _progress(self) -> dict[str, Any]:
        return {
            "best": self._scheduler.best,
            "epochs_without_better": self._scheduler.num_bad_epochs,
            "lrs": [float(group["lr"]) for group in self._optimizer.param_groups],
            "base_lrs": list(self._base_lrs),
        }

    def _set_progress(self, state: dict[str, Any]) -> None:
        self._scheduler.best = state["best"]
        self._scheduler.num_bad_epochs = state["epochs_without_better"]
        # In this order the ratio is exactly 1, and the resumed run bitwise the same, when the
        # configured learning rate has not changed.
        rates = zip(state["lrs"], self._base_lrs, state["base_lrs"], strict=True)
        self._set_lrs([lr * (now / then) if then else now for lr, now, then in rates])


def warmup_cosine(optimizer: Optimizer, warmup_steps: int, total_steps: int) -> StepSchedule:
    """Rise linearly to the configured learning rate, then fall to 0 along half a cosine.

    Warm-up: Goyal et al., Accurate, Large Minibatch SGD, 2017, section 2.2; its first step has
    1/`warmup_steps` of the learning rate, its last one all of it. Cosine: Loshchilov & Hutter,
    SGDR, 2017, without restarts; 0 is reached after the last step and stays.

    Args:
        optimizer: has the configured learning rate in its groups.
        warmup_steps: 0 for none.
        total_steps: optimizer steps of the whole run, warm-up included.

    Raises:
        UserError: `warmup_steps` is negative or more than `total_steps`.
    """
    if not 0 <= warmup_steps <= total_steps:
        raise UserError(
            f"a warm-up of {warmup_steps} steps does not fit into a run of {total_steps} steps"
        )

    def factor(steps: int) -> float:
        if steps < warmup_steps:
            return (steps + 1) / warmup_steps
        if steps >= total_steps:
            return 0.0
        progress = (steps - warmup_steps) / (total_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return StepSchedule(optimizer, factor)


def step_decay(optimizer: Optimizer, epochs_between: int, gamma: float) -> EpochSchedule:
    """Multiply the learning rate by `gamma` every `epochs_between` epochs, as `StepLR` does.

    Raises:
        UserError: `epochs_between` is less than 1, or `gamma` is not in (0, 1].
    """
    if epochs_between < 1:
        raise UserError(f"the learning rate cannot decay every {epochs_between} epochs")
    if not 0.0 < gamma <= 1.0:
        raise UserError(f"the decay of the learning rate must be in (0, 1], not {gamma}")

    def factor(epochs: int) -> float:
        return gamma ** (epochs // epochs_between)

    return EpochSchedule(optimizer, factor)


def plateau(optimizer: Optimizer, factor: float, patience: int) -> PlateauSchedule:
    """Multiply the learning rate by `factor` when the validation loss stops falling.

    That is after more than `patience` epochs in a row that did not lower the best loss by 0.01 %
    (the default of `ReduceLROnPlateau`).

    Raises:
        UserError: `factor` is not in (0, 1), or `patience` is negative.
    """
    if not 0.0 < factor < 1.0:
        raise UserError(f"the factor of a plateau schedule must be in (0, 1), not {factor}")
    if patience < 0:
        raise UserError(f"the patience of a plateau schedule cannot be {patience} epochs")
    return PlateauSchedule(optimizer, factor, patience)


def restore(
    optimizer: Optimizer,
    schedule: Schedule,
    optimizer_state: dict[str, Any],
    schedule_state: dict[str, Any],
) -> None:
    """Continue from saved states, with the hyperparameters that are configured now.

    `Optimizer.load_state_dict` also loads the saved learning rate, weight decay, betas and so on,
    which silently overrides what the user asks for on resuming. Here the moments and the progress
    of the schedule are loaded, and every hyperparameter stays as it was configured. The current
    learning rate is where the schedule would be, had the run begun with them (for a plateau: the
    saved one times the ratio of the configured learning rates). When nothing was changed, the run
    continues bitwise as if it had not been interrupted.

    Args:
        optimizer: newly made, with the configured hyperparameters.
        schedule: newly made, for this optimizer.
        optimizer_state: a `state_dict()` of an optimizer of the same kind. Its tensors become the
            optimizer's own where device and dtype agree.
        schedule_state: a `state_dict()` of a schedule of the same kind.

    Raises:
        UserError: the states are those of another kind of optimizer or schedule, or of a model
            with other parameters.
    """
    saved_groups = optimizer_state["param_groups"]
    _check_groups(optimizer.param_groups, saved_groups)
    # Replaced before loading, not afterwards: `fused` decides on which device the state belongs.
    groups = [
        {**configured, "params": saved["params"]}
        for configured, saved in zip(optimizer.param_groups, saved_groups, strict=True)
    ]
    optimizer.load_state_dict({**optimizer_state, "param_groups": groups})
    schedule.load_state_dict(schedule_state)


def _check_groups(configured: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    sizes = [len(group["params"]) for group in configured]
    saved_sizes = [len(group["params"]) for group in saved]
    if sizes != saved_sizes:
        raise UserError(
            f"the checkpoint's optimizer has parameter groups of {saved_sizes} tensors, "
            f"this model's has {sizes}"
        )
    # A newer PyTorch may add a hyperparameter; only another optimizer both adds and lacks some.
    added = sorted(saved[0].keys() - configured[0].keys())
    lacking = sorted(configured[0].keys() - saved[0].keys())
    if added and lacking:
        raise UserError(
            f"the checkpoint was written by another optimizer: it has {', '.join(added)}, "
            f"and not {', '.join(lacking)}"
        )


class Ema:
    """An exponential moving average of a model's weights and buffers, to evaluate with.

    After Polyak & Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992. The first
    update copies the model; each later one moves the average by 1 - `decay` of the way. Integer
    buffers, such as the counter of a BatchNorm, have no average and are copied.

    Args:
        model: the bare model, not wrapped by DDP or `torch.compile`; `model.compile()` is fine.
        decay: in [0, 1); the average looks back over about 1 / (1 - `decay`) updates.

    Raises:
        UserError: `decay` is outside [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise UserError(f"the decay of a moving average must be in [0, 1), not {decay}")
        self._source = model
        self._averaged = AveragedModel(model, multi_avg_fn=_averaging(decay), use_buffers=True)
        self._averaged.requires_grad_(False)
        self._averaged.eval()

    @property
    def model(self) -> nn.Module:
        """The averaged model, of the same class and with the same keys as the one it follows."""
        return self._averaged.module

    def update(self) -> None:
        """Take in the model's weights; call after every optimizer step."""
        self._averaged.update_parameters(self._source)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of updates, loadable with `weights_only=True`."""
        return {"updates": int(self._averaged.n_averaged), "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`. The decay stays as it is configured.

        Raises:
            RuntimeError: keys or shapes differ from the model's (from `Module.load_state_dict`).
        """
        self.model.load_state_dict(state["model"])
        # Without the count the next update would be the first again, and overwrite the average.
        self._averaged.n_averaged.fill_(state["updates"])


def _averaging(decay: float) -> Callable[..., None]:
    average_floats = get_ema_multi_avg_fn(decay)

    def average(averages: list[Tensor], current: list[Tensor], updates: Tensor) -> None:
        """Update `averages`, tensors of one dtype on one device, in place."""
        if averages[0].is_floating_point() or averages[0].is_complex():
            average_floats(averages, current, updates)
        else:
            torch._foreach_copy_(averages, current)

    return average
