"""Processes that train together, and what each of them gets to do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shared import distributed, trials
from shared.data import sampling
from shared.data.sampling import BatchSampler, SampleKey, smallest_micro_batch
from shared.data.splits import Splits
from shared.distributed import Launch, on_main, run_name, sync_buffers
from shared.errors import UserError
from shared.training import TrainingConfig
from shared.trials import DRY_RUN_SAMPLES, shorten

CHECKS = Path(__file__).parent / "group_checks.py"


# Groups


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_of_a_group_agree(tmp_path, processes):
    """All checks of group_checks.py, in one group."""
    group = [
        subprocess.Popen(
            [sys.executable, CHECKS, str(rank), str(processes), tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    said = [process.communicate(timeout=300)[0] for process in group]
    assert [process.returncode for process in group] == [0] * processes, "\n".join(said)


# The launch


FOUR = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_launch_is_what_torchrun_says():
    assert Launch.of(FOUR) == Launch(3, 4, 1, 2)
    assert Launch.of({}) == Launch(0, 1, 0, 1)
    assert Launch.of({"RANK": "7"}) == Launch(0, 1, 0, 1), "other launchers set that too"
    assert Launch.of({"RANK": "3", "WORLD_SIZE": "4"}) == Launch(3, 4, 3, 4), "on one machine"


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("value", ["", " ", "x", "-1", "1.5", "0x1", "1e1"])
def test_what_is_no_number_is_one_line_that_names_it(name, value):
    with pytest.raises(UserError) as caught:
        Launch.of({**FOUR, name: value})
    assert str(caught.value) == f"{name} is {value!r}, and has to be a number: start with torchrun"


def test_a_world_without_a_rank_is_refused():
    with pytest.raises(
        UserError, match=r"^RANK is not set, and WORLD_SIZE is: start with torchrun$"
    ):
        Launch.of({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "4"},
        {"WORLD_SIZE": "3"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_WORLD_SIZE": "0"},
    ],
    ids=str,
)
def test_numbers_that_do_not_go_together_are_one_line_that_names_them(changes):
    environ = {**FOUR, **changes}
    told = ", ".join(f"{name}={environ[name]}" for name in FOUR)
    with pytest.raises(UserError) as caught:
        Launch.of(environ)
    assert str(caught.value) == f"{told}: ranks count from 0 to the number of processes"


def test_a_run_is_named_by_what_stays_when_processes_are_started_again():
    assert run_name({}) is None
    assert run_name({"TORCHELASTIC_RUN_ID": "tuesday"}) == "tuesday"
    assert run_name({"TORCHELASTIC_RUN_ID": "a/../b"}) == "a-..-b", "one folder"
    name = run_name({"TORCHELASTIC_RUN_ID": "none"})
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{os.getppid()}", name)
    assert run_name({"TORCHELASTIC_RUN_ID": "none"}) == name


# Alone


def test_one_process_is_main_and_nothing_is_exchanged():
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.is_main()
    assert not distributed.is_joined()
    assert on_main(lambda: (made := object(), made))[0] is not None
    value = torch.tensor(3.0)
    assert distributed.total(value) is value
    assert distributed.largest(-7) == -7
    with distributed.main_goes_first():
        pass
    norm = nn.BatchNorm1d(2)
    norm.running_mean.copy_(torch.tensor([0.1, 0.2]))
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    for how in ("rank0", "averaged"):
        sync_buffers(norm, how)
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


@pytest.mark.parametrize("error", [UserError("no"), ZeroDivisionError()], ids=repr)
def test_one_process_raises_what_it_would_have_raised(error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        on_main(fail)
    assert caught.value is error


def test_without_torchrun_a_program_runs_as_if_it_were_not_wrapped(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = TrainingConfig()
    assert distributed.together(lambda given: (given, distributed.is_joined()))(config) == (
        config,
        False,
    )


def test_a_bad_launch_is_refused_before_anything_is_done(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="WORLD_SIZE is 'two'"):
        distributed.together(lambda config: pytest.fail("it ran"))(TrainingConfig())


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_launch_without_a_meeting_place_is_refused(monkeypatch, missing):
    whole = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(UserError, match=f"^{missing} is not set, and WORLD_SIZE is"):
        distributed.together(lambda config: pytest.fail("it ran"))(TrainingConfig(device="cpu"))


def test_a_rank_of_nothing_is_main(monkeypatch):
    """Other launchers set RANK too: with one process nobody else would speak."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert distributed.speaks_first()


@pytest.mark.parametrize(("rank", "told"), [("0", "early\n"), ("1", "")])
def test_what_all_print_is_printed_by_rank_0(monkeypatch, capsys, rank, told):
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    with distributed.told_later():
        print("early")
    assert capsys.readouterr().out == told

    def refuse():
        print("no such flag", file=sys.stderr)
        raise SystemExit(2)

    with pytest.raises(SystemExit), distributed.told_later():
        refuse()
    assert capsys.readouterr().err == "no such flag\n", "late, and not lost"


@pytest.mark.parametrize(("rank", "waits"), [(None, 0), ("0", 0), ("1", 1)])
def test_those_that_are_not_main_tell_an_error_later(monkeypatch, rank, waits):
    slept = []
    monkeypatch.setattr(distributed.time, "sleep", slept.append)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(ZeroDivisionError), distributed.main_speaks_first():
        raise ZeroDivisionError
    assert slept == [distributed.MAIN_SPEAKS_FIRST] * waits


# Shares


