"""What happened, a line of JSON each, on disk before the next thing happens.

Whatever ends a suite, power cuts included, what was measured before is not measured again.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import UserError

Event = dict[str, Any]


class Journal:
    """An append-only file of events, and the same events in memory.

    Args:
        path: of the file; what it holds already is read, but for a torn last line.

    Raises:
        UserError: a line is not JSON, or the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.events, whole = _read(path)
        self._file = path.open("ab")
        self._file.truncate(whole)

    def write(self, event: str, **values: Any) -> Event:
        """Append an event; it is on the disk when this returns."""
        written = {"event": event, **values}
        self._file.write(json.dumps(written, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(written)
        return written

    def find(self, event: str, **values: Any) -> Iterator[Event]:
        """Events of a kind that have these values, oldest first."""
        for found in self.events:
            if found["event"] == event and all(found.get(k) == v for k, v in values.items()):
                yield found

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _read(path: Path) -> tuple[list[Event], int]:
    """The events of a file, and how many bytes their lines have."""
    if not path.exists():
        return [], 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1  # what follows the last end of a line is torn
    events = []
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            events.append(json.loads(line))
        except ValueError:
            raise UserError(f"{path}: line {number} is not a line of a journal") from None
    return events, whole
