"""Image data sets: small ones are decoded once and kept as uint8."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from shared import seeding
from shared.data.augment import Augmentation, augment
from shared.data.decoding import (
    Chosen,
    DecodedFiles,
    Ragged,
    check_files,
    decode_all,
    usable_cores,
)
from shared.data.folders import Listing, list_parts, published, with_places
from shared.data.image_files import SUFFIXES, decode, decoded_bytes
from shared.data.loading import micro_batches, seed_sample
from shared.data.sampling import SampleKey
from shared.data.splits import PARTS, Splits, carve, check_labels, spread
from shared.devices import move
from shared.distributed import check_same, main_goes_first
from shared.settings import LARGEST, RunConfig

SMALL = 64
"""Images of one size up to this are trained on as they are, with padded crops."""


class ImageBatch(NamedTuple):
    """Images uint8 [B, C, H, W], labels int64 [B], and their indices in the set, int64 [B].

    When they are prepared, images are float.
    """

    inputs: Tensor
    labels: Tensor
    indices: Tensor

    @property
    def samples(self) -> int:
        """Number of images."""
        return len(self.labels)

    def split(self, parts: int) -> list["ImageBatch"]:
        """At most `parts` micro-batches, whose sizes differ by one at most; none is empty."""
        return micro_batches(self, parts)


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
    """Images with labels.

    Args:
        images: uint8 [N, C, H, W], all of one size; or a sequence of [C, H, W] of any size,
            decoded already or when it is asked for them, which then needs a `transform`.
        labels: int64 [N].
        classes: the name of each label.
        transform: applied to each image, uint8 [C, H, W], when it is read. The global generators
            of Python, NumPy and PyTorch are set before each call from (seed, epoch, index), so
            its draws depend neither on the number of workers nor on where a run was interrupted.
        seed: of the run, for `transform`.

    Raises:
        UserError: a label is not that of a class.
    """

    images: Tensor | Sequence[Tensor]
    labels: Tensor
    classes: tuple[str, ...]
    transform: Callable[[Tensor], Tensor] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_labels(self.labels, self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, keys: list[SampleKey]) -> ImageBatch:
        indices = torch.tensor([key.sample for key in keys])
        if self.transform is None:
            assert isinstance(self.images, Tensor)
            return ImageBatch(self.images[indices], self.labels[indices], indices)
        images = []
        for key in keys:
            seed_sample(self.seed, key)
            images.append(self.transform(self.images[key.sample]))
        return ImageBatch(torch.stack(images), self.labels[indices], indices)

    @property
    def workers(self) -> int:
        """Processes that make reading fast: none where there is nothing to decode or to crop."""
        return 0 if self.transform is None else usable_cores()

    @property
    def shape(self) -> torch.Size:
        """[C, H, W] of every image that is read."""
        if self.transform is None:
            assert isinstance(self.images, Tensor)
            return self.images.shape[1:]
        return self.__getitems__([SampleKey(0, 0)]).inputs.shape[1:]

    def subset(self, indices: Tensor) -> Self:
        """The samples at `indices`, int64 [n], in that order."""
        if isinstance(self.images, Tensor):
            images: Tensor | Sequence[Tensor] = self.images[indices]
        else:
            images = Chosen(self.images, indices.tolist())
        return replace(self, images=images, labels=self.labels[indices])

    def normalization(self) -> Normalization:
        """The statistics of this set; of a part of it where images are not of one size.

        A channel without contrast is shifted, and not scaled.
        """
        # Counting levels is exact, and needs no float copy of the set.
        if isinstance(self.images, Tensor):
            counts = _count_levels(self.images.transpose(0, 1))
        else:
            counts = torch.stack([_count_levels(im) for im in spread(self, 2000).images]).sum(0)
        levels = torch.arange(256, dtype=torch.float64) / 255
        shares = counts / counts.sum(1, keepdim=True)
        mean = (shares * levels).sum(1)
        std = (shares * (levels - mean[:, None]) ** 2).sum(1).sqrt()
        return Normalization(mean.tolist(), [value or 1.0 for value in std.tolist()])


def _count_levels(channels: Tensor) -> Tensor:
    """How often each of the 256 levels is in each channel; uint8 [C, ...] to float64 [C, 256]."""
    return torch.stack([torch.bincount(c.flatten(), minlength=256) for c in channels]).double()


@dataclass(frozen=True)
class Preparation:
    """What lies between the images of a set and the network, for a whole batch on the device."""

    normalization: Normalization
    augmentation: Augmentation
    """Its `table` gives the rows of an epoch."""
    device: torch.device
    channels_last: bool = False

    def __call__(self, batch: ImageBatch, rows: Mapping[str, Tensor] | None = None) -> ImageBatch:
        """Move a batch of uint8 images, augment it, and make normalized floats of it.

        Args:
            batch: as a set gives it.
            rows: augmentation of every sample of the set; none to evaluate.
        """
        own_rows = {name: column[batch.indices] for name, column in (rows or {}).items()}
        batch = move(batch, self.device)
        inputs = self.normalization(augment(batch.inputs, own_rows))
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return batch._replace(inputs=inputs)


@dataclass(frozen=True)
class ImageConfig(RunConfig):
    """Which images to train on, and how they are read."""

    data: Literal["digits", "synthetic", "cifar10", "imagefolder"] = "digits"
    """digits ship with the package; synthetic is noise; cifar10; imagefolder: your own."""
    data_dir: Path | None = None
    """Folder of cifar10 or imagefolder: class folders, perhaps below train, val and test."""
    download: bool = False
    """Fetch cifar10 into --data-dir."""
    image_size: int | None = None
    """Crop and resize to this height and width. Default: small images of one size stay as they
    are, others get 224."""
    cache_gb: float = 4.0
    """Sets that take less memory are decoded once; larger ones each time, by workers."""
    balance: bool = False
    """Draw samples so that all classes are seen equally often; some come again in an epoch."""
    channels_last: bool = False
    """Store images and kernels with channels innermost, which many devices prefer."""
    crop_padding: int = 1
    """Augmentation: zero pixels around an image before it is cropped back to its size. Images that
    are cropped at random already have none."""
    flip: bool = False
    """Augmentation: mirror half of the images. Not for digits."""
    color_jitter: float = 0.0
    """Augmentation: strength of random brightness, contrast and saturation, as in torchvision."""
    hue: float = 0.0
    """Augmentation: strength of random hue, at most 0.5."""
    check_data: bool = False
    """Train nothing: read every file of imagefolder, and name all that are broken."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, a line each."""
        yield from super().problems()
        yield from self.outside(1, math.inf, "image_size")
        yield from self.outside(0, math.inf, "cache_gb")
        yield from self.outside(0, LARGEST, "crop_padding", "color_jitter")
        yield from self.outside(0, 0.5, "hue")
        has_folder = self.data in ("cifar10", "imagefolder")
        if has_folder and self.data_dir is None:
            yield f"--data {self.data} needs --data-dir"
        if not has_folder:
            yield from self.ignored(f"--data {self.data} has no folder", "data_dir")
        if self.data != "imagefolder":
            yield from self.ignored(f"--data {self.data} has no files to decode", "cache_gb")
        if self.download and self.data != "cifar10":
            yield f"--download: there is nothing to fetch for --data {self.data}"
        if self.check_data and self.data != "imagefolder":
            yield f"--check-data: --data {self.data} has no files of yours"

    def augmentation(self, part: ImageSet) -> Augmentation:
        """What happens to the training images of a set when they are on the device."""
        padding = self.crop_padding if part.transform is None else 0
        strength = self.color_jitter
        return Augmentation(padding, self.flip, strength, strength, strength, self.hue)


