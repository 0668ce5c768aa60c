"""Image files to pixels: whatever people have, as three channels of eight bits."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.data.folders import raise_all
from shared.errors import UserError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the files that count as images."""

_CHUNK = 64


def decode(path: Path) -> Tensor:
    """Read an image as uint8 [3, H, W], as people see it.

    EXIF rotation is applied, grey and palettes become colours, 16 bits become 8, transparency is
    dropped, and of an animation the first picture is taken.

    Raises:
        UserError: the file is not there, or is not a whole image.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits, which convert would clip and not scale
                image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
            pixels = np.array(image.convert("RGB"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # noqa: BLE001 - decoders raise anything on bytes that are no image
        reason = "not an image" if type(error).__name__ == "UnidentifiedImageError" else error
        raise UserError(f"{path}: {reason}") from None
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


class ImageFiles(Sequence[Tensor]):
    """Images that are decoded each time they are asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return decode(self.paths[index])


class RaggedImages(Sequence[Tensor]):
    """Decoded images of any size in one block of memory, which workers share at no cost."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self._shapes = [tuple(image.shape) for image in images]
        self.sizes = set(self._shapes)
        """All that occur, as (channels, height, width)."""
        self._pixels = torch.cat([image.flatten() for image in images])
        ends = torch.tensor([image.numel() for image in images]).cumsum(0)
        self._starts = [0, *ends.tolist()]

    def stacked(self) -> Tensor:
        """All images, uint8 [N, 3, H, W], where they have one size."""
        return self._pixels.view(len(self), *self._shapes[0])

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return self._pixels[self._starts[index] : self._starts[index + 1]].view(self._shapes[index])


def decode_all(paths: Sequence[Path], processes: int) -> list[Tensor]:
    """Decode files in parallel.

    Args:
        paths: of the files.
        processes: how many to start; 1 decodes in this one.

    Raises:
        UserError: files are broken; all of them are named at once.
    """
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    images: list[Tensor] = []
    problems: list[str] = []
    for arrays, broken in _mapped(chunks, processes):
        images += [torch.from_numpy(array) for array in arrays]
        problems += broken
    raise_all(problems)
    return images


def broken_files(paths: Sequence[Path], processes: int) -> list[str]:
    """Decode files and keep nothing but a line for each that is broken."""
    chunks = [paths[start : start + _CHUNK] for start in range(0, len(paths), _CHUNK)]
    return [line for _, broken in _mapped(chunks, processes, keep=False) for line in broken]


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def decoded_bytes(paths: Sequence[Path], probes: int = 100) -> int:
    """Estimate the memory that the decoded files take, from the headers of a few of them."""
    from PIL import Image

    pixels = 0
    chosen = paths[:: max(1, len(paths) // probes)]
    for path in chosen:
        try:
            with Image.open(path) as image:
                pixels += image.width * image.height
        except OSError:  # a broken file has no size, and is named when it is decoded
            continue
    return 3 * pixels * len(paths) // len(chosen)


def _mapped(
    chunks: Sequence[Sequence[Path]], processes: int, keep: bool = True
) -> Iterator[tuple[list[np.ndarray], list[str]]]:
    work = partial(_decode_chunk, keep=keep)
    if processes == 1:
        yield from map(work, chunks)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(work, chunks)


def _decode_chunk(paths: Sequence[Path], keep: bool) -> tuple[list[np.ndarray], list[str]]:
    """Arrays, since tensors would travel through shared memory, each with a file of its own."""
    arrays, broken = [], []
    for path in paths:
        try:
            image = decode(path).numpy()
        except UserError as error:
            broken.append(str(error))
        else:
            if keep:
                arrays.append(image)
    return arrays, broken
