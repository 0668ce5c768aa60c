import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared import distributed, trials
from shared.data import images, sampling
from shared.data.sampling import BatchSampler, smallest_micro_batch
from shared.distributed import Launch, run_name, together
from shared.errors import UserError
from shared.settings import RunConfig
from shared.training import TrainingConfig

GROUP = Path(__file__).parent / "distributed_group.py"


# Who they are


def test_without_torchrun_there_is_one_process():
    assert Launch.of({}) == Launch(0, 1, 0, 1)
    assert Launch.of({"RANK": "7"}) == Launch(), "some schedulers set it for reasons of their own"
    assert distributed.on_main(lambda: 3) == 3
    assert distributed.largest(5) == 5
    value = torch.ones(2)
    assert distributed.total(value) is value
    assert distributed.is_main()
    assert together(lambda config: config.seed)(RunConfig(seed=4)) == 4


def test_what_torchrun_tells_is_read():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Launch.of(environ) == Launch(3, 4, 1, 2)
    del environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]
    assert Launch.of(environ) == Launch(3, 4, 3, 4), "all on one machine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": None}, "RANK is ''"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is ''"),
        ({"RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0"),
    ],
)
def test_a_wrong_environment_is_named(changes, message):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    environ = {k: v for k, v in {**environ, **changes}.items() if v is not None}
    with pytest.raises(UserError, match=message):
        Launch.of(environ)


def test_a_run_is_named_by_the_job():
    assert run_name({}) is None
    assert run_name({"TORCHELASTIC_RUN_ID": "a/b"}) == "a-b"
    alone = run_name({"TORCHELASTIC_RUN_ID": "none"})
    assert alone == run_name({"TORCHELASTIC_RUN_ID": "none"}), "as long as torchrun is the same"
    assert alone.endswith(str(os.getppid()))


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


# Shares of a batch


class World:
    """Stands for the number of processes, and for the number of this one."""

    def __init__(self, monkeypatch, module) -> None:
        self.rank, self.size = 0, 1
        monkeypatch.setattr(module, "rank", lambda: self.rank)
        monkeypatch.setattr(module, "world_size", lambda: self.size)


@pytest.fixture(scope="module")
def world():
    with pytest.MonkeyPatch.context() as patch:
        yield World(patch, sampling)


@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    processes=st.integers(1, 5),
    epoch=st.integers(0, 9),
    start=st.integers(0, 3),
)
def test_shares_are_disjoint_and_complete(world, size, batch_size, processes, epoch, start):
    def batches(rank: int, of: int) -> list[list[int]]:
        world.rank, world.size = rank, of
        sampler = BatchSampler(size, batch_size, seed=3, shuffle=True)
        sampler.epoch, sampler.start = epoch, min(start * batch_size, size)
        return [[key.sample for key in batch] for batch in sampler]

    whole = batches(0, 1)
    shares = [batches(rank, processes) for rank in range(processes)]
    assert len(shares[0]) == len(whole)
    for index, batch in enumerate(whole):
        own = [share[index] for share in shares if index < len(share)]
        assert [sample for part in own for sample in part] == batch
        sizes = [len(part) for part in own]
        assert max(sizes) - min(sizes) <= 1
    world.rank, world.size = 0, 1


@given(
    size=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    accumulate=st.integers(1, 5),
    processes=st.integers(1, 5),
)
def test_the_smallest_micro_batch_of_any_process(world, size, batch_size, accumulate, processes):
    world.size = processes
    found = smallest_micro_batch(size, batch_size, accumulate)
    world.size = 1
    shares = [
        share
        for batch in torch.arange(size).split(batch_size)
        for share in batch.tensor_split(processes)
    ]
    micros = [
        len(micro)
        for share in shares
        for micro in (share.tensor_split(min(accumulate, len(share))) if len(share) else [share])
    ]
    assert found == min(micros)


def test_a_batch_that_is_smaller_than_the_number_of_processes_is_refused(monkeypatch):
    world = World(monkeypatch, sampling)
    monkeypatch.setattr(trials, "world_size", lambda: world.size)
    splits = images._digits().spread(9)
    world.size = 2
    with pytest.raises(UserError, match=r"--batch-size 4: the smallest batch of 9 .* 2 processes"):
        trials.shorten(splits, TrainingConfig(batch_size=4))
    assert trials.shorten(splits, TrainingConfig(batch_size=5)) is splits


# Together


@pytest.mark.parametrize("processes", [2, 4])
def test_a_group(processes):
    """What is checked in each process stands in the script."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={processes}", GROUP],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines == ["first", "all is well"], "rank 0 alone prints, and gloo of torch 2.9"