def load(config: ImageConfig) -> Splits[ImageSet]:
    """Read the data set that the settings name.

    Raises:
        UserError: it is not there, or something is wrong with it; all that is, at once. Or another
            process has read another one.
    """
    splits = _load(config)
    labels = [(part.classes, part.labels.tolist()) for part in splits]
    check_same(f"--data {config.data}: classes and labels", labels)
    return splits


def _load(config: ImageConfig) -> Splits[ImageSet]:
    match config.data:
        case "digits":
            splits = _digits()
        case "synthetic":
            splits = _synthetic(config.seed)
        case "cifar10":
            splits = _cifar10(config)
        case "imagefolder":
            return _imagefolder(config)
    if config.image_size in (None, splits.train.shape[-1]):
        return splits
    return _cropped(splits, config.image_size, config.seed)


def check(config: ImageConfig) -> dict[str, Any]:
    """Read every file of the folder, and print a line for each that is broken."""
    assert config.data_dir is not None
    return check_files(config.data_dir, SUFFIXES, decode, "images")


def _cropped(splits: Splits[ImageSet], size: int, seed: int) -> Splits[ImageSet]:
    """Let images of any size be read as squares: random parts to train, their middle to test.

    The usual recipe of Szegedy et al., Going Deeper with Convolutions, 2014, section 6: 8 to
    100 % of the area at 3:4 to 4:3. For testing the shorter side becomes 8/7 of the square.
    """
    from torchvision.transforms import v2

    middle = v2.Compose([v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size)])
    return Splits(
        replace(splits.train, transform=v2.RandomResizedCrop(size), seed=seed),
        replace(splits.val, transform=middle),
        replace(splits.test, transform=middle),
    )


