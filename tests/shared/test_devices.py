"""The choice of a device, moving batches, and the allocator; "meta" stands in for a GPU."""

import json
import os
import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shared import devices
from shared.devices import choose_device, keep_freed_memory, move
from shared.errors import UserError

META = torch.device("meta")


class Labelled(NamedTuple):
    frames: Tensor
    lengths: Tensor
    name: str = "x"


@pytest.fixture
def machine(monkeypatch):
    """Make this a machine with so many accelerators of a type."""

    def set_up(kind: str | None, count: int = 0) -> None:
        found = torch.device(kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return set_up


# ------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("kind", "count", "name", "expected"),
    [
        (None, 0, "auto", "cpu"),
        (None, 0, "cpu", "cpu"),
        (None, 0, "cpu:0", "cpu"),
        ("cuda", 2, "auto", "cuda"),
        ("cuda", 2, "cpu", "cpu"),
        ("cuda", 2, "cuda", "cuda"),
        ("cuda", 2, "cuda:1", "cuda:1"),
        ("mps", 1, "auto", "mps"),
        ("mps", 1, "mps", "mps"),
        ("xpu", 1, "xpu:0", "xpu:0"),
    ],
)
def test_a_device_that_is_there_is_chosen(machine, kind, count, name, expected):
    machine(kind, count)
    assert choose_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "count", "name", "said"),
    [
        (None, 0, "gpu", "not a device; try auto, cpu, cuda, cuda:1, mps, xpu"),
        (None, 0, "", "not a device; try"),
        (None, 0, "0", "not a device; try"),
        ("cuda", 2, "cuda:-1", "not a device; try"),
        (None, 0, "cuda", "not on this machine, it has no accelerator;"),
        (None, 0, "meta", "not on this machine, it has no accelerator;"),
        (None, 0, "cpu:1", "the cores of a machine are one device"),
        ("cuda", 2, "mps", "not on this machine, its accelerator is cuda;"),
        ("cuda", 2, "cuda:2", "this machine has 2 of them, counted from 0"),
    ],
)
def test_a_device_that_is_not_there_is_named(machine, kind, count, name, said):
    machine(kind, count)
    with pytest.raises(UserError) as caught:
        choose_device(name)
    line = str(caught.value)
    assert line.startswith(f"--device {name}: {said}")
    assert "\n" not in line


# --------------------------------------------------------------------------------------- moving


def test_every_tensor_of_a_nested_batch_is_moved():
    batch = {
        "a": torch.ones(2),
        "b": [torch.ones(1), (torch.ones(3), "text", 4, None)],
        "c": Labelled(torch.ones(2, 3), torch.tensor([3, 1])),
        "d": OrderedDict(e=torch.ones(1)),
    }
    moved = move(batch, META)
    assert moved["a"].device == META
    assert isinstance(moved["b"], list)
    assert isinstance(moved["b"][1], tuple)
    assert moved["b"][0].device == moved["b"][1][0].device == META
    assert moved["b"][1][1:] == ("text", 4, None)
    assert isinstance(moved["c"], Labelled)
    assert moved["c"].frames.device == META
    assert moved["c"].frames.shape == (2, 3)
    assert moved["c"].name == "x"
    assert moved["d"]["e"].device == META
    assert batch["a"].device.type == "cpu"


def test_lengths_stay_on_the_cpu():
    """pack_padded_sequence refuses others (pytorch#43227)."""
    lengths = torch.tensor([3, 1])
    moved = move([Labelled(torch.ones(2, 3, 4), lengths), {"lengths": lengths}], META)
    assert moved[0].frames.device == META
    assert moved[0].lengths is lengths
    assert moved[1]["lengths"] is lengths


def test_values_are_kept():
    batch = {"x": torch.arange(3), "y": (torch.tensor(1.5),)}
    moved = move(batch, torch.device("cpu"))
    assert moved["x"].tolist() == [0, 1, 2]
    assert moved["y"][0].item() == 1.5


def test_only_copies_from_pinned_memory_do_not_block(monkeypatch):
    pinned, pageable = torch.ones(1), torch.ones(2)
    asked = {}
    to = torch.Tensor.to

    def record(tensor, device, non_blocking):
        asked[len(tensor)] = non_blocking
        return to(tensor, device, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is pinned)
    monkeypatch.setattr(torch.Tensor, "to", record)
    move([pinned, pageable], META)
    assert asked == {1: True, 2: False}


# ------------------------------------------------------------------------------------ allocator

COUNT_FAULTS = """
import json, resource, torch
from shared.devices import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 * 2**20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
took_hold = keep_freed_memory()
for _ in range(4):  # aligned blocks fit into freed ones only after the heap has grown a little
    faults()
print(json.dumps({"took_hold": took_hold, "default": default, "kept": faults()}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is for Linux")
def test_freed_memory_is_used_again():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS],
        env=environment, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    seen = json.loads(done.stdout)
    assert seen["took_hold"]
    assert seen["default"] > 100  # each tensor has fresh pages
    assert seen["kept"] < seen["default"] / 20


def test_huge_pages_are_asked_for_unless_the_user_has_said(monkeypatch):
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: FakeLibrary())
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert keep_freed_memory()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    assert keep_freed_memory()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"


class FakeLibrary:
    """A C library whose mallopt refuses one parameter."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused

    def mallopt(self, parameter: int, value: int) -> int:
        return int(parameter != self.refused)


@pytest.mark.parametrize("library", [object(), FakeLibrary(-1), FakeLibrary(-4)])
def test_an_allocator_that_does_not_listen_is_told(monkeypatch, library):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: library)
    assert keep_freed_memory() is False


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "")
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
