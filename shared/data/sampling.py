"""Which samples make up a batch: the order of an epoch, and the position in it."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shared import seeding
from shared.distributed import rank, world_size

POOL = 64
"""Batches among which sequences are sorted by length."""


JITTER = 0.03
"""Largest share by which a sequence counts as longer than it is when it is sorted: with more of it
batches differ more from epoch to epoch, and have more padding."""


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


def bucketed(order: Tensor, lengths: Tensor, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Rearrange an order so that batches hold sequences of like length, and come in any order.

    Sequences are sorted within pools of `POOL` batches, by their length times a factor that is
    drawn anew in every epoch: so batches are other ones, also where the set is but one pool. The
    batch that is not full comes last; it too holds sequences of like length, of any.

    Args:
        order: of the samples, int64 [size], a function of (seed, epoch).
        lengths: of every sample of the set, int64.
        batch_size: samples in a batch.
        seed: of the run.
        epoch: number of it.
    """
    generator = seeding.generator(seeding.BUCKETS, seed, epoch)
    factors = 1 + JITTER * torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    keys = lengths * factors
    pools = order.split(POOL * batch_size)
    pools = [pool[keys[pool].argsort(stable=True)] for pool in pools]
    rest = len(order) % batch_size
    whole = len(pools[-1]) // batch_size  # batches of the last pool, the only one with a rest
    start = batch_size * int(torch.randint(whole + 1, (), generator=generator))
    before, last, after = pools[-1].tensor_split([start, start + rest])
    batches = torch.cat([*pools[:-1], before, after]).view(-1, batch_size)
    shuffled = batches[torch.randperm(len(batches), generator=generator)]
    return torch.cat([shuffled.flatten(), last])


def padding_share(order: Tensor, lengths: Tensor, batch_size: int) -> float:
    """Share of the steps of padded batches that are padding."""
    batches = lengths[order].split(batch_size)
    steps = sum(int(batch.max()) * len(batch) for batch in batches)
    return 1 - int(lengths[order].sum()) / steps


def balancing_weights(labels: Tensor) -> Tensor:
    """Weights with which every class is drawn equally often; float64 [N] for labels int64 [N]."""
    return 1 / labels.bincount().double()[labels]


def smallest_micro_batch(size: int, batch_size: int, accumulate: int) -> int:
    """Samples in the smallest micro-batch of an epoch; 0 if there are more processes than samples.

    Args:
        size: of the set.
        batch_size: samples in a batch; the last one holds what is left.
        accumulate: micro-batches that a process's share of a batch is split into, as evenly as
            can be.
    """
    batches = {min(batch_size, size), size % batch_size or batch_size}
    share = min(batches) // world_size()
    return share // min(accumulate, share) if share else 0


class BatchSampler(Sampler[list[SampleKey]]):
    """The batches of an epoch, from a position on; of each, this process's share.

    Batches are the same ones whatever the number of processes, which cut them as evenly as can be.
    A process that gets nothing of a batch passes over it.

    It runs in the main process and hands workers the keys, so that workers that outlive an epoch
    see the new order too (pytorch#31771). The last batch holds what is left.

    Args:
        size: number of samples in the set.
        batch_size: samples in a batch, over all processes.
        seed: of the run.
        shuffle: False gives the order of the set, or that of the lengths if there are any.
        weights: of the samples, float [size], to draw them with replacement.
        lengths: of the samples, int64 [size], to put those of like length into a batch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        shuffle: bool,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.weights = weights
        self.lengths = lengths
        self.epoch = 0
        self.start = 0
        """Samples of this epoch that were already used."""

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """The samples of an epoch, int64 [size]."""
        if not self.shuffle:
            return (
                torch.arange(self.size)
                if self.lengths is None
                else self.lengths.argsort(stable=True)
            )
        order = epoch_order(self.size, self.seed, epoch, self.weights)
        if self.lengths is None:
            return order
        return bucketed(order, self.lengths, self.batch_size, self.seed, epoch)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = self.order(self.epoch)
        if self.start >= self.size:  # split would give one empty batch
            return
        for batch in torch.split(order[self.start :], self.batch_size):
            share = batch.tensor_split(world_size())[rank()]
            if len(share):
                yield [SampleKey(self.epoch, sample) for sample in share.tolist()]
