"""One run: its folder, its log, its checkpoints, and the signals that end it.

A reference keeps its loop in plain sight and tells its run what happened: `step_ended`,
`epoch_ended`, `finish`. Logging, saving, stopping and continuing follow from that.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import torch
from torch import Tensor

from shared import curves, environment, memory, runlog, seeding, settings
from shared.checkpoints import Checkpoints, load
from shared.data.loading import BatchT, Loader
from shared.devices import choose_device, keep_freed_memory
from shared.errors import Diverged, Interrupted, UserError
from shared.files import atomic_write
from shared.interruption import Interruption
from shared.metrics import Evaluation
from shared.precision import set_precision
from shared.profiling import STEPS, TRACE_FILE, WARM_UP, profiler
from shared.state_dicts import read_weights
from shared.throughput import START, TrainingClock
from shared.training import Learner

CHECKPOINTS = "checkpoints"
"""Name of the folder with checkpoints in a run folder."""

WEIGHTS_FILE = "model.safetensors"
"""Name of the file in a run folder with the final weights."""

ENVIRONMENT_FILE = "environment.json"
"""Name of the file in a run folder that says on what machine, and with what versions, it ran."""


class StepResult(NamedTuple):
    """What one optimizer step tells: scalars on the device, so that reading them can wait."""

    loss: Tensor
    """Mean over the samples of the batch."""
    grad_norm: Tensor
    """Of all parameters together, before clipping."""
    correct: Tensor
    """Samples of the batch that were classified correctly."""


@dataclass
class Progress:
    """Where a run stands; part of every checkpoint."""

    epoch: int = 0
    """Epochs that are done."""
    samples: int = 0
    """Samples that are done of the epoch under way: the position in its order."""
    step: int = 0
    """Optimizer steps that are done."""
    loss_sum: float = 0.0
    """Sum of the losses of this epoch's samples."""
    correct: int = 0
    """Samples of this epoch that were classified correctly."""
    best: list[float] = field(default_factory=lambda: [-math.inf, -math.inf])
    """Accuracy and negated loss of the best validation so far."""


