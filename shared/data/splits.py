"""Training, validation and test parts of a data set."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from shared import seeding
from shared.errors import UserError

PARTS = ("train", "val", "test")
"""Names of the parts, and of the folders that hold them."""

CARVED = 0.1
"""Share of each class that a part is given where a data set does not have it."""


class Part(Protocol):
    """What splitting has to know of a set of samples."""

    def __len__(self) -> int: ...

    def subset(self, indices: Tensor) -> Self:
        """The samples at `indices`, int64 [n], in that order."""


PartT = TypeVar("PartT", bound=Part)


class Splits(NamedTuple, Generic[PartT]):
    """Training, validation (for every choice) and test (touched once, at the end)."""

    train: PartT
    val: PartT
    test: PartT

    def spread(self, size: int) -> "Splits[PartT]":
        """`size` samples of each part, or all when there are fewer, evenly spread."""
        return Splits(*(spread(part, size) for part in self))


def spread(part: PartT, size: int) -> PartT:
    """`size` samples, or all when there are fewer, evenly spread: some of every class."""
    size = min(size, len(part))
    return part.subset(torch.arange(size) * len(part) // size)


def check_labels(labels: Tensor, classes: Sequence[str]) -> None:
    """Raise a UserError for the first label, of int64 [N], that is not that of a class."""
    outside = ((labels < 0) | (labels >= len(classes))).nonzero()
    if len(outside):
        index = int(outside[0])
        raise UserError(
            f"sample {index} has the label {labels[index]}, but there are {len(classes)} classes"
        )


def carve(labels: Tensor, share: float = CARVED) -> tuple[Tensor, Tensor]:
    """Split indices by class: the rest, and a part that has `share` of every class.

    It depends on the labels alone. A class keeps its last sample for the rest.

    Args:
        labels: int64 [N].
        share: in (0, 1).
    """
    rest, part = [], []
    for label in labels.unique().tolist():
        own = (labels == label).nonzero().squeeze(1)
        order = torch.randperm(len(own), generator=seeding.generator(seeding.SPLIT, label))
        size = min(max(1, round(share * len(own))), len(own) - 1)
        part.append(own[order[:size]])
        rest.append(own[order[size:]])
    return torch.cat(rest).sort().values, torch.cat(part).sort().values
