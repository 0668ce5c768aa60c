"""Augmentation of a whole batch on its device, with random parameters of its own for each sample.

The parameters of an epoch are drawn in one table, a function of (seed, epoch), and looked up by
the index of the sample. So what happens to a sample does not depend on workers, batch, or where
a run was resumed; neither does the result, which is bitwise the same in every batch.

The distribution is that of torchvision.transforms.v2: RandomCrop with padding,
RandomHorizontalFlip, then ColorJitter on floats.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.errors import UserError
from shared.seeding import AUGMENTATION, generator

_GREY_WEIGHTS = (0.2989, 0.587, 0.114)  # ITU-R 601, rounded as torchvision rounds it
_FIXED_POINT = 2**24  # a float32 in [0.5, 1] is a multiple of 1 / 2**24


@dataclass(frozen=True)
class Augmentation:
    """What may happen to a training image. Everything is off by default.

    Strengths mean what they mean in torchvision.transforms.v2.ColorJitter.

    Raises:
        UserError: a value is out of range.
    """

    crop_padding: int = 0
    """Zero pixels added on each side before a random crop of the original size."""
    flip: bool = False
    """Mirror left and right with probability 0.5."""
    brightness: float = 0.0
    """Jitter s: a factor uniform in [max(0, 1 - s), 1 + s]."""
    contrast: float = 0.0
    """Jitter s: a factor uniform in [max(0, 1 - s), 1 + s]."""
    saturation: float = 0.0
    """Jitter s: a factor uniform in [max(0, 1 - s), 1 + s]; one-channel images stay as they are."""
    hue: float = 0.0
    """Jitter h ≤ 0.5: a shift uniform in [-h, h] turns; one-channel images stay as they are."""

    def __post_init__(self) -> None:
        for name in ("crop_padding", "brightness", "contrast", "saturation", "hue"):
            value = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            if not (value >= 0 and math.isfinite(value)):
                raise UserError(f"{flag} must be ≥ 0, got {value}")
        if self.hue > 0.5:
            raise UserError(f"--hue must be ≤ 0.5, got {self.hue}")

    def table(self, size: int, seed: int, epoch: int) -> dict[str, Tensor]:
        """Draw the parameters of an epoch, for `augment`.

        Each parameter has a generator of its own, so that switching one on or off leaves the
        draws of the others as they were. Row i depends on (seed, epoch, i) and not on `size`.

        Returns:
            Tensors on the CPU with one row for each of the `size` samples, only for what is on:
            `top`, `left` (int64, from -crop_padding to crop_padding), `flip` (bool),
            `brightness`, `contrast`, `saturation`, `hue` (float32), and with any of these four
            `order` [size, 4] (int64), the order in which they apply, as positions in this list.
        """
        rows = {}
        if self.crop_padding:
            low, high = -self.crop_padding, self.crop_padding + 1
            for name in ("top", "left"):
                draws = _generator_of(name, seed, epoch)
                rows[name] = torch.randint(low, high, (size,), generator=draws)
        if self.flip:
            rows["flip"] = torch.rand(size, generator=_generator_of("flip", seed, epoch)) < 0.5
        for name, (lowest, highest) in self._factor_ranges().items():
            draws = _generator_of(name, seed, epoch)
            factors = torch.empty(size, dtype=torch.float32)
            rows[name] = factors.uniform_(lowest, highest, generator=draws)
        if rows.keys() & _ADJUSTMENTS.keys():
            draws = _generator_of("order", seed, epoch)
            rows["order"] = _ORDERS[torch.randint(len(_ORDERS), (size,), generator=draws)]
        return rows

    def _factor_ranges(self) -> dict[str, tuple[float, float]]:
        """For each kind of jitter that is on, between which values its factor is drawn."""
        ranges = {
            name: (max(0.0, 1 - strength), 1 + strength)
            for name in ("brightness", "contrast", "saturation")
            if (strength := getattr(self, name))
        }
        if self.hue:
            ranges["hue"] = (-self.hue, self.hue)
        return ranges


def _generator_of(parameter: str, seed: int, epoch: int) -> torch.Generator:
    return generator(AUGMENTATION, seed, epoch, _PARAMETERS.index(parameter))


def augment(images: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """Apply the parameters of each sample to it.

    Nothing waits for the device: every decision is made on the CPU, from `rows`.

    Args:
        images: uint8 [B, C, H, W] on any device; jittering colours needs C = 1 or 3.
        rows: for each of these samples its row of `Augmentation.table`, on the CPU.

    Returns:
        float32 [B, C, H, W] in [0, 1], on the device and in the memory format of `images`.
        With empty `rows` it is `images.float() / 255`.
    """
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise ValueError(
            f"images must be uint8 [B, C, H, W], not {images.dtype} {list(images.shape)}"
        )
    pixels = _crop_and_flip(images, rows) if rows.keys() & {"top", "flip"} else images
    # Like `images`, since the gather is always contiguous; the conversion copies in any case.
    floats = torch.empty_like(images, dtype=torch.float32).copy_(pixels).div_(255)
    if "order" in rows:
        _jitter_(floats, rows)
    return floats


def _crop_and_flip(images: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """Both as one gather; uint8 [B, C, H, W], contiguous."""
    batch, channels, height, width = images.shape
    y = torch.arange(height, device=images.device).expand(batch, height)
    x = torch.arange(width, device=images.device).expand(batch, width)
    if "flip" in rows:
        x = torch.where(_send(rows["flip"], images.device)[:, None], x.flip(1), x)
    if "top" in rows:
        y = y + _send(rows["top"], images.device)[:, None]
        x = x + _send(rows["left"], images.device)[:, None]
    # A frame of one zero pixel is enough for any padding: all that lies outside reads from it.
    framed = F.pad(images, (1, 1, 1, 1)).flatten(2)
    y, x = y.clamp(-1, height) + 1, x.clamp(-1, width) + 1
    index = (y[:, :, None] * (width + 2) + x[:, None, :]).view(batch, 1, height * width)
    return framed.gather(2, index.expand(-1, channels, -1)).view(images.shape)


def _jitter_(images: Tensor, rows: Mapping[str, Tensor]) -> None:
    """Adjust the colours of float images in place, each in its own order.

    In each of the four turns, the samples whose turn it is for the same adjustment go together.
    """
    channels = images.shape[1]
    if channels not in (1, 3):
        raise ValueError(f"colours can be jittered with 1 or 3 channels, not {channels}")
    coloured = {"saturation", "hue"} if channels == 1 else set()
    for turn in rows["order"].unbind(1):
        for number, (name, adjust) in enumerate(_ADJUSTMENTS.items()):
            if name not in rows or name in coloured:
                continue
            chosen = (turn == number).nonzero().squeeze(1)
            factors = _send(rows[name][chosen], images.device)[:, None, None, None]
            chosen = _send(chosen, images.device)
            images[chosen] = adjust(images[chosen], factors)


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a small temporary tensor without waiting, where that is safe.

    CUDA copies pageable memory to a staging buffer before it returns; MPS may read it after it
    was freed (pytorch#189690).
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


# The adjustments follow torchvision.transforms.v2.functional on floats. They take [b, C, H, W]
# and a factor [b, 1, 1, 1]. To be bitwise the same in every batch they keep to operations that
# round each element once, whatever the loop around them, and to sums whose order cannot matter.


def _adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    return (images * factors).clamp_(0, 1)


def _adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    grey = _grey(images) if images.shape[1] == 3 else images
    # In integers: a sum of floats would depend on how it is split among threads.
    total = (grey * _FIXED_POINT).to(torch.int64).sum((2, 3), keepdim=True)
    pixels = images.shape[2] * images.shape[3]
    return _blend(images, total.to(torch.float32) / (_FIXED_POINT * pixels), factors)


def _adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(images, _grey(images), factors)


def _adjust_hue(images: Tensor, factors: Tensor) -> Tensor:
    """Turn the hue, at constant value and chroma.

    With hue H in sixths of a turn, value V and chroma C, a channel is
    V - C · max(0, min(k, 4 - k, 1)) where k = (n + H) mod 6 and n = 5, 3, 1 for red, green, blue.
    Source: https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    """
    value, chroma, hue = _to_value_chroma_hue(images)
    hue = hue + factors * 6
    channels = []
    for n in (5, 3, 1):
        k = (hue + n).remainder_(6)
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp_(0, 1))
    return torch.cat(channels, 1).clamp_(0, 1)


def _to_value_chroma_hue(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each [b, 1, H, W]; the hue in sixths of a turn, from -1 to 5, with red at 0."""
    red, green, blue = images.chunk(3, 1)
    value = images.amax(1, keepdim=True)
    chroma = value - images.amin(1, keepdim=True)
    divisor = torch.where(chroma == 0, 1, chroma)  # a grey pixel may have any hue
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    return value, chroma, hue


def _grey(images: Tensor) -> Tensor:
    red, green, blue = (
        channel * weight for channel, weight in zip(images.chunk(3, 1), _GREY_WEIGHTS, strict=True)
    )
    return red + green + blue


def _blend(images: Tensor, others: Tensor, factors: Tensor) -> Tensor:
    return (images * factors + others * (1 - factors)).clamp_(0, 1)


_ADJUSTMENTS = {
    "brightness": _adjust_brightness,
    "contrast": _adjust_contrast,
    "saturation": _adjust_saturation,
    "hue": _adjust_hue,
}
_ORDERS = torch.tensor(list(itertools.permutations(range(len(_ADJUSTMENTS)))))
_PARAMETERS = ("top", "left", "flip", *_ADJUSTMENTS, "order")
"""Places in this list are part of the keys of the generators: new parameters go to the end."""