def _imagefolder(config: ImageConfig) -> Splits[ImageSet]:
    """Class folders of image files; small sets are decoded once, large ones stream."""
    assert config.data_dir is not None
    listings = list_parts(config.data_dir, SUFFIXES)
    paths = [path for name in PARTS for path in listings[name].paths]
    gigabytes = decoded_bytes(paths) / 1e9
    fits = gigabytes <= config.cache_gb
    print(
        f"{config.data_dir}: {len(paths):,} images of {len(listings['train'].classes)} classes, "
        f"{gigabytes:.2f} GB decoded: "
        + ("kept in memory" if fits else "more than --cache-gb, so decoded each time")
    )
    if fits:
        whole = Ragged(decode_all(paths, decode, usable_cores()))
        if _stay_as_they_are(whole, config.image_size):
            return _split(whole.stacked(), listings)
        return _cropped(_split(whole, listings), config.image_size or 224, config.seed)
    return _cropped(
        _split(DecodedFiles(paths, decode), listings), config.image_size or 224, config.seed
    )


def _stay_as_they_are(images: Ragged, size: int | None) -> bool:
    """Whether images are trained on without resizing: all of one size, asked for or small."""
    if len(images.shapes) != 1:
        return False
    ((_, height, width),) = images.shapes
    return (height, width) == (size, size) if size else max(height, width) <= SMALL


def _split(images: Tensor | Sequence[Tensor], listings: Mapping[str, Listing]) -> Splits[ImageSet]:
    """Hand out images, which are in the order of the listings, to the parts."""
    parts = []
    for listing, places in with_places(listings):
        own: Tensor | Sequence[Tensor]
        if isinstance(images, Tensor):
            own = images[places.start : places.stop]
        else:
            own = Chosen(images, places)
        parts.append(ImageSet(own, listing.labels, listing.classes))
    return Splits(*parts)


def _cifar10(config: ImageConfig) -> Splits[ImageSet]:
    """The original CIFAR-10; a tenth of its training part validates."""
    from torchvision.datasets import CIFAR10

    parts = []
    for train in (True, False):
        with main_goes_first(), published("CIFAR-10", config.data_dir, config.download):
            part = CIFAR10(str(config.data_dir), train=train, download=config.download)
        images = torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous()
        parts.append(ImageSet(images, torch.tensor(part.targets), tuple(part.classes)))
    rest, validation = carve(parts[0].labels)
    return Splits(parts[0].subset(rest), parts[0].subset(validation), parts[1])


def _digits() -> Splits[ImageSet]:
    """1,797 handwritten digits of 8×8 greys; docs/data/digits.md is their data card."""
    with files("shared.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        whole = ImageSet(
            images=torch.from_numpy(arrays["images"]).unsqueeze(1),
            labels=torch.from_numpy(arrays["labels"]).long(),
            classes=tuple("0123456789"),
        )
        parts = (torch.from_numpy(arrays[part]).long() for part in ("train", "val", "test"))
        return Splits(*(whole.subset(indices) for indices in parts))


def _synthetic(seed: int, size: int = 32, classes: int = 10) -> Splits[ImageSet]:
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
