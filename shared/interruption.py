"""Ending at the next good moment when SIGTERM or Ctrl-C arrives."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_PR_SET_PDEATHSIG = 1  # from prctl.h


class Interruption:
    """While entered, the first SIGINT or SIGTERM is only noted; the loop asks and ends in order.

    A second one acts as it would have without this, for who cannot wait.

    Args:
        patient: ignore a second one too. Under torchrun a signal may come twice, from torchrun and
            from whoever sent it to all; and torchrun kills those that take too long.
    """

    def __init__(self, patient: bool = False) -> None:
        self._patient = patient
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
        if not self._patient:
            self._restore()

    def _restore(self) -> None:
        while self._before:
            signum, handler = self._before.popitem()
            signal.signal(signum, handler)  # type: ignore[arg-type]


def end_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """On Linux, get a signal when the process that started this one is killed: it would go on.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum))
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:  # it went before it could be asked
            os._exit(1)


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Let SIGTERM wait: processes that are started meanwhile have it blocked in every thread."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def shield_worker() -> None:
    """For loader workers: only the main process may end them, so that it can end in order itself.

    Shells and schedulers send signals to all processes of a job, which would kill the workers
    under the main process before it has saved (pytorch#119856). But SIGTERM is also what the main
    process ends a worker with that does not end when asked: ignored, it would wait for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # elsewhere PyTorch's own handler stays
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