class Run:
    """A run from start to end.

    Making one sets up the process: seeds, threads, precision, allocator. Entering it opens the
    run folder and finds the checkpoint to continue from; `begin` starts the training.

    Args:
        config: the settings.
        name: of the script, for messages and for the folder's default name.

    Raises:
        UserError: the device, the precision, the folder or the checkpoint cannot be had.
    """

    def __init__(self, config: settings.RunConfig, name: str) -> None:
        self.config = config
        self.name = name
        self.device = set_up_process(config)
        self.progress = Progress()
        self.saved: dict[str, Any] | None = None
        """The checkpoint that this run continues from."""
        self.source = Path()
        """The file that it was read from."""
        self.result: dict[str, Any] | None = None
        """What the run in this folder ended with, if it has nothing left to do."""
        self._unread: list[tuple[int, int, StepResult]] = []
        self._clock = TrainingClock()
        self._logged = START
        self._began = time.perf_counter()
        self._setup_seconds = 0.0
        self._epoch_size = 0
        self._exits = ExitStack()
        self._profiler: torch.profiler.profile | None = None

    def __enter__(self) -> Self:
        self.folder = _open_folder(self.config, self.name)
        last = (runlog.read(self.folder) or [{}])[-1]  # before the claim, which reading ends
        self._exits.enter_context(runlog.claimed(self.folder))
        self._checkpoints = Checkpoints(
            self.folder / CHECKPOINTS, self.config.keep_checkpoints, on_damage=print
        )
        self.saved = self._find_checkpoint()
        if self.saved is None:
            return self
        self.progress = Progress(**self.saved["progress"])
        if self.progress.epoch >= self.config.epochs and self.progress.samples:
            raise UserError(
                f"--epochs {self.config.epochs}: the run is already in the midst of "
                f"epoch {self.progress.epoch + 1}"
            )
        if self.progress.epoch >= self.config.epochs and last.get("event") == "result":
            self.result = last["result"]
            print(f"{self.folder} is finished, and this was its result; more --epochs go on")
        else:
            print(f"continuing from {self.source}")
            self._tell_another_stream(self.saved)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.__exit__(kind, error, trace)

    def begin(self, learner: Learner, about: Mapping[str, Any]) -> None:
        """Everything is made and checked: bring back what was saved, and start training.

        Only here is anything in the folder changed, and from here on signals wait for the end
        of a step.

        Args:
            learner: newly made; a checkpoint holds its state.
            about: what has to be known to use the weights; it goes into every checkpoint.

        Raises:
            UserError: the checkpoint is of another model or of other data.
        """
        if self.saved is not None:
            check_about(about, self.saved["about"], self.source)
            learner.load_state_dict(self.saved, self.source)
        self._learner, self._about = learner, about
        position = 0 if self.saved is None else self.saved["log_position"]
        self.log = self._exits.enter_context(
            runlog.RunLog(self.folder, position, self.progress.step)
        )
        self._describe()
        self._interruption = self._exits.enter_context(Interruption())
        parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        self.log.say(
            f"{self.name}: {parameters:,} parameters on {self.device} in {self.config.precision}, "
            f"{torch.get_num_threads()} threads; run folder {self.folder}"
        )
        self._setup_seconds = time.perf_counter() - self._began
        memory.reset_peak(self.device)
        if self.config.profile:
            self._profiler = self._exits.enter_context(profiler(self.folder))

    def batches(self, loader: Loader[BatchT]) -> Iterator[BatchT]:
        """The batches of the epoch under way, from where the run stands."""
        at = self.progress
        title = f"epoch {at.epoch + 1}/{self.config.epochs}"
        batches = loader.epoch(at.epoch, at.samples)
        self._epoch_size = loader.size
        with self._clock.running():
            waited_for = self._clock.waiting(batches)
            yield from self.log.progress(waited_for, at.samples, loader.size, title)
            self._read_steps()  # waits for the device, so that the clock tells the truth

    def step_ended(self, result: StepResult, samples: int, lr: float) -> None:
        """Count a step. Log it, write a checkpoint or stop, as the settings and signals say.

        Raises:
            Diverged: the loss or the gradient of a step was not finite.
            Interrupted: a signal came; a checkpoint was written.
        """
        at = self.progress
        at.step += 1
        at.samples += samples
        self._clock.count(samples)
        self._unread.append((at.step, samples, result))
        if self._profiler is not None:
            self._profiler.step()
        if at.step % self.config.log_every == 0:
            self._log_step(lr)
        # At the end of an epoch the checkpoint waits for the validation.
        is_last = at.samples == self._epoch_size and self._interruption.signum is None
        if self._is_due() and not is_last:
            self.save()
        self._stop_if_interrupted()

    def epoch_ended(self, validation: Evaluation) -> None:
        """Count an epoch and log it; keep its weights if they are the best so far.

        Args:
            validation: of the weights after this epoch.
        """
        at = self.progress
        self._log_epoch(validation)
        score = [validation.accuracy, -validation.loss]
        if score > at.best:
            at.best = score
            if self.config.checkpoint_every > 0:
                weights = self._learner.evaluated.state_dict()
                self._checkpoints.save_best({"about": self._about, "model": weights})
        due = self._is_due()
        self.progress = Progress(epoch=at.epoch + 1, step=at.step, best=at.best)
        if due or self.progress.epoch == self.config.epochs:
            self.save()
        self._stop_if_interrupted()

    def finish(self, test: Evaluation, classes: Sequence[str]) -> dict[str, Any]:
        """Log the result, draw the pictures, and return what the program prints last.

        Args:
            test: of the final weights, on the part that nothing was chosen by.
            classes: their names.
        """
        self.log.event(
            "test",
            self.progress.step,
            classes=list(classes),
            class_accuracy=test.class_accuracy(),
            confusion=test.confusion.tolist(),
        )
        curves.draw_confusion(self.folder, test.confusion, classes)
        picture = curves.draw(self.folder, runlog.read(self.folder), str(self.folder))
        totals = self._clock.read()
        self.result = {
            "run_dir": str(self.folder),
            **result_of(test),
            "seconds": time.time() - psutil.Process().create_time(),
            "setup_s": self._setup_seconds,
            **totals.rates(START),
            "peak_memory_bytes": memory.peak_of_run(self.device),
            "epochs": self.progress.epoch,
            "steps": self.progress.step,
        }
        self.log.event("result", self.progress.step, result=self.result)
        if self.config.profile and not (self.folder / TRACE_FILE).exists():
            self.log.say(f"warning: --profile needs {WARM_UP + 1 + STEPS} steps, and got fewer")
        self.log.say(f"test: accuracy {test.accuracy:.2%}, loss {test.loss:.4f}; curves: {picture}")
        return self.result

    def save(self) -> Path:
        """Write a checkpoint of this moment. What is not finite is found before, never saved."""
        self._read_steps()
        with self._clock.standing():
            return self._checkpoints.save(
                self.progress.step,
                {
                    "progress": asdict(self.progress),
                    "log_position": self.log.flushed_position(),
                    "config": settings.as_dict(self.config),
                    "threads": torch.get_num_threads(),
                    "about": self._about,
                    **self._learner.state_dict(),
                },
            )

    def _is_due(self) -> bool:
        every = self.config.checkpoint_every
        return self._interruption.signum is not None or (
            every > 0 and self.progress.step % every == 0
        )

    def _stop_if_interrupted(self) -> None:
        if self._interruption.signum is not None:
            raise Interrupted(
                self._interruption.signum,
                f"interrupted at step {self.progress.step}, which is saved; to continue: "
                f"the same command with --run-dir {self.folder}",
            )

    def _read_steps(self) -> None:
        """Read the results of the steps since the last reading: waits for the device."""
        at = self.progress
        for step, samples, result in self._unread:
            for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
                if not math.isfinite(value):
                    raise Diverged(
                        f"the {name} is {float(value)} at step {step} (epoch {at.epoch + 1}); "
                        f"checkpoints from before it are in {self.folder / CHECKPOINTS}; "
                        "a lower --lr or a --clip-norm may help"
                    )
            at.loss_sum += float(result.loss) * samples
            at.correct += int(result.correct)
        self._unread.clear()

    def _log_step(self, lr: float) -> None:
        _, _, result = self._unread[-1]
        self._read_steps()
        now = self._clock.read()
        values = {"loss": float(result.loss), "lr": lr, "grad_norm": float(result.grad_norm)}
        self.log.event(
            "step",
            self.progress.step,
            **values,
            **now.rates(self._logged),
            **memory.peak_memory(self.device),
        )
        self._logged = now
        self.log.show(step=self.progress.step, **values)

    def _log_epoch(self, validation: Evaluation) -> None:
        at = self.progress
        loss, accuracy = at.loss_sum / at.samples, at.correct / at.samples
        rates = self._clock.read().rates(START)
        self.log.event(
            "epoch",
            at.step,
            epoch=at.epoch + 1,
            train_loss=loss,
            train_accuracy=accuracy,
            val_loss=validation.loss,
            val_accuracy=validation.accuracy,
            val_top5=validation.top5,
            **rates,
        )
        speed = rates["samples_per_s"]
        self.log.say(
            f"epoch {at.epoch + 1}/{self.config.epochs}: "
            f"train loss {loss:.4f}, accuracy {accuracy:.2%}; "
            f"val loss {validation.loss:.4f}, accuracy {validation.accuracy:.2%}"
            + (f"; {speed:,.0f} samples/s, {rates['data_wait']:.1%} waiting" if speed else "")
        )

    def _find_checkpoint(self) -> dict[str, Any] | None:
        """The checkpoint to continue from, as the settings say."""
        found = self._checkpoints.newest()
        resume = self.config.resume
        # The same command again finds what the run has saved since it was started from a file.
        if isinstance(resume, Path) and (found is None or _is_in(resume, self.folder)):
            found = resume, load(resume)
        if found is None:
            return None
        self.source, saved = found
        if resume == "never":
            raise UserError(f"--resume never: {self.source} is of a run that was begun before")
        if not {"progress", "log_position", "config", "threads", "about"} <= saved.keys():
            raise UserError(f"{self.source}: holds weights alone, so no run can continue from it")
        self._check_position(saved)
        return saved

    def _check_position(self, saved: Mapping[str, Any]) -> None:
        """Refuse another order in the midst of an epoch, where a position would mean other samples.

        Raises:
            UserError: batches are buckets of another size, or have become or ceased to be buckets.
        """
        now, then = settings.as_dict(self.config), saved["config"]
        has_buckets = now.get("bucket", False) or then.get("bucket", False)
        if not has_buckets or not saved["progress"]["samples"]:
            return
        for name in ("bucket", "batch_size"):
            if now.get(name) != then.get(name):
                raise UserError(
                    f"{settings.flag(name)} {now.get(name)}: {self.source} is from the midst of an "
                    f"epoch in the order of {then.get(name)}; it can change where one ends"
                )

    def _tell_another_stream(self, saved: Mapping[str, Any]) -> None:
        """Warn of settings with which what comes now is not what would have come."""
        for name, now in (
            ("seed", self.config.seed),
            ("batch_size", settings.as_dict(self.config).get("batch_size")),
            ("threads", torch.get_num_threads()),
        ):
            then = saved["threads"] if name == "threads" else saved["config"].get(name)
            if then != now:
                print(f"warning: {name} was {then} and is {now}: from here on another stream")

    def _describe(self) -> None:
        """Write down with what, and on what, this run is made."""
        settings.write_file(self.folder / settings.CONFIG_FILE, self.config)
        where = {"machine": environment.machine(), "subject": environment.subject()}
        with atomic_write(self.folder / ENVIRONMENT_FILE) as file:
            file.write(json.dumps(where, indent=2, allow_nan=False).encode())


