"""Checkpoints: written whole or not at all, checked when read, and never a way to run code."""

import hashlib
import os
import pickle
import re
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shared.errors import UserError
from shared.files import PARTIAL, atomic_write

_STEP_NAME = re.compile(r"step-([0-9]+)\.pt")

# `torch.load` checks no checksum, so a flipped bit in a tensor would go unseen. The SHA-256 of the
# file as `torch.save` wrote it is therefore appended as the comment of the zip archive, where it
# is in nobody's way: plain `torch.load` and every zip program still read the file.
_LABEL = b"refbench checkpoint sha256 "
_HEX_SIZE = 2 * hashlib.sha256().digest_size
# The zip format puts the size of the comment, two bytes, before the comment.
_NO_COMMENT = struct.pack("<H", 0)
_SEAL = struct.pack("<H", len(_LABEL) + _HEX_SIZE) + _LABEL
_SEAL_SIZE = len(_SEAL) + _HEX_SIZE
_ZIP_START = b"PK\x03\x04"
_ZIP_END = b"PK\x05\x06"  # starts the last record, which is 22 bytes where there is no comment
_ZIP_END_SIZE = 22
_CHUNK = 1 << 20

_LEAF_TYPES = (torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None))
_DICT_TYPES = (dict, OrderedDict, Counter)


def _print_error(line: str) -> None:
    print(line, file=sys.stderr)


class Checkpoints:
    """The checkpoints of one run: the newest `keep`, and the best.

    Making one creates the folder and removes what a process that was killed in the middle of a
    save has left behind, so only the process that saves should do it while a run is going on.

    Args:
        folder: where the files are; created where it does not exist.
        keep: how many of the newest checkpoints stay. The best is kept apart from these.
        on_damage: is given one line for each damaged file that `newest` passes over.

    Raises:
        UserError: the folder cannot be created or cleaned.
    """

    def __init__(
        self, folder: Path, keep: int = 2, on_damage: Callable[[str], None] = _print_error
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.folder = folder
        self.keep = keep
        self._on_damage = on_damage
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"*.pt{PARTIAL}"):
                leftover.unlink()
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror or error}") from error

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`, then delete the older ones beyond the newest `keep`.

        Checkpoints of *later* steps are deleted too: they are damaged, or belong to a course that
        was given up when the run went on from an earlier step, and would be taken for the newest.

        Raises:
            UserError: the file cannot be written; the ones before it are untouched.
            TypeError: `state` holds something that is not plain data.
        """
        if step < 0:
            raise ValueError(f"step must not be negative: {step}")
        path = self.folder / f"step-{step:08d}.pt"
        _write(path, dict(state))
        try:
            for other_step, other in self._by_step():
                if other_step > step:
                    other.unlink()
            for _, old in self._by_step()[: -self.keep]:
                old.unlink()
        except OSError as error:
            raise UserError(f"cannot delete from {self.folder}: {error.strerror}") from error
        return path

    def save_best(self, state: Mapping[str, Any]) -> Path:
        """Write `best.pt`; raises as `save` does."""
        path = self.folder / "best.pt"
        _write(path, dict(state))
        return path

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint that is whole; None where nothing was ever saved.

        Raises:
            UserError: there are checkpoints, but every one is damaged. Starting again from nothing
                would then throw work away that the user may still be able to save.
        """
        candidates = [path for _, path in reversed(self._by_step())]
        for path in candidates:
            try:
                return path, load(path)
            except UserError as error:
                self._on_damage(str(error))
        if candidates:
            names = ", ".join(path.name for path in candidates)
            raise UserError(f"no checkpoint in {self.folder} can be read: {names}")
        return None

    def _by_step(self) -> list[tuple[int, Path]]:
        """Return the checkpoints in the order of their steps, which is not that of their names."""
        paths = self.folder.glob("step-*.pt")
        matches = ((_STEP_NAME.fullmatch(path.name), path) for path in paths)
        return sorted((int(match[1]), path) for match, path in matches if match)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint on to the CPU, after checking that every byte is as it was written.

    Raises:
        UserError: the file is not there, a folder, empty, truncated or damaged, not a checkpoint
            that `Checkpoints` wrote, or holds pickled code (which is refused and not run).
    """
    try:
        with path.open("rb") as file:
            _verify(file, path)
            file.seek(0)
            state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is refused: it holds pickled code, not only plain data") from error
    if not isinstance(state, dict):
        raise UserError(f"{path} is not a checkpoint: it holds a {type(state).__name__}")
    return state


def _write(path: Path, state: dict[str, Any]) -> None:
    _check_plain(state, "state")
    try:
        with atomic_write(path) as file:
            writer = _HashingWriter(file)
            torch.save(state, writer)  # type: ignore[arg-type]  # needs no more than write and flush
            if writer.error is not None:
                raise writer.error
            file.seek(-len(_NO_COMMENT), os.SEEK_END)
            file.write(_SEAL + writer.digest.hexdigest().encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


class _HashingWriter:
    """Passes bytes on to a file, and keeps their SHA-256.

    An error is kept for later and the rest of the bytes dropped: raised out of `write`, it would
    be replaced by an internal error of torch's zip writer, which does not say that a disk is full.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: `atomic_write` flushes, where an error can be raised."""


def _check_plain(value: Any, where: str) -> None:
    """Raise TypeError for what `weights_only` would refuse, before it is written and not on resume.

    Types are compared exactly: a `numpy.float64` is a float, and is refused all the same.
    """
    if type(value) in _DICT_TYPES:
        for key, item in value.items():
            if type(key) not in (str, int):
                raise TypeError(f"{where} has a key that is no str or int: {key!r}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif type(value) not in _LEAF_TYPES:
        raise TypeError(f"{where} is not plain data: {type(value).__qualname__}")


def _verify(file: BinaryIO, path: Path) -> None:
    """Raise UserError unless the file is, byte for byte, what `_write` has written."""
    start = file.read(len(_ZIP_START))
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise UserError(f"{path} is empty")
    file.seek(max(0, size - _SEAL_SIZE))
    seal = file.read()
    zip_end = seal[-_ZIP_END_SIZE:]
    is_plain_zip = zip_end.startswith(_ZIP_END) and zip_end.endswith(_NO_COMMENT)
    if start != _ZIP_START or is_plain_zip:
        raise UserError(f"{path} is not a checkpoint that this program wrote")
    if not seal.startswith(_SEAL):
        raise UserError(f"{path} is truncated: its end is missing")
    if seal[len(_SEAL) :] != _digest(file, size - _SEAL_SIZE):
        raise UserError(f"{path} is damaged: its content does not match its checksum")


def _digest(file: BinaryIO, size: int) -> bytes:
    """Return the SHA-256 of the first `size` bytes, and of the two that the seal has replaced."""
    digest = hashlib.sha256()
    file.seek(0)
    for begin in range(0, size, _CHUNK):
        digest.update(file.read(min(_CHUNK, size - begin)))
    digest.update(_NO_COMMENT)
    return digest.hexdigest().encode()
