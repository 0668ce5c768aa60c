"""Writing files so that a crash at any moment leaves the old one or the new one, never half."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""Suffix of a file that is still being written. A reader never looks at these."""


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that appears at `path` only when it is complete and on the disk.

    The bytes go to a neighbour named `path` + `PARTIAL`, are flushed to the device, and the
    neighbour is then renamed, which POSIX makes atomic. When the body raises, the neighbour is
    removed and whatever was at `path` stays.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Put the rename itself on the disk; without this a power cut can undo it."""
    if os.name == "nt":  # Windows cannot open a folder, and flushes renames by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
