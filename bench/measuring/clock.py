"""Time on a device: events where it has a queue of its own, the host's clock where it has not."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks in time, read when the device has done all that was asked of it."""

    def mark(self) -> None:
        """Mark the moment at which the device is done with what it has been given so far."""

    def seconds(self) -> list[float]:
        """Wait for the device; the seconds from each mark to the next."""


class HostClock:
    """For devices that are done when a call returns."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """Take the time."""
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The seconds from each mark to the next."""
        return _differences(self._marks)


class EventClock:
    """For accelerators, which take the time themselves when they come to an event."""

    def __init__(self) -> None:
        self._events: list[Any] = []

    def mark(self) -> None:
        """Put an event into the queue."""
        event = torch.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Wait for the queue to be empty; the seconds from each event to the next."""
        torch.accelerator.synchronize()
        first, *_ = self._events
        return _differences([first.elapsed_time(event) / 1000 for event in self._events])


def _differences(moments: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(moments)]


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return HostClock() if device.type == "cpu" else EventClock()
