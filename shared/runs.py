"""One run: its folder, its log, its checkpoints, and the signals that end it.

A reference keeps its loop in plain sight and tells its run what happened: `step_ended`,
`epoch_ended`, `finish`. Logging, saving, stopping and continuing follow from that.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import torch
from torch import Tensor

from shared import curves, distributed, environment, memory, resuming, runlog, seeding, settings
from shared.checkpoints import Checkpoints
from shared.data.loading import BatchT, Loader
from shared.devices import choose_device, keep_freed_memory
from shared.distributed import Launch, is_joined, is_main, on_main
from shared.errors import Diverged, Interrupted, UserError
from shared.files import atomic_write
from shared.interruption import Interruption
from shared.metrics import Evaluation
from shared.precision import set_precision
from shared.profiling import STEPS, TRACE_FILE, WARM_UP, profiler
from shared.resuming import Found
from shared.state_dicts import save_weights
from shared.throughput import START, TrainingClock
from shared.training import Learner

CHECKPOINTS = "checkpoints"
"""Name of the folder with checkpoints in a run folder."""

WEIGHTS_FILE = "model.safetensors"
"""Name of the file in a run folder with the final weights."""

PATIENCE = 20
"""Steps in a row that may be skipped: each halves the loss scale, which begins at 2^16."""

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
    skipped: bool = False
    """Whether weights were left as they were, since gradients overflowed at the loss scale."""


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

    Of processes that train together all have one, and rank 0's alone reads and writes the folder.

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
        self.processes = distributed.world_size()
        self.progress = Progress()
        self.saved: dict[str, Any] | None = None
        """The checkpoint that this run continues from."""
        self._epoch_size, self._batch_size = 0, 0  # samples, over all processes
        self._skipped = 0
        self._signum = 0
        self._unread: list[tuple[int, int, StepResult]] = []
        self._clock = TrainingClock()
        self._logged = START
        self._began = time.perf_counter()
        self._setup_seconds = 0.0
        self._exits = ExitStack()
        self._profiler: torch.profiler.profile | None = None

    def __enter__(self) -> Self:
        self.folder, self.saved, self.source, self.result = on_main(self._open)
        if self.saved is not None:
            self.progress = Progress(**self.saved["progress"])
        return self

    def _open(self) -> Found:
        """Claim the folder, and see what is in it."""
        folder = resuming.open_folder(self.config, self.name)
        last = (runlog.read(folder) or [{}])[-1]  # before the claim, which reading ends
        self._exits.enter_context(runlog.claimed(folder))
        keep = self.config.keep_checkpoints
        self._checkpoints = Checkpoints(folder / CHECKPOINTS, keep, on_damage=print)
        return resuming.find(self.config, folder, self._checkpoints, last)

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
            resuming.check_about(about, self.saved["about"], self.source)
            learner.load_state_dict(self.saved, self.source)
        self._learner, self._about = learner, about
        self.log = self._open_log() if is_main() else runlog.SilentLog()
        self._interruption = self._exits.enter_context(Interruption(patient=is_joined()))
        parameters = sum(parameter.numel() for parameter in learner.model.parameters())
        self.log.say(
            f"{self.name}: {parameters:,} parameters on {self.device} in {self.config.precision}, "
            + (f"{self.processes} processes of " if self.processes > 1 else "")
            + f"{torch.get_num_threads()} threads; run folder {self.folder}"
        )
        self._setup_seconds = time.perf_counter() - self._began
        memory.reset_peak(self.device)
        if self.config.profile and is_main():
            self._profiler = self._exits.enter_context(profiler(self.folder))

    def batches(self, loader: Loader[BatchT]) -> Iterator[BatchT]:
        """The batches of the epoch under way, from where the run stands."""
        at = self.progress
        title = f"epoch {at.epoch + 1}/{self.config.epochs}"
        batches = loader.epoch(at.epoch, at.samples)
        self._epoch_size = loader.size
        with self._clock.running():
            waited_for = self._clock.waiting(batches)
            sizes = at.samples, loader.size, loader.batch_size
            for batch in self.log.progress(waited_for, *sizes, title):
                self._batch_size = min(loader.batch_size, loader.size - at.samples)
                yield batch
            self._read_steps()  # waits for the device, so that the clock tells the truth

    def step_ended(self, result: StepResult, lr: float) -> None:
        """Count a step. Log it, write a checkpoint or stop, as the settings and signals say.

        Raises:
            Diverged: the loss or the gradient of a step was not finite.
            Interrupted: a signal came; a checkpoint was written.
        """
        at = self.progress
        at.step += 1
        at.samples += self._batch_size
        self._clock.count(self._batch_size)
        self._unread.append((at.step, self._batch_size, result))
        self._count_skipped(result)
        if self._profiler is not None:
            self._profiler.step()
        if at.step % self.config.log_every == 0:
            self._log_step(lr)
        self._hear_signals()
        # At the end of an epoch the checkpoint waits for the validation.
        is_last = at.samples == self._epoch_size and not self._signum
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
            if self.config.checkpoint_every > 0 and is_main():
                weights = self._learner.evaluated.state_dict()
                self._checkpoints.save_best({"about": self._about, "model": weights})
        self._hear_signals()
        due = self._is_due()
        self.progress = Progress(epoch=at.epoch + 1, step=at.step, best=at.best)
        if due or self.progress.epoch == self.config.epochs:
            self.save()
        self._stop_if_interrupted()

    def export(self) -> Path:
        """Write the final weights, which all can read then."""
        path = self.folder / WEIGHTS_FILE
        on_main(lambda: save_weights(path, self._learner.evaluated, self._about))
        return path

    def finish(self, test: Evaluation, classes: Sequence[str]) -> dict[str, Any]:
        """Log the result, draw the pictures, and return what the program prints last.

        Args:
            test: of the final weights, on the part that nothing was chosen by.
            classes: their names.
        """
        peak = distributed.largest(memory.peak_of_run(self.device) or 0) or None
        self.result = on_main(lambda: self._finish(test, classes, peak))
        return self.result

    def _finish(self, test: Evaluation, classes: Sequence[str], peak: int | None) -> dict[str, Any]:
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
        result = {
            "run_dir": str(self.folder),
            **result_of(test),
            "seconds": time.time() - psutil.Process().create_time(),
            "setup_s": self._setup_seconds,
            **totals.rates(START),
            "peak_memory_bytes": peak,
            "epochs": self.progress.epoch,
            "steps": self.progress.step,
            "processes": self.processes,
        }
        self.log.event("result", self.progress.step, result=result)
        if self.config.profile and not (self.folder / TRACE_FILE).exists():
            self.log.say(f"warning: --profile needs {WARM_UP + 1 + STEPS} steps, and got fewer")
        self.log.say(f"test: accuracy {test.accuracy:.2%}, loss {test.loss:.4f}; curves: {picture}")
        return result

    def save(self) -> None:
        """Write a checkpoint of this moment. What is not finite is found before, never saved."""
        self._read_steps()
        if not is_main():
            return
        with self._clock.standing():
            self._checkpoints.save(
                self.progress.step,
                {
                    "progress": asdict(self.progress),
                    "log_position": self.log.flushed_position(),
                    "config": settings.as_dict(self.config),
                    "threads": torch.get_num_threads(),
                    "processes": self.processes,
                    "about": self._about,
                    **self._learner.state_dict(),
                },
            )

    def _is_due(self) -> bool:
        every = self.config.checkpoint_every
        return bool(self._signum) or (every > 0 and self.progress.step % every == 0)

    def _hear_signals(self) -> None:
        """Agree with the other processes on whether a signal came: all stop at the same step."""
        self._signum = distributed.largest(self._interruption.signum or 0)

    def _stop_if_interrupted(self) -> None:
        if self._signum:
            distributed.largest(0)  # waits for the checkpoint: torchrun ends all when one has ended
            raise Interrupted(
                self._signum,
                f"interrupted at step {self.progress.step}, which is saved; to continue: "
                f"the same command with --run-dir {self.folder}",
            )

    def _count_skipped(self, result: StepResult) -> None:
        """Log a step that was skipped.

        Raises:
            Diverged: there were too many in a row.
        """
        self._skipped = self._skipped + 1 if result.skipped else 0
        step = self.progress.step
        if result.skipped:
            self.log.event("skipped", step)
            self.log.say(f"step {step} is skipped: gradients overflowed; the loss scale is halved")
        if self._skipped == PATIENCE:
            raise Diverged(
                f"{PATIENCE} steps in a row had gradients that are not finite, up to step {step}; "
                "a lower --lr, a --clip-norm or --precision bf16 may help"
            )

    def _read_steps(self) -> None:
        """Read the results of the steps since the last reading: waits for the device."""
        at = self.progress
        for step, samples, result in self._unread:
            for name, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
                if not math.isfinite(value) and not (result.skipped and value is result.grad_norm):
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
        grad_norm = None if result.skipped else float(result.grad_norm)
        values = {"loss": float(result.loss), "lr": lr, "grad_norm": grad_norm}
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

    def _open_log(self) -> runlog.RunLog:
        """Open the log where the run stands; write down with what, and on what, it is made."""
        position = 0 if self.saved is None else self.saved["log_position"]
        log = self._exits.enter_context(runlog.RunLog(self.folder, position, self.progress.step))
        settings.write_file(self.folder / settings.CONFIG_FILE, self.config)
        where = {"machine": environment.machine(), "subject": environment.subject()}
        with atomic_write(self.folder / ENVIRONMENT_FILE) as file:
            file.write(json.dumps(where, indent=2, allow_nan=False).encode())
        return log


def result_of(test: Evaluation) -> dict[str, float]:
    """The part of a result that says how good the weights are."""
    top5 = {} if test.top5 is None else {"test_top5": test.top5}
    return {"test_accuracy": test.accuracy, **top5, "test_loss": test.loss}


def set_up_process(config: settings.RunConfig) -> torch.device:
    """Do what acts on the whole process, before the first tensor is made; return the device.

    Raises:
        UserError: this machine lacks the device or the precision, or torchrun has started several
            processes of a script that is one.
    """
    if Launch.of(os.environ).world_size > 1 and not is_joined():
        raise UserError(
            f"{Path(sys.argv[0]).name} is one process; several are for "
            "refs/vision_resnet_distributed.py"
        )
    device = choose_device(config.device)
    if device.type == "cpu" and config.keep_freed_memory:
        keep_freed_memory()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    seeding.set_deterministic(config.deterministic)
    set_precision(config.precision, device)
    seeding.seed_everything(seeding.SETUP, config.seed)
    return device
