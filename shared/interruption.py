"""Ending at the next good moment when SIGTERM or Ctrl-C arrives."""

import signal
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While entered, the first SIGINT or SIGTERM is only noted; the loop asks and ends in order.

    A second one acts as it would have without this, for who cannot wait.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The signal that arrived, or None."""
        self._before: dict[int, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        for signum in SIGNALS:
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        while self._before:
            signum, handler = self._before.popitem()
            signal.signal(signum, handler)  # type: ignore[arg-type]


def ignore_signals() -> None:
    """For loader workers: a signal to the process group must not kill them under the main process.

    They end when the main process closes its loader, or dies (pytorch#119856).
    """
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
