"""An item for each case; the first of a comparison measures all of it, and the others replay it."""

from typing import Any

import pytest

from bench.suite import Suite
from shared.errors import UserError


class ReplayClock:
    """A timer that goes exactly as far as a sample says, for pytest-benchmark to read.

    It is set back for each sample: one that accumulates would lose the last bits of every
    difference.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._samples: list[float] = []

    def __call__(self) -> float:
        """The time."""
        return self._now

    def replay(self, benchmark: Any, samples: list[float]) -> None:
        """Hand samples to pytest-benchmark, in seconds, as though they were taken now."""
        self._samples = samples[::-1]
        benchmark.pedantic(self._advance, setup=self._reset, rounds=len(samples))

    def _reset(self) -> None:
        self._now = 0.0

    def _advance(self) -> None:
        self._now = self._samples.pop()


CLOCK = ReplayClock()


@pytest.mark.benchmark(timer=CLOCK, disable_gc=False)
def test_case(case: str, suite: Suite, request: pytest.FixtureRequest) -> None:
    """Measure a case; a round of the benchmark is the mean step of one block."""
    try:
        row = suite.row(case)
    except UserError as error:
        pytest.exit(str(error), returncode=2)
    if row["status"] == "skipped":
        pytest.skip(row["reason"])
    if row["status"] != "ok":
        pytest.fail(f"{row['status']}: {row['reason']}", pytrace=False)
    # Asked for here: a case that is skipped should not be told that it measures nothing.
    benchmark = request.getfixturevalue("benchmark")
    benchmark.group = f"{row['axis']}/{row['workload']}"
    CLOCK.replay(benchmark, [s for launch in row["launches"] for s in launch["block_step_s"]])
