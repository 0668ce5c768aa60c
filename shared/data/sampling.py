"""Which samples make up a batch: the order of an epoch, and the position in it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shared import seeding


class SampleKey(NamedTuple):
    """What a sample and its random choices are a function of, beside the seed of the run."""

    epoch: int
    sample: int
    """Its index in the data set."""


def epoch_order(size: int, seed: int, epoch: int, weights: Tensor | None = None) -> Tensor:
    """The samples of an epoch in order, int64 [size], a function of (seed, epoch) alone.

    Args:
        size: of the set.
        seed: of the run.
        epoch: number of it.
        weights: how often each sample is to be drawn in relation to others, float [size]; then
            samples are drawn with replacement. Without, each comes once.

    Raises:
        ValueError: there is not one weight for each sample.
    """
    generator = seeding.generator(seeding.ORDER, seed, epoch)
    if weights is None:
        return torch.randperm(size, generator=generator)
    if weights.shape != (size,):
        raise ValueError(f"{size} samples need as many weights, not {tuple(weights.shape)}")
    return torch.multinomial(weights, size, replacement=True, generator=generator)


def balancing_weights(labels: Tensor) -> Tensor:
    """Weights with which every class is drawn equally often; float64 [N] for labels int64 [N]."""
    return 1 / labels.bincount().double()[labels]


class BatchSampler(Sampler[list[SampleKey]]):
    """The batches of an epoch, from a position on.

    It runs in the main process and hands workers the keys, so that workers that outlive an epoch
    see the new order too (pytorch#31771). The last batch holds what is left.

    Args:
        size: number of samples in the set.
        batch_size: samples in a batch.
        seed: of the run.
        shuffle: False gives the order of the set.
        weights: of the samples, float [size], to draw them with replacement.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, shuffle: bool, weights: Tensor | None = None
    ) -> None:
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.weights = weights
        self.epoch = 0
        self.start = 0
        """Samples of this epoch that were already used."""

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """The samples of an epoch, int64 [size]."""
        if not self.shuffle:
            return torch.arange(self.size)
        return epoch_order(self.size, self.seed, epoch, self.weights)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = self.order(self.epoch)
        if self.start >= self.size:  # split would give one empty batch
            return
        for batch in torch.split(order[self.start :], self.batch_size):
            yield [SampleKey(self.epoch, sample) for sample in batch.tolist()]
