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


def epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    """A permutation of `range(size)`, int64 [size], that depends on (seed, epoch) alone."""
    return torch.randperm(size, generator=seeding.generator(seeding.ORDER, seed, epoch))


class BatchSampler(Sampler[list[SampleKey]]):
    """The batches of an epoch, from a position on.

    It runs in the main process and hands workers the keys, so that workers that outlive an epoch
    see the new order too (pytorch#31771). The last batch holds what is left.

    Args:
        size: number of samples in the set.
        batch_size: samples in a batch.
        seed: of the run.
        shuffle: False gives the order of the set.
    """

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.start = 0
        """Samples of this epoch that were already used."""

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = (
            epoch_order(self.size, self.seed, self.epoch)
            if self.shuffle
            else torch.arange(self.size)
        )
        if self.start >= self.size:  # split would give one empty batch
            return
        for batch in torch.split(order[self.start :], self.batch_size):
            yield [SampleKey(self.epoch, sample) for sample in batch.tolist()]
