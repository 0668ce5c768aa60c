"""What a machine did while a block was timed: clocks, power, heat, load. None: not readable.

It is marked and never corrected for: who reads a file decides what to make of it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil
import torch

from shared import nvml

_THROTTLED = {
    "power": 0x4,
    "hardware_slowdown": 0x8,
    "thermal_software": 0x20,
    "thermal_hardware": 0x40,
    "power_brake": 0x80,
}
"""nvmlClocksEventReasons of nvml.h that mean that the card is held back."""


class _Host(NamedTuple):
    """CPU seconds since the machine started, of all processes and of those that measure."""

    moment: float
    busy: float
    steal: float | None
    own: float


class Telemetry:
    """Readings around blocks.

    Args:
        device: that is measured; of an NVIDIA card more is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Under torchrun the other ranks are its children too, and no strangers.
        is_of_group = "TORCHELASTIC_RUN_ID" in os.environ
        self._family = psutil.Process(os.getppid() if is_of_group else os.getpid())

    @contextmanager
    def watching(self) -> Iterator[dict[str, Any]]:
        """A dict that has the readings of what happens inside, when it is over."""
        found: dict[str, Any] = {}
        with nvml.opened() as (library, _):
            index = self._device.index or 0
            card = nvml.card_at(library, self._device.type, index)
            energy = _energy(library, card)
            before = self._read_host()
            yield found
            found.update(_of_host(before, self._read_host()))
            found.update(_of_card(library, card, energy))

    def _read_host(self) -> _Host:
        times = psutil.cpu_times()
        steal = getattr(times, "steal", None)
        idle = times.idle + getattr(times, "iowait", 0.0) + (steal or 0.0)
        own = [self._family, *self._family.children(recursive=True)]
        return _Host(time.monotonic(), sum(times) - idle, steal, sum(map(_cpu_seconds, own)))


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def _of_host(before: _Host, after: _Host) -> dict[str, Any]:
    seconds = max(after.moment - before.moment, 1e-9)
    own = (after.own - before.own) / seconds
    busy = (after.busy - before.busy) / seconds
    steal = None
    if before.steal is not None and after.steal is not None:
        steal = (after.steal - before.steal) / seconds
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    return {
        "cpu_mhz": frequency.current if frequency and frequency.current else None,
        "cpu_own_cores": own,
        "cpu_other_cores": max(0.0, busy - own),
        "cpu_steal_cores": steal,
        "load_1min": psutil.getloadavg()[0],
    }


def _energy(library: Any, card: Any) -> float | None:
    """Joules that a card has used since its driver was loaded."""
    if card is None:
        return None
    millijoules = nvml.ask(library, library.nvmlDeviceGetTotalEnergyConsumption, card)
    return None if millijoules is None else millijoules / 1000


def _of_card(library: Any, card: Any, energy_before: float | None) -> dict[str, Any]:
    if card is None:
        names = ("sm_mhz", "memory_mhz", "power_w", "energy_j", "temperature_c", "throttled")
        return dict.fromkeys(names)
    milliwatts = nvml.ask(library, library.nvmlDeviceGetPowerUsage, card)
    reasons = nvml.ask(library, library.nvmlDeviceGetCurrentClocksThrottleReasons, card)
    energy = _energy(library, card)
    throttled = None
    if reasons is not None:
        throttled = [name for name, bit in _THROTTLED.items() if reasons & bit]
    return {
        "sm_mhz": nvml.ask(library, library.nvmlDeviceGetClockInfo, card, library.NVML_CLOCK_SM),
        "memory_mhz": nvml.ask(
            library, library.nvmlDeviceGetClockInfo, card, library.NVML_CLOCK_MEM
        ),
        "power_w": None if milliwatts is None else milliwatts / 1000,
        "energy_j": None if None in (energy, energy_before) else energy - energy_before,  # type: ignore[operator]
        "temperature_c": nvml.ask(
            library, library.nvmlDeviceGetTemperature, card, library.NVML_TEMPERATURE_GPU
        ),
        "throttled": throttled,
    }
