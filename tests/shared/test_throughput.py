"""The clock of training, read on a clock that the test sets."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from shared import throughput
from shared.throughput import START, Reading, TrainingClock


class FakeTime:
    now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=fake.perf_counter))
    return fake


def test_only_seconds_inside_are_counted(time):
    clock = TrainingClock()
    time.sleep(5)
    for _ in range(2):
        with clock.running():
            time.sleep(3)
            assert clock.read().seconds % 3 == 0
        time.sleep(7)
    assert clock.read() == Reading(6.0, 0.0, 0)


def test_a_clock_that_runs_can_be_read(time):
    clock = TrainingClock()
    with clock.running():
        time.sleep(2)
        assert clock.read().seconds == 2
        time.sleep(1)
        assert clock.read().seconds == 3


def test_it_stands_while_a_checkpoint_is_written(time):
    clock = TrainingClock()
    with clock.running():
        time.sleep(1)
        with clock.standing():
            time.sleep(10)
            assert clock.read().seconds == 1
        time.sleep(2)
    assert clock.read().seconds == 3


def test_standing_does_not_start_it(time):
    clock = TrainingClock()
    with clock.standing():
        time.sleep(1)
    time.sleep(1)
    assert clock.read().seconds == 0


def test_it_stops_and_goes_on_when_the_body_fails(time):
    clock = TrainingClock()

    def fail():
        with clock.running():
            time.sleep(1)
            try:
                with clock.standing():
                    time.sleep(10)
                    raise KeyError
            except KeyError:
                time.sleep(2)
                raise

    with pytest.raises(KeyError):
        fail()
    time.sleep(5)
    assert clock.read().seconds == 3


def test_waiting_is_the_time_until_each_batch_is_there(time):
    def slow() -> Iterator[str]:
        for batch in "ab":
            time.sleep(2)
            yield batch

    clock = TrainingClock()
    seen = []
    with clock.running():
        for batch in clock.waiting(slow()):
            seen.append(batch)
            time.sleep(3)
            clock.count(4)
    assert seen == ["a", "b"]
    assert clock.read() == Reading(10.0, 4.0, 8)


def test_rates_are_of_all_samples_over_all_time():
    earlier, now = Reading(10.0, 1.0, 100), Reading(14.0, 2.0, 300)
    assert now.rates(earlier) == {"samples_per_s": 50.0, "data_wait": 0.25}
    assert now.rates(START) == {"samples_per_s": 300 / 14, "data_wait": 2 / 14}


@pytest.mark.parametrize("now", [START, Reading(5.0, 1.0, 0), Reading(0.0, 0.0, 9)])
def test_what_was_not_measured_is_none(now):
    assert now.rates(START) == {"samples_per_s": None, "data_wait": None}
