"""What ends a program early, and the exit code that says so."""

import signal


class UserError(ValueError):
    """The user can mend this: one line that names the file, flag, index or value. Exit code 2."""


class Interrupted(Exception):  # noqa: N818 - not an error: the work is saved
    """SIGINT or SIGTERM arrived and the work was saved. Exit code 130 or 143.

    Args:
        signum: the signal.
        message: how to continue, for the user.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signal.Signals(signum)

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal, as a shell reports it."""
        return 128 + self.signum


class Disconnected(Exception):  # noqa: N818 - the fault is another process's, which tells it
    """Another process of the group has ended or does not answer: one line. Exit code 1."""


class Diverged(Exception):  # noqa: N818 - an outcome of training, not a fault of the program
    """The loss or a gradient is no longer finite: one line that says where. Exit code 1."""