def result_of(test: Evaluation) -> dict[str, float]:
    """The part of a result that says how good the weights are."""
    top5 = {} if test.top5 is None else {"test_top5": test.top5}
    return {"test_accuracy": test.accuracy, **top5, "test_loss": test.loss}


def set_up_process(config: settings.RunConfig) -> torch.device:
    """Do what acts on the whole process, before the first tensor is made; return the device.

    Raises:
        UserError: this machine lacks the device or the precision.
    """
    device = choose_device(config.device)
    if device.type == "cpu" and config.keep_freed_memory:
        keep_freed_memory()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    seeding.set_deterministic(config.deterministic)
    set_precision(config.precision, device)
    seeding.seed_everything(seeding.SETUP, config.seed)
    return device


def _open_folder(config: settings.RunConfig, name: str) -> Path:
    folder = config.run_dir or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    of_run = settings.read_file(folder / settings.CONFIG_FILE, missing_ok=True)
    if of_run and config.resume == "never":
        raise UserError(f"--resume never: {folder} holds a run already; name another --run-dir")
    if of_run and config.overfit_batch:
        raise UserError(f"--overfit-batch: {folder} holds a run already; name another --run-dir")
    if of_run and isinstance(config.resume, Path):
        is_again = of_run.get("resume") == str(config.resume)
        if not is_again and not _is_in(config.resume, folder):
            raise UserError(f"--resume {config.resume}: {folder} holds another run already")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {folder}: {error.strerror}") from None
    return folder


def _is_in(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def read_trained(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights, and what is known about them, from a checkpoint or an exported file.

    Raises:
        UserError: the file is not there, is damaged, or was not written by a reference.
    """
    if path.suffix == ".safetensors":
        weights, about = read_weights(path)
    else:
        saved = load(path)
        weights, about = (saved.get("ema") or saved).get("model", {}), saved.get("about", {})
    if not weights or not isinstance(about, dict) or not {"model", "classes"} <= about.keys():
        raise UserError(f"{path}: not written by a reference: it says nothing about its weights")
    return weights, about


def check_about(now: Mapping[str, Any], then: Mapping[str, Any], source: Path | str) -> None:
    """Compare what is needed now with what a file says about its weights.

    Raises:
        UserError: they differ, in the network or in the data.
    """
    for name in now:
        if now[name] != then.get(name):
            if name == "normalization":  # long lists
                raise UserError(f"{source}: its training data had other statistics: other data")
            if name == "classes":
                raise UserError(
                    f"{source}: its classes are {then.get(name)}, here they are {now[name]}; "
                    "--data and --data-dir choose the data"
                )
            raise UserError(f"{source}: its {name} is {then.get(name)}, here it is {now[name]}")
