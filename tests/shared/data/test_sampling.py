"""The order of an epoch, and the position in it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.data.sampling import (
    POOL,
    BatchSampler,
    SampleKey,
    balancing_weights,
    bucketed,
    epoch_order,
    padding_share,
    smallest_micro_batch,
)

sizes = st.integers(0, 50)
seeds = st.integers(0, 2**40)
epochs = st.integers(0, 2**31)


def sampler(size, batch_size, seed=0, shuffle=True, epoch=0, start=0):
    sampler = BatchSampler(size, batch_size, seed, shuffle)
    sampler.epoch, sampler.start = epoch, start
    return sampler


@given(sizes, seeds, epochs)
def test_an_epoch_has_every_sample_once(size, seed, epoch):
    order = epoch_order(size, seed, epoch)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(size))


def test_an_order_depends_on_seed_and_epoch_alone():
    first = epoch_order(100, 1, 2)
    torch.manual_seed(123)
    torch.rand(7)
    assert torch.equal(epoch_order(100, 1, 2), first)
    assert not torch.equal(epoch_order(100, 1, 3), first)
    assert not torch.equal(epoch_order(100, 2, 2), first)
    assert not torch.equal(epoch_order(100, 2, 1), first)


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [6, 3, 1, 5, 8, 7, 0, 2, 9, 4]),
        (0, 1, [3, 6, 0, 2, 9, 4, 5, 8, 7, 1]),
        (1, 0, [4, 8, 5, 0, 7, 6, 2, 3, 9, 1]),
    ],
)
def test_orders_never_change(seed, epoch, expected):
    """Another order here makes every run another run."""
    assert epoch_order(10, seed, epoch).tolist() == expected


@given(st.integers(1, 50), st.integers(1, 60), seeds, epochs, st.booleans())
def test_batches_are_the_order_cut_up(size, batch_size, seed, epoch, shuffle):
    whole = sampler(size, batch_size, seed, shuffle, epoch)
    batches = list(whole)
    order = epoch_order(size, seed, epoch).tolist() if shuffle else list(range(size))
    assert [key for batch in batches for key in batch] == [SampleKey(epoch, i) for i in order]
    assert len(batches) == len(whole)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size


@given(st.data(), st.integers(1, 50), st.integers(1, 60), st.booleans())
def test_an_epoch_that_is_continued_is_the_rest_of_the_whole(data, size, batch_size, shuffle):
    whole = list(sampler(size, batch_size, 3, shuffle, 4))
    done = data.draw(st.integers(0, len(whole)))
    start = sum(len(batch) for batch in whole[:done])
    assert list(sampler(size, batch_size, 3, shuffle, 4, start)) == whole[done:]


@given(st.data(), st.integers(1, 50), st.integers(1, 60), st.integers(1, 60))
def test_another_batch_size_goes_on_with_the_samples_that_are_left(data, size, before, now):
    start = data.draw(st.integers(0, size))
    order = epoch_order(size, 3, 4).tolist()
    batches = list(sampler(size, now, 3, True, 4, start))
    assert [key.sample for batch in batches for key in batch] == order[start:]
    assert all(len(batch) == now for batch in batches[:-1])
    assert all(batches)


def test_an_empty_set_has_no_batches():
    assert list(sampler(0, 4)) == []
    assert len(sampler(0, 4)) == 0


def test_keys_are_plain_numbers():
    """They go to workers, for whom pickling a tensor costs a file descriptor."""
    ((key,),) = sampler(1, 1)
    assert type(key.sample) is type(key.epoch) is int


def test_weights_draw_with_replacement_and_balance_classes():
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)
    weights = balancing_weights(labels)
    order = epoch_order(1000, seed=0, epoch=0, weights=weights)
    assert torch.equal(order, epoch_order(1000, seed=0, epoch=0, weights=weights))
    assert not torch.equal(order, epoch_order(1000, seed=0, epoch=1, weights=weights))
    assert labels[order].bincount().tolist() == pytest.approx([333] * 3, abs=60)
    assert len(order.unique()) < 600
    sampler = BatchSampler(1000, 64, seed=0, shuffle=True, weights=weights)
    assert [key.sample for batch in sampler for key in batch] == order.tolist()


def test_weights_of_the_wrong_length_are_refused():
    with pytest.raises(ValueError, match="5 samples need as many weights"):
        epoch_order(5, seed=0, epoch=0, weights=torch.ones(4))


@given(st.lists(st.integers(1, 90), max_size=60), st.integers(1, 9), seeds, epochs)
def test_buckets_hold_every_sample_once(lengths, batch_size, seed, epoch):
    order = epoch_order(len(lengths), seed, epoch)
    lengths = torch.tensor(lengths, dtype=torch.int64)
    found = bucketed(order, lengths, batch_size, seed, epoch)
    assert sorted(found.tolist()) == list(range(len(lengths)))
    for batch in found.split(batch_size):
        own = sorted(lengths[batch].tolist())
        clearly_between = [n for n in lengths.tolist() if own[0] * 1.05 < n < own[-1] / 1.05]
        assert len(clearly_between) < 2 * batch_size, "of this batch, or of the last one"


def test_batches_of_one_pool_are_of_like_length_and_come_in_any_order():
    lengths = torch.arange(160)
    found = bucketed(epoch_order(160, 0, 0), lengths, 16, 0, 0).view(10, 16)
    spans = [sorted(batch.tolist()) for batch in found]
    assert all(span[-1] - span[0] < 16 + 2 * 0.03 * 160 for span in spans)
    firsts = [span[0] for span in spans]
    assert firsts != sorted(firsts)


def test_batches_change_with_the_epoch_where_all_is_one_pool_of_unequal_lengths():
    lengths = torch.arange(1000, 1640)
    first, second = (
        {frozenset(batch.tolist()) for batch in bucketed(order, lengths, 64, 0, epoch).split(64)}
        for epoch, order in enumerate([epoch_order(640, 0, 0)] * 2)
    )
    assert not first & second


def test_pools_change_with_the_epoch_so_that_batches_do():
    size = 3 * POOL * 4
    lengths = torch.randint(1, 100, (size,), generator=torch.Generator().manual_seed(0))
    batches = [
        {
            frozenset(b.tolist())
            for b in bucketed(epoch_order(size, 0, e), lengths, 4, 0, e).split(4)
        }
        for e in (0, 0, 1)
    ]
    assert batches[0] == batches[1]
    assert len(batches[0] & batches[2]) < size // 4 // 10


def test_padding_is_counted_and_buckets_lessen_it():
    # Batches of 3 + 1 and 2 + 2 steps, padded to 6 and 4.
    assert padding_share(torch.arange(4), torch.tensor([1, 3, 2, 2]), 2) == pytest.approx(0.2)
    lengths = torch.randint(20, 101, (2000,), generator=torch.Generator().manual_seed(0))
    order = epoch_order(2000, 0, 0)
    assert 0.3 < padding_share(order, lengths, 64) < 0.5
    assert padding_share(bucketed(order, lengths, 64, 0, 0), lengths, 64) < 0.05


@pytest.mark.parametrize("start", [0, 8, 20])
def test_a_position_in_buckets_is_a_position_in_their_order(start):
    lengths = torch.tensor([5, 1, 9, 3, 7, 2, 8, 4, 6, 1] * 3)
    whole = BatchSampler(30, 4, 3, shuffle=True, lengths=lengths)
    rest = BatchSampler(30, 4, 3, shuffle=True, lengths=lengths)
    whole.epoch = rest.epoch = 2
    rest.start = start
    assert list(rest) == list(whole)[start // 4 :]


def test_evaluation_goes_by_length():
    lengths = torch.tensor([5, 1, 9, 3])
    (batch,) = BatchSampler(4, 9, 0, shuffle=False, lengths=lengths)
    assert [key.sample for key in batch] == [1, 3, 0, 2]


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_the_smallest_micro_batch_is_the_smallest(size, batch_size, accumulate):
    micros = [
        len(micro)
        for batch in torch.arange(size).split(batch_size)
        for micro in batch.tensor_split(min(accumulate, len(batch)))
    ]
    assert smallest_micro_batch(size, batch_size, accumulate) == min(micros)
