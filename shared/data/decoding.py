"""Reading many files: in parallel, once or each time they are asked for, all faults at once."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared import interruption
from shared.data.folders import list_parts, raise_all
from shared.errors import UserError

Decode = Callable[[Path], Tensor]
"""Reads a file. It raises a UserError that names the file, and can be sent to other processes."""

_CHUNK = 64


class DecodedFiles(Sequence[Tensor]):
    """Files that are decoded each time they are asked for."""

    def __init__(self, paths: Sequence[Path], decode: Decode) -> None:
        self.paths = list(paths)
        self._decode = decode

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return self._decode(self.paths[index])


class Ragged(Sequence[Tensor]):
    """Tensors of any shape in one block of memory, which workers share at no cost."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self.shapes = set(self._shapes)
        """All that occur."""
        self._values = torch.cat([tensor.flatten() for tensor in tensors])
        ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0)
        self._starts = [0, *ends.tolist()]

    def stacked(self) -> Tensor:
        """All as one tensor [N, ...], where they have one shape."""
        return self._values.view(len(self), *self._shapes[0])

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return self._values[self._starts[index] : self._starts[index + 1]].view(self._shapes[index])


class Chosen(Sequence[Tensor]):
    """Some of the tensors of a sequence, which stays as it is."""

    def __init__(self, tensors: Sequence[Tensor], indices: Sequence[int]) -> None:
        self._tensors = tensors
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return self._tensors[self._indices[index]]


def decode_all(paths: Sequence[Path], decode: Decode, processes: int) -> list[Tensor]:
    """Decode files in parallel.

    Args:
        paths: of the files.
        decode: reads one.
        processes: how many to start; 1 decodes in this one.

    Raises:
        UserError: files are broken; all of them are named at once.
    """
    tensors: list[Tensor] = []
    problems: list[str] = []
    for arrays, broken in _mapped(paths, decode, processes):
        tensors += [torch.from_numpy(array) for array in arrays]
        problems += broken
    raise_all(problems)
    return tensors


def broken_files(paths: Sequence[Path], decode: Decode, processes: int) -> list[str]:
    """Decode files and keep nothing but a line for each that is broken."""
    return [line for _, own in _mapped(paths, decode, processes, keep=False) for line in own]


def check_files(folder: Path, suffixes: Sequence[str], decode: Decode, noun: str) -> dict[str, Any]:
    """Decode every file of a data set, and print a line for each that is broken.

    Args:
        folder: as for `list_parts`.
        suffixes: of the files that count.
        decode: reads one.
        noun: what the files are.
    """
    listings = list_parts(folder, suffixes).values()
    paths = sorted(path for listing in listings for path in listing.paths)
    broken = broken_files(paths, decode, usable_cores())
    for line in broken:
        print(line)
    return {noun: len(paths), "broken": len(broken), "passed": not broken}


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _mapped(
    paths: Sequence[Path], decode: Decode, processes: int, keep: bool = True
) -> Iterator[tuple[list[np.ndarray], list[str]]]:
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    work = partial(_decode_chunk, decode=decode, keep=keep)
    if processes == 1:
        yield from map(work, chunks)
        return
    try:
        with ProcessPoolExecutor(processes, initializer=_start_child) as pool:
            yield from pool.map(work, chunks)
    except BrokenProcessPool:
        raise UserError(
            f"{paths[0].parent}, …: a process that decodes was killed; is there too little memory?"
        ) from None


def _start_child() -> None:
    interruption.end_with_parent()
    # With more threads, what a process of several threads has forked may wait for them for ever.
    torch.set_num_threads(1)


def _decode_chunk(
    paths: Sequence[Path], decode: Decode, keep: bool
) -> tuple[list[np.ndarray], list[str]]:
    """Arrays, since tensors would travel through shared memory, each with a file of its own."""
    arrays, broken = [], []
    for path in paths:
        try:
            array = decode(path).numpy()
        except UserError as error:
            broken.append(str(error))
        else:
            if keep:
                arrays.append(array)
    return arrays, broken
