"""The frame around a script's `main`: settings in, one line of JSON and an exit code out."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import Diverged, Interrupted, UserError
from shared.settings import ConfigT, parse


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
    prog = Path(sys.argv[0]).name
    try:
        result = main(
            parse(config_class, sys.argv[1:] if argv is None else argv, prog, description)
        )
    except UserError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    except Diverged as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except Interrupted as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(result, allow_nan=False))
    return 0 if result.get("passed", True) else 1
