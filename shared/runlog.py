"""The log of a run: JSON lines for programs, TensorBoard for browsers, plain text for people."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shared.data.loading import BatchT
from shared.errors import UserError

METRICS_FILE = "metrics.jsonl"
"""Name of the file in a run folder with one JSON object a line: `event`, `step`, and values."""

PLAIN_LINE_EVERY = 30.0
"""Seconds between lines within an epoch where there is no terminal to draw a bar on."""


class RunLog:
    """Appends events to `metrics.jsonl` and to TensorBoard, and tells people what happens.

    Args:
        folder: of the run.
        position: length in bytes that `metrics.jsonl` had when the checkpoint was written that is
            continued from; what was logged later, and a line torn by a crash, is cut off.
        step: of that checkpoint; TensorBoard hides what it knows of later steps.
    """

    def __init__(self, folder: Path, position: int = 0, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._path = folder / METRICS_FILE
        if self._path.exists():
            os.truncate(self._path, min(position, self._path.stat().st_size))
        # Without a buffer, closing writes nothing, and cannot fail on a full disk once more.
        self._file = self._path.open("ab", buffering=0)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._bar: Any = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        self._board.close()

    def event(self, event: str, step: int, **values: Any) -> None:
        """Log one event. Numbers also go to TensorBoard, as `event/name`."""
        line = json.dumps({"event": event, "step": step, **values}, allow_nan=False)
        try:
            self._file.write(f"{line}\n".encode())
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from None
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def flushed_position(self) -> int:
        """Put the log on the disk; return its length in bytes, for a checkpoint."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def say(self, line: str) -> None:
        """Print a line for people, above the progress bar if there is one."""
        self._last_line = time.monotonic()
        if self._bar is None:
            print(line)
        else:
            self._bar.write(line, file=sys.stdout)
        sys.stdout.flush()

    def progress(
        self, batches: Iterable[BatchT], done: int, total: int, batch_size: int, title: str
    ) -> Iterator[BatchT]:
        """Pass batches through; on a terminal, draw a bar that counts samples of all processes."""
        from tqdm import tqdm

        with tqdm(
            initial=done, total=total, desc=title, unit="sample", leave=False,
            disable=not sys.stderr.isatty(),
        ) as self._bar:  # fmt: skip
            for batch in batches:
                yield batch
                self._bar.update(min(batch_size, total - self._bar.n))
        self._bar = None

    def show(self, **values: float | None) -> None:
        """Show values of the step beside the bar, or now and then as a line of their own."""
        text = ", ".join(f"{name} {v:.4g}" for name, v in values.items() if v is not None)
        if self._bar is not None and not self._bar.disable:
            self._bar.set_postfix_str(text)
        elif time.monotonic() - self._last_line >= PLAIN_LINE_EVERY:
            self.say(text)


class SilentLog:
    """The log of a process that is not the one that writes: nothing comes of it."""

    def event(self, event: str, step: int, **values: Any) -> None:
        """See `RunLog`, as with the others."""

    def flushed_position(self) -> int:
        """0, which nobody asks for."""
        return 0

    def say(self, line: str) -> None:
        """Say nothing."""

    def progress(
        self, batches: Iterable[BatchT], done: int, total: int, batch_size: int, title: str
    ) -> Iterable[BatchT]:
        """The batches."""
        return batches

    def show(self, **values: float | None) -> None:
        """Show nothing."""


def read(folder: Path) -> list[dict[str, Any]]:
    """The events of a run. A line that is none, since a crash tore it or a disk lost it, is not."""
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [event for line in lines if (event := _event(line)) is not None]


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line) if line.endswith("\n") else None
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and {"event", "step"} <= event.keys() else None


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the log of a run, so that no other process trains in the same folder.

    The lock ends with the process, however it ends, and loader workers do not inherit it. It is
    POSIX's, which is also given up when this process closes the file after any other use of it.

    Raises:
        UserError: another process holds it.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (folder / METRICS_FILE).open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--run-dir {folder}: another process is training in it") from None
        yield
