"""What an optimizer step changes: weights, optimizer, schedule and average; their settings."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shared.optimization import (
    Ema,
    Schedule,
    parameter_groups,
    plateau,
    restore,
    step_decay,
    warmup_cosine,
)
from shared.settings import LARGEST, RunConfig
from shared.state_dicts import load_weights


@dataclass(frozen=True)
class TrainingConfig(RunConfig):
    """How weights are learnt."""

    batch_size: int = 64
    """Samples in an optimizer step."""
    accumulate: int = 1
    """Micro-batches that an optimizer step is made of: more of them need less memory."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd is with Nesterov momentum."""
    lr: float = 0.05
    """Highest learning rate."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 5e-4
    """L2 penalty of sgd, decoupled decay of adamw; not for biases and norms."""
    schedule: Literal["cosine", "step", "plateau"] = "cosine"
    """cosine: over all steps, after a warm-up. step: divided by 10 after each third of the epochs.
    plateau: halved when the validation loss stops falling."""
    warmup_epochs: float = 1.0
    """Epochs over which cosine rises to --lr."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    clip_norm: float | None = None
    """Scale the gradients down to this norm of them all together."""
    ema: float | None = None
    """Decay, for example 0.99, of an average of the weights; it is evaluated and exported then."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, a line each."""
        yield from super().problems()
        yield from self.outside(1, LARGEST, "batch_size", "accumulate")
        yield from self.outside(0, math.inf, "lr", "weight_decay", "warmup_epochs", "clip_norm")
        yield from self.outside(0, 1, "momentum", "label_smoothing", "ema")
        if self.ema == 1:
            yield "--ema must be less than 1: nothing would ever be averaged"
        if self.accumulate > self.batch_size:
            yield f"--accumulate {self.accumulate}: a batch has only {self.batch_size} samples"
        if self.optimizer != "sgd":
            yield from self.ignored(f"--optimizer {self.optimizer} has none", "momentum")
        if self.schedule != "cosine":
            yield from self.ignored(f"--schedule {self.schedule} has none", "warmup_epochs")


class Learner:
    """A model with all that changes along with it in training, and that a checkpoint needs.

    Its `scaler` scales the loss up for fp16, whose small numbers end at 6e-8, and does nothing in
    other precisions. Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html

    Args:
        model: on its device.
        config: chooses the optimizer, the schedule and whether weights are averaged.
        steps_per_epoch: optimizer steps.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig, steps_per_epoch: int) -> None:
        self.model = model
        self.optimizer = make_optimizer(model, config)
        self.schedule = make_schedule(self.optimizer, config, steps_per_epoch)
        self.ema = None if config.ema is None else Ema(model, config.ema)
        device = next(model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(device, enabled=config.precision == "fp16")

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate and to export: the average, where there is one."""
        return self.model if self.ema is None else self.ema.model

    def step_ended(self) -> None:
        """Follow an optimizer step."""
        self.schedule.step_ended()
        if self.ema is not None:
            self.ema.update()

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors, loadable with `weights_only=True`."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], source: Path) -> None:
        """Continue from a `state_dict()`, with the hyperparameters that are configured now.

        Raises:
            UserError: it is of another model, optimizer or schedule.
        """
        load_weights(self.model, state["model"], source)
        restore(self.optimizer, self.schedule, state["optimizer"], state["schedule"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"] or {"updates": 0, "model": state["model"]})
        if state.get("scaler"):  # empty unless it was fp16
            self.scaler.load_state_dict(state["scaler"])


def make_optimizer(model: nn.Module, config: TrainingConfig) -> Optimizer:
    """The optimizer of the settings, in its fused form: one kernel for all parameters.

    Not for fp16: a fused SGD is told by the scaler to skip a step, and on a CPU does not.
    """
    groups = parameter_groups(model, config.weight_decay)
    fused = config.precision != "fp16"
    if config.optimizer == "adamw":
        return AdamW(groups, config.lr, fused=fused)
    nesterov = config.momentum > 0
    return SGD(groups, config.lr, config.momentum, nesterov=nesterov, fused=fused)


def make_schedule(optimizer: Optimizer, config: TrainingConfig, steps_per_epoch: int) -> Schedule:
    """How the learning rate changes."""
    if config.schedule == "step":
        return step_decay(optimizer, math.ceil(config.epochs / 3), gamma=0.1)
    if config.schedule == "plateau":
        return plateau(optimizer, factor=0.5, patience=2)
    warmup = round(min(config.warmup_epochs, config.epochs) * steps_per_epoch)
    return warmup_cosine(optimizer, warmup, config.epochs * steps_per_epoch)
