"""Random streams: functions of their keys, the same everywhere and for ever."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.seeding import (
    AUGMENTATION,
    ORDER,
    SAMPLE,
    SETUP,
    STEP,
    generator,
    hash_key,
    seed_everything,
    seed_step,
    set_deterministic,
)

STREAMS = [ORDER, AUGMENTATION, SAMPLE, STEP, SETUP]


@pytest.fixture(autouse=True)
def _generators_as_before():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((ORDER, 0, 0), 15793235383387715774),
        ((ORDER, 3, 7), 13624784435053799765),
        ((STEP, 1, 2, 3, 4), 11749446289850403010),
        ((SAMPLE, 2**40, 5, 1796), 10833992671320400380),
    ],
)
def test_hashes_never_change(key, expected):
    """Another number here makes every run another run."""
    assert hash_key(*key) == expected


def test_draws_never_change():
    draws = torch.randint(1000, (5,), generator=generator(ORDER, 3, 7))
    assert draws.tolist() == [824, 835, 720, 527, 341]


keys = st.lists(st.integers(0, 2**32 - 1), min_size=5, max_size=5)


@given(keys, keys)
def test_different_keys_have_different_hashes(one, other):
    assume(one != other)
    assert hash_key(*one) != hash_key(*other)


@given(keys)
def test_a_hash_is_a_seed_that_torch_takes(key):
    assert 0 <= hash_key(*key) < 2**64
    generator(*key)


def test_a_negative_part_is_refused():
    with pytest.raises(ValueError, match="non-negative"):
        hash_key(ORDER, -1, 0)


def test_streams_with_equal_numbers_are_unrelated():
    assert len(set(STREAMS)) == len(STREAMS)
    draws = {stream: torch.rand(1000, generator=generator(stream, 1, 2)) for stream in STREAMS}
    correlation = torch.corrcoef(torch.stack(list(draws.values())))
    assert (correlation - torch.eye(len(STREAMS))).abs().max() < 0.15  # 4.7 standard deviations


def test_a_generator_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    torch.rand(3, generator=generator(ORDER, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_all_three_global_generators_repeat_with_the_key():
    seed_everything(SETUP, 1)
    first = draw()
    assert all(a != b for a, b in zip(first, draw(), strict=True))
    seed_everything(SETUP, 1)
    assert draw() == first
    seed_everything(SETUP, 2)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


def test_a_micro_step_repeats_and_differs_from_every_other():
    def dropout(*key: int) -> tuple[bool, ...]:
        seed_step(*key)
        return tuple(torch.nn.functional.dropout(torch.ones(64)).bool().tolist())

    variants = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 1, 1, 0)]
    masks = {key: dropout(*key) for key in variants}
    assert len(set(masks.values())) == len(variants)
    assert {key: dropout(*key) for key in reversed(variants)} == masks
    assert dropout(0, 1) == masks[0, 1, 0, 0]


def test_a_micro_step_sets_torch_alone():
    before = random.getstate(), np.random.get_state()[1].tolist()
    seed_step(1, 2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.fixture
def _flags_as_before(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]


@pytest.mark.usefixtures("_flags_as_before")
def test_deterministic_mode_is_a_switch():
    cudnn = torch.backends.cudnn
    cudnn.benchmark = True
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not cudnn.deterministic
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.mark.usefixtures("_flags_as_before")
def test_a_workspace_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    set_deterministic(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_switching_off_what_is_off_is_free(monkeypatch):
    """PyTorch imports its compiler for it, which takes longer than a whole short run."""
    calls = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    set_deterministic(False)
    assert calls == []
