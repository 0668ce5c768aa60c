"""The frame around a script's `main`: settings in, one line of JSON and an exit code out."""

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.distributed import leave, main_speaks_first, speaks_first, told_later
from shared.errors import Disconnected, Diverged, Interrupted, UserError
from shared.settings import ConfigT, parse

PLACES_TO_MEND = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ENOENT,
)
"""What a user can mend: a full disk, a folder that may not be written, a file in its place."""

MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError, RuntimeError)
"""Among them those of memory: PyTorch's allocator of the CPU raises a plain RuntimeError."""


def run_program(
    main: Callable[[ConfigT], Mapping[str, Any]],
    config_class: type[ConfigT],
    description: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Parse the command line, call `main`, print what it returns as the last line, as JSON.

    Returns:
        The exit code: 0 done; 1 the work failed; 2 the user's mistake; 130 and 143 interrupted.
    """
    code = _run(main, config_class, description, argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        leave(code)
    return code


def _run(
    main: Callable[[ConfigT], Mapping[str, Any]],
    config_class: type[ConfigT],
    description: str,
    argv: Sequence[str] | None,
) -> int:
    prog = Path(sys.argv[0]).name
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may be of any characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with main_speaks_first():
            arguments = sys.argv[1:] if argv is None else argv
            with told_later():
                config = parse(config_class, arguments, prog, description)
            result = main(config)
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except MEMORY_ERRORS as error:
        if not is_out_of_memory(error):
            raise
        hint = "try a smaller --batch-size, more --accumulate, or --precision bf16"
        print(f"{prog}: out of memory: {hint}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # as of `| head`: nobody reads any more, so nothing can be said
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in PLACES_TO_MEND or error.filename is None:
            raise
        print(f"{prog}: error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except (Diverged, Disconnected) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        if speaks_first():  # all processes have agreed to stop
            print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    if speaks_first():
        print(json.dumps(result, allow_nan=False))
    return 0 if result.get("passed", True) else 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was short."""
    is_named = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_named or "can't allocate memory" in str(error)
