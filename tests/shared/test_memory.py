"""Peaks of memory, by name."""

import mmap
import sys

import pytest
import torch

from shared import memory
from shared.memory import peak_memory, peak_of_run, reset_peak

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
MIB = 2**20


def use(size: int) -> None:
    """Touch memory and give it back to the system, whatever the allocator is set to."""
    with mmap.mmap(-1, size) as block:
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1


@pytest.mark.skipif(not memory._CLEAR.exists(), reason="this system cannot reset the peak")
def test_the_peak_is_of_what_came_after_the_reset():
    reset_peak(CPU)
    quiet = peak_of_run(CPU)
    use(64 * MIB)
    busy = peak_of_run(CPU)
    reset_peak(CPU)
    again = peak_of_run(CPU)
    assert 60 * MIB < busy - quiet < 80 * MIB
    assert abs(again - quiet) < 16 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_a_cpu_has_a_resident_set_and_nothing_else():
    peaks = peak_memory(CPU)
    assert peaks["peak_allocated"] is None
    assert peaks["peak_reserved"] is None
    assert peaks["peak_rss"] > 10 * MIB


def test_the_kernel_counts_in_kib(tmp_path, monkeypatch):
    status, clear = tmp_path / "status", tmp_path / "clear_refs"
    status.write_text("Name:\tpython\nVmPeak:\t  999999 kB\nVmHWM:\t    1234 kB\nVmRSS:\t 5 kB\n")
    clear.touch()
    monkeypatch.setattr(memory, "_STATUS", status)
    monkeypatch.setattr(memory, "_CLEAR", clear)
    assert peak_of_run(CPU) == 1234 * 1024
    reset_peak(CPU)
    assert clear.read_text() == "5"


@pytest.mark.parametrize("status", [None, "Name:\tpython\n"])
def test_what_cannot_be_measured_is_none(tmp_path, monkeypatch, status):
    if status is not None:
        (tmp_path / "status").write_text(status)
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    reset_peak(CPU)
    assert peak_of_run(CPU) is None
    assert not (tmp_path / "clear_refs").exists()


def test_an_accelerator_is_asked_for_its_own_peaks(monkeypatch):
    asked = []
    for name, value in (("max_memory_allocated", 7), ("max_memory_reserved", 9)):
        monkeypatch.setattr(
            torch.accelerator, name, lambda device, v=value: asked.append(device) or v
        )
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", asked.append)
    reset_peak(CUDA)
    peaks = peak_memory(CUDA)
    assert (peaks["peak_allocated"], peaks["peak_reserved"]) == (7, 9)
    assert peak_of_run(CUDA) == 7
    assert set(asked) == {CUDA}


def test_mps_keeps_no_peak():
    mps = torch.device("mps")
    reset_peak(mps)
    assert peak_memory(mps)["peak_allocated"] is None
    assert peak_of_run(mps) is None