def shares_of(sampler: BatchSampler, processes: int) -> list[list[list[SampleKey]]]:
    """For each of some processes, the batches that it gets."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "world_size", lambda: processes)
        for rank in range(processes):
            patch.setattr(sampling, "rank", lambda rank=rank: rank)
            found.append(list(sampler))
    return found


def sampler(size: int, batch_size: int, epoch: int = 0, start: int = 0) -> BatchSampler:
    sampler = BatchSampler(size, batch_size, seed=3, shuffle=True)
    sampler.epoch, sampler.start = epoch, start
    return sampler


sizes = st.integers(1, 60)
batch_sizes = st.integers(1, 20)
worlds = st.integers(1, 9)


@settings(deadline=None)
@given(sizes, batch_sizes, worlds, st.integers(0, 2**31))
def test_shares_of_a_batch_are_the_batch_of_one_process(size, batch_size, processes, epoch):
    """Each sample once, in the same order, cut as evenly as can be, larger parts first."""
    whole = list(sampler(size, batch_size, epoch))
    shares = shares_of(sampler(size, batch_size, epoch), processes)
    assert sorted(key.sample for own in shares for batch in own for key in batch) == list(
        range(size)
    )
    left = [iter(own) for own in shares]
    for batch in whole:
        few, more = divmod(len(batch), processes)
        wanted = [few + (rank < more) for rank in range(processes)]
        parts = [next(own) if n else [] for own, n in zip(left, wanted, strict=True)]
        assert [len(part) for part in parts] == wanted
        assert [key for part in parts for key in part] == batch
    assert not any(list(own) for own in left)


@settings(deadline=None)
@given(st.data(), sizes, batch_sizes, worlds)
def test_from_a_position_on_shares_are_the_rest_of_the_same_ones(data, size, batch_size, processes):
    done = data.draw(st.integers(0, -(-size // batch_size)))
    start = min(done * batch_size, size)
    whole = shares_of(sampler(size, batch_size, 4), processes)
    for rank, rest in enumerate(shares_of(sampler(size, batch_size, 4, start), processes)):
        passed = sum(len(b) > rank for b in torch.arange(size).split(batch_size)[:done])
        assert rest == whole[rank][passed:]


def test_the_order_differs_from_epoch_to_epoch():
    first, again, second = (shares_of(sampler(40, 8, epoch), 3) for epoch in (0, 0, 1))
    assert first == again
    for before, after in zip(first, second, strict=True):
        assert [k.sample for b in before for k in b] != [k.sample for b in after for k in b]


@settings(deadline=None)
@given(sizes, batch_sizes, st.integers(1, 20), worlds)
def test_the_smallest_micro_batch_is_that_of_the_smallest_share(
    size, batch_size, accumulate, processes
):
    shares = [
        share
        for batch in torch.arange(size).split(batch_size)
        for share in batch.tensor_split(processes)
    ]
    expected = min(
        len(micro)
        for share in shares
        for micro in share.tensor_split(max(1, min(accumulate, len(share))))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "world_size", lambda: processes)
        assert smallest_micro_batch(size, batch_size, accumulate) == expected


class Numbers:
    """A part of a data set that is nothing but its samples' numbers."""

    def __init__(self, indices: torch.Tensor) -> None:
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def subset(self, indices: torch.Tensor) -> "Numbers":
        return Numbers(self.indices[indices])


@pytest.mark.parametrize(
    ("size", "batch_size", "processes", "refused"),
    [
        (10, 4, 2, False),  # 4, 4, 2
        (10, 4, 3, True),
        (12, 4, 4, False),  # 4, 4, 4
        (12, 4, 5, True),
        (9, 4, 1, False),  # 4, 4, 1
        (9, 4, 2, True),
        (9, 9, 9, False),
    ],
)
def test_a_last_batch_with_less_than_a_sample_for_each_is_refused(
    monkeypatch, size, batch_size, processes, refused
):
    for module in (sampling, trials):
        monkeypatch.setattr(module, "world_size", lambda: processes)
    splits = Splits(*[Numbers(torch.arange(size))] * 3)
    config = TrainingConfig(batch_size=batch_size)
    if not refused:
        assert shorten(splits, config) == splits
        return
    with pytest.raises(UserError) as caught:
        shorten(splits, config)
    assert str(caught.value) == (
        f"--batch-size {batch_size}: the smallest batch of {size} samples has less than one for "
        f"each of {processes} processes; choose another"
    )


def test_a_dry_run_is_refused_for_the_samples_that_it_takes(monkeypatch):
    for module in (sampling, trials):
        monkeypatch.setattr(module, "world_size", lambda: 4)
    splits = Splits(*[Numbers(torch.arange(470))] * 3)
    config = TrainingConfig(batch_size=DRY_RUN_SAMPLES - 3)
    shorten(splits, config)  # 470 = 10 x 45 + 20
    with pytest.raises(UserError, match=f"of {DRY_RUN_SAMPLES} samples"):
        shorten(splits, TrainingConfig(batch_size=DRY_RUN_SAMPLES - 3, dry_run=True))


# Accelerators


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [("cuda:1", 2, "--device cuda:1: each of 2"), ("auto", 1, "2 processes .* which has 1")],
)
def test_each_process_has_an_accelerator_of_its_own(monkeypatch, device, count, message):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    with pytest.raises(UserError, match=message):
        distributed._take_device(device, Launch(0, 2, 0, 2))
    taken = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    distributed._take_device("auto", Launch(1, 2, 1, 2))
    distributed._take_device("cpu", Launch(1, 2, 1, 2))
    assert taken == [1]
