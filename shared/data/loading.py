"""Bringing batches to the training loop."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shared import interruption, seeding
from shared.data.sampling import BatchSampler, SampleKey
from shared.errors import UserError


class Batch(Protocol):
    """What loading and running have to know of a batch."""

    @property
    def samples(self) -> int:
        """Number of samples."""


BatchT = TypeVar("BatchT", bound=Batch)


BatchOfTensors = TypeVar("BatchOfTensors", bound=tuple[Tensor, ...])


def micro_batches(batch: BatchOfTensors, parts: int) -> list[BatchOfTensors]:
    """At most `parts` batches of nearly one size, none empty.

    Args:
        batch: a NamedTuple of tensors, whose first dimension are the samples.
        parts: of it.
    """
    chunks = (tensor.tensor_split(min(parts, len(batch[0]))) for tensor in batch)
    return [type(batch)(*micro) for micro in zip(*chunks, strict=True)]


class BatchSource(Protocol):
    """A data set that is asked for all samples of a batch at once, which can be much cheaper."""

    def __len__(self) -> int: ...
    def __getitems__(self, keys: list[SampleKey]) -> Any: ...


class Loader(Generic[BatchT]):
    """Batches of a data set, the same whatever the number of workers.

    Args:
        dataset: gives the samples of a list of keys, or the batch itself.
        batch_size: samples in a batch, over all processes, each of which gets its share; the last
            one of an epoch may be smaller.
        seed: of the run; the order of an epoch is a function of (seed, epoch).
        shuffle: False gives the order of the set, or that of the lengths if there are any.
        workers: processes that make batches ahead; 0 makes them in this process, when asked.
        pin: put batches into pinned memory, so that copies to a GPU do not block.
        weights: with which samples are drawn, with replacement; float [size].
        lengths: int64 [size]; then samples of like length make up a batch.
        collate: makes a batch from what the set gives, in a worker; by default it is one already.
    """

    def __init__(
        self,
        dataset: BatchSource,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = False,
        workers: int = 0,
        pin: bool = False,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        collate: Callable[[Any], BatchT] | None = None,
    ) -> None:
        self.size = len(dataset)
        """Samples in an epoch."""
        self.batch_size = batch_size
        self._sampler = BatchSampler(self.size, batch_size, seed, shuffle, weights, lengths)
        self._loader: DataLoader[BatchT] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=self._sampler,
            collate_fn=collate or _as_it_is,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin,
            worker_init_fn=_start_worker,
            generator=torch.Generator(),  # its own: the global one is left alone
        )

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._sampler)

    def order(self, epoch: int) -> Tensor:
        """The samples of an epoch in order, int64 [size]."""
        return self._sampler.order(epoch)

    def distinct_share(self, epoch: int) -> float:
        """Share of the set that an epoch uses: less than 1 when samples are drawn by weights."""
        return len(self.order(epoch).unique()) / self.size

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[BatchT]:
        """The batches of an epoch, without its first `start` samples.

        Raises:
            UserError: a file cannot be read, for example because it has gone.
        """
        self._sampler.epoch, self._sampler.start = epoch, start
        try:
            with interruption.sigterm_blocked():  # workers inherit it, with every thread of theirs
                batches = iter(self._loader)
            yield from batches
        except UserError as error:
            # A worker's error arrives with its traceback as text; the last line is the message.
            line = str(error).strip().splitlines()[-1]
            raise UserError(line.removeprefix("shared.errors.UserError: ")) from None


def _as_it_is(batch: BatchT) -> BatchT:
    return batch


def _start_worker(worker: int) -> None:
    interruption.shield_worker()


def seed_sample(seed: int, key: SampleKey) -> None:
    """Set the global generators for one sample: then any transform repeats with (seed, key)."""
    seeding.seed_everything(seeding.SAMPLE, seed, key.epoch, key.sample)
