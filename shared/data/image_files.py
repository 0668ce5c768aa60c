"""Image files to pixels: whatever people have, as three channels of eight bits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared.errors import UserError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the files that count as images."""


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
