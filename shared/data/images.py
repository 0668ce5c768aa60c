"""Image data sets: small ones are decoded once and kept as uint8."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from shared import seeding
from shared.data.loading import seed_sample
from shared.data.sampling import SampleKey

Name = Literal["digits", "synthetic"]
"""Names that `load` knows."""


class ImageBatch(NamedTuple):
    """Images uint8 [B, C, H, W], labels int64 [B], and their indices in the set, int64 [B]."""

    images: Tensor
    labels: Tensor
    indices: Tensor

    @property
    def samples(self) -> int:
        """Number of images."""
        return len(self.labels)

    def split(self, parts: int) -> list["ImageBatch"]:
        """At most `parts` micro-batches, whose sizes differ by one at most; none is empty."""
        chunks = (tensor.tensor_split(min(parts, self.samples)) for tensor in self)
        return [ImageBatch(*micro) for micro in zip(*chunks, strict=True)]


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel of images scaled to [0, 1]."""

    mean: list[float]
    std: list[float]

    def __call__(self, images: Tensor) -> Tensor:
        """Shift and scale images [B, C, H, W] to mean 0 and standard deviation 1."""
        mean, std = (images.new_tensor(values)[:, None, None] for values in self)
        return (images - mean) / std


@dataclass(frozen=True)
class ImageSet:
    """Decoded images with labels.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        classes: the name of each label.
        transform: applied to each image, uint8 [C, H, W], when it is read. The global generators
            of Python, NumPy and PyTorch are set before each call from (seed, epoch, index), so
            its draws depend neither on the number of workers nor on where a run was interrupted.
        seed: of the run, for `transform`.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    transform: Callable[[Tensor], Tensor] | None = None
    seed: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: list[SampleKey]) -> ImageBatch:
        indices = torch.tensor([key.sample for key in keys])
        if self.transform is None:
            return ImageBatch(self.images[indices], self.labels[indices], indices)
        images = []
        for key in keys:
            seed_sample(self.seed, key)
            images.append(self.transform(self.images[key.sample]))
        return ImageBatch(torch.stack(images), self.labels[indices], indices)

    def subset(self, indices: Tensor) -> Self:
        """The samples at `indices`, int64 [n], in that order."""
        return replace(self, images=self.images[indices], labels=self.labels[indices])

    def head(self, size: int) -> Self:
        """The first `size` samples, or all when there are fewer."""
        return self.subset(torch.arange(min(size, len(self))))

    def normalization(self) -> Normalization:
        """The statistics of this set. A channel without contrast is shifted, and not scaled."""
        # Counting grey levels is exact, and needs no float copy of the set.
        levels = torch.arange(256, dtype=torch.float64) / 255
        mean, std = [], []
        for channel in self.images.unbind(1):
            share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
            mean.append((share * levels).sum().item())
            std.append((share * (levels - mean[-1]) ** 2).sum().sqrt().item() or 1.0)
        return Normalization(mean, std)


class Splits(NamedTuple):
    """Training, validation (for every choice) and test (touched once, at the end)."""

    train: ImageSet
    val: ImageSet
    test: ImageSet

    def head(self, size: int) -> "Splits":
        """The first `size` samples of each part."""
        return Splits(*(part.head(size) for part in self))


def load(name: Name, *, seed: int = 0) -> Splits:
    """Read a data set by its name.

    Args:
        name: `digits` ships with the package; `synthetic` is noise, for throughput.
        seed: of `synthetic`.
    """
    return _digits() if name == "digits" else _synthetic(seed)


def _digits() -> Splits:
    """1,797 handwritten digits of 8×8 greys; docs/data/digits.md is their data card."""
    with files("shared.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        whole = ImageSet(
            images=torch.from_numpy(arrays["images"]).unsqueeze(1),
            labels=torch.from_numpy(arrays["labels"]).long(),
            classes=tuple("0123456789"),
        )
        parts = (torch.from_numpy(arrays[part]).long() for part in ("train", "val", "test"))
        return Splits(*(whole.subset(indices) for indices in parts))


def _synthetic(seed: int, size: int = 32, classes: int = 10) -> Splits:
    """Noise of 3×32×32 with random labels: 2,048 to train, 256 each to validate and test."""
    generator = seeding.generator(seeding.SETUP, seed)
    counts = (2048, 256, 256)
    return Splits(
        *(
            ImageSet(
                images=torch.randint(
                    256, (count, 3, size, size), dtype=torch.uint8, generator=generator
                ),
                labels=torch.randint(classes, (count,), generator=generator),
                classes=tuple(str(label) for label in range(classes)),
            )
            for count in counts
        )
    )
