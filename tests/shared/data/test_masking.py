"""SpecAugment: what is hidden stays inside the sequence, and depends on the sample alone."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.data.masking import Masking

SHARES = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def rows_of(masking: Masking, size: int, seed: int = 0, epoch: int = 0):
    return masking.table(size, seed, epoch)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    count=st.integers(0, 3),
    share=SHARES,
    feature_count=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_masks_stay_inside_and_are_no_longer_than_they_may_be(
    lengths, count, share, feature_count, seed
):
    masking = Masking(count, share, feature_count, share)
    lengths = torch.tensor(lengths)
    shape = torch.Size((len(lengths), int(lengths.max()) + 2, 10))
    hidden = masking.hidden(lengths, shape, rows_of(masking, len(lengths), seed))
    assert hidden.shape == shape
    for row, length in enumerate(lengths.tolist()):
        padding = hidden[row, length:]
        assert (padding == padding[0]).all(), "only bands go on into the padding"
        assert padding[0].sum() <= feature_count * int(share * 10)
        frames = hidden[row, :length][:, ~padding[0]]  # what no band hides
        if frames.shape[1]:
            assert torch.equal(frames.any(1), frames.all(1))
            assert frames.any(1).sum() <= count * int(share * length)


def test_a_row_depends_on_seed_epoch_and_sample_alone():
    masking = Masking(time_masks=2, feature_masks=1)
    few, many = rows_of(masking, 5), rows_of(masking, 50)
    for name in ("time", "features"):
        assert torch.equal(few[name], many[name][:5])
        assert not torch.equal(few[name], rows_of(masking, 5, epoch=1)[name])
        assert not torch.equal(few[name], rows_of(masking, 5, seed=1)[name])
    assert not torch.equal(few["time"][:, :1], few["features"])


def test_the_width_of_the_batch_does_not_move_a_mask():
    masking = Masking(time_masks=2, time_mask=0.5)
    rows = rows_of(masking, 3)
    lengths = torch.tensor([9, 4, 7])
    narrow = masking.hidden(lengths, torch.Size((3, 9, 2)), rows)
    wide = masking.hidden(lengths, torch.Size((3, 20, 2)), rows)
    assert narrow.any()
    assert torch.equal(wide[:, :9], narrow)
    assert not wide[:, 9:].any()


def test_masks_begin_and_end_anywhere():
    masking = Masking(time_masks=1, time_mask=0.5)
    lengths = torch.full((2000,), 10)
    hidden = masking.hidden(lengths, torch.Size((2000, 10, 1)), rows_of(masking, 2000))[..., 0]
    assert hidden.any(0).all()
    assert set(hidden.sum(1).tolist()) == set(range(6))


def test_nothing_is_hidden_by_default():
    assert rows_of(Masking(), 4) == {}
    assert not Masking().hidden(torch.tensor([2]), torch.Size((1, 3, 2)), {}).any()
