"""Batches: the same with any number of workers, from any position, also after signals."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.data.images import ImageSet
from shared.data.loading import Loader, seed_sample
from shared.data.sampling import SampleKey, epoch_order

SIZE, BATCH = 23, 5


class Numbers(NamedTuple):
    samples_of: list[int]
    epochs: list[int]
    process: int

    @property
    def samples(self) -> int:
        return len(self.samples_of)


class Keys:
    """A set whose batches say what they were asked for, and by which process."""

    def __len__(self) -> int:
        return SIZE

    def __getitems__(self, keys: list[SampleKey]) -> Numbers:
        return Numbers([k.sample for k in keys], [k.epoch for k in keys], os.getpid())


def noise(image: Tensor) -> Tensor:
    """A transform that draws from all three global generators, as those found elsewhere do."""
    draws = [random.random(), np.random.rand(), torch.rand(()).item()]
    return torch.tensor(draws, dtype=torch.float64).view(3, 1, 1)


def noisy(size: int = SIZE, seed: int = 0) -> ImageSet:
    images = torch.zeros(size, 1, 1, 1, dtype=torch.uint8)
    return ImageSet(images, torch.arange(size), tuple(map(str, range(size))), noise, seed)


def samples(batches) -> list[int]:
    return [sample for batch in batches for sample in batch.samples_of]


def draws(loader: Loader, *epochs: int) -> Tensor:
    """What the transform drew, float64 [epochs, samples, generators], in the order of the set."""
    rows = []
    for epoch in epochs:
        batches = list(loader.epoch(epoch))
        indices = torch.cat([batch.indices for batch in batches])
        assert sorted(indices.tolist()) == list(range(loader.size)), "every sample once"
        rows.append(torch.cat([batch.inputs for batch in batches])[indices.argsort(), :, 0, 0])
    return torch.stack(rows)


# ------------------------------------------------------------------------------- orders, positions


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_have_their_own_orders_and_keep_them_when_abandoned(workers):
    """Workers outlive the epoch (pytorch#31771), and may hold batches of one that was left."""
    loader = Loader(Keys(), BATCH, seed=7, shuffle=True, workers=workers)
    orders = [epoch_order(SIZE, 7, epoch).tolist() for epoch in range(4)]
    processes = set()
    for epoch in (0, 1):
        batches = list(loader.epoch(epoch))
        assert len(batches) == len(loader) == 5
        assert samples(batches) == orders[epoch]
        assert {e for batch in batches for e in batch.epochs} == {epoch}
        processes |= {batch.process for batch in batches}
    abandoned = loader.epoch(2)
    assert samples([next(abandoned), next(abandoned)]) == orders[2][: 2 * BATCH]
    del abandoned
    assert samples(loader.epoch(3)) == orders[3]
    for start in (0, 1, BATCH, SIZE - 1, SIZE):
        assert samples(loader.epoch(2, start)) == orders[2][start:]
    assert samples(loader.epoch(0)) == orders[0]
    assert len(processes) == max(workers, 1), "the same workers for all epochs"
    assert (os.getpid() in processes) == (workers == 0)


def test_without_shuffling_the_order_is_that_of_the_set():
    loader = Loader(Keys(), BATCH)
    assert samples(loader.epoch()) == samples(loader.epoch(1)) == list(range(SIZE))


def test_an_empty_set_has_no_batches():
    loader = Loader(noisy(0), BATCH, shuffle=True)
    assert len(loader) == 0
    assert list(loader.epoch()) == []


# -------------------------------------------------------------------------------------- randomness


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")
def test_a_transform_draws_the_same_with_any_number_of_workers():
    """And every sample and epoch its own numbers, from each generator (pytorch#5059)."""
    loaders = [Loader(noisy(), BATCH, shuffle=True, workers=workers) for workers in (0, 1, 3)]
    alone, one, three = (draws(loader, 0, 1) for loader in loaders)
    assert torch.equal(alone, one)
    assert torch.equal(alone, three)
    for generator in alone.unbind(-1):
        assert len(generator.unique()) == 2 * SIZE


def test_a_transform_depends_on_seed_and_epoch_and_not_on_the_batch():
    first = draws(Loader(noisy(), BATCH), 3)
    assert torch.equal(draws(Loader(noisy(), 4, seed=9, shuffle=True), 3), first)
    for other in (draws(Loader(noisy(seed=1), BATCH), 3), draws(Loader(noisy(), BATCH), 4)):
        assert not (other == first).any()


def test_a_continued_epoch_draws_what_the_whole_one_did():
    loader = Loader(noisy(), BATCH, shuffle=True)
    whole = torch.cat([batch.inputs for batch in loader.epoch(2)])
    rest = torch.cat([batch.inputs for batch in loader.epoch(2, start=7)])
    assert torch.equal(rest, whole[7:])


def test_seeding_a_sample_sets_all_generators():
    def draw(*key: int) -> list[float]:
        seed_sample(key[0], SampleKey(*key[1:]))
        return noise(torch.empty(0)).flatten().tolist()

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    first = draw(1, 2, 3)
    assert draw(1, 2, 3) == first
    for other in (draw(0, 2, 3), draw(1, 0, 3), draw(1, 2, 0)):
        assert not set(other) & set(first)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_draws_nothing_from_the_global_generators(workers):
    def states():
        numpy_state = np.random.get_state()
        return random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state()

    before = states()
    loader = Loader(Keys(), BATCH, seed=7, shuffle=True, workers=workers)
    assert len(samples([*loader.epoch(0), *loader.epoch(1)])) == 2 * SIZE
    after = states()
    assert after[:-1] == before[:-1]
    assert torch.equal(after[-1], before[-1])


# ------------------------------------------------------------------------------- signals, failures


def test_signals_do_not_kill_a_worker():
    """The main process ends in order, and needs its workers for that (pytorch#119856)."""
    loader = Loader(Keys(), BATCH, workers=1)
    batches = loader.epoch()
    first = next(batches)
    for signum in ("TERM", "INT"):
        subprocess.run(["kill", f"-{signum}", str(first.process)], check=True)
    rest = [*batches, *loader.epoch(1)]
    assert samples([first, *rest]) == [*range(SIZE), *range(SIZE)]
    assert {batch.process for batch in rest} == {first.process}


def test_a_failing_transform_is_not_hidden():
    def fail(image: Tensor) -> Tensor:
        raise KeyError("a broken transform")

    with pytest.raises(KeyError, match="a broken transform"):
        list(Loader(replace(noisy(), transform=fail), BATCH).epoch())


FAILING = """
import torch
from shared.data.images import ImageSet
from shared.data.loading import Loader

def transform(image):
    if image.item() == 50:
        raise KeyError("a broken transform")
    return image

images = torch.arange(64, dtype=torch.uint8).view(64, 1, 1, 1)
loader = Loader(ImageSet(images, torch.zeros(64), ("a",), transform), 1, workers=1)
for batch in loader.epoch():
    print(batch.inputs.item())
"""


def test_a_transform_that_fails_in_a_worker_ends_the_program():
    """At exit Python sends SIGTERM to workers and waits for them: they must not ignore that."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.split() == [str(sample) for sample in range(50)]
    assert "a broken transform" in done.stderr
