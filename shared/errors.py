"""What ends a program, and how it is told: one line and an exit code, never a traceback for a user's mistake."""


class UserError(ValueError):
    """The user can mend this: the message is one line that names the file, flag, index or value."""
