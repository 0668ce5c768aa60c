"""How fast training goes, and how much of its time it waits for data."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Reading(NamedTuple):
    """Totals of a clock so far."""

    seconds: float
    waited: float
    samples: int

    def rates(self, earlier: "Reading") -> dict[str, float | None]:
        """Samples per second and the share of time spent waiting since an earlier reading.

        None where no time has passed, so that "not measured" is never 0.
        """
        seconds = self.seconds - earlier.seconds
        if seconds <= 0 or self.samples == earlier.samples:
            return {"samples_per_s": None, "data_wait": None}
        return {
            "samples_per_s": (self.samples - earlier.samples) / seconds,
            "data_wait": (self.waited - earlier.waited) / seconds,
        }


START = Reading(0.0, 0.0, 0)


class TrainingClock:
    """Runs during training epochs; stands while a checkpoint is written or nothing is trained."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._waited = 0.0
        self._samples = 0

    def read(self) -> Reading:
        """Totals up to now."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return Reading(self._seconds + running, self._waited, self._samples)

    def count(self, samples: int) -> None:
        """Add samples that were trained on."""
        self._samples += samples

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the seconds inside."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._seconds, self._since = self.read().seconds, None

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Leave out the seconds inside, where the clock may be running or not."""
        was_running = self._since is not None
        self._seconds, self._since = self.read().seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter() if was_running else None

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass batches through, counting the time until each is there."""
        source = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._waited += time.perf_counter() - asked
            yield batch
