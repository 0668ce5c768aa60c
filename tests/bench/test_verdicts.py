"""Verdicts on real processes while other work disturbs them: hours, so `nox -s stress`."""

import multiprocessing
import random
import time

import pytest

from bench import record
from bench.axes import Axis, cases_of
from bench.measuring.conductor import Conductor
from bench.measuring.journal import Journal
from bench.measuring.plan import Members, Plan
from bench.workloads import WORKLOADS

AXIS = Axis(
    "verdicts",
    "is a difference found where there is one, and only there?",
    {"plain": {}, "equal": {"workers": 1}, "slower": {"checkpointing": "selective"}},
    ("encoder",),
)
PLAN = Plan(
    device="cpu", threads=1, launches=16, blocks=6, block_s=0.1, limit_s=120.0, batch_size=8
)


def disturb(seed: int) -> None:
    """Work and rest, each for up to two seconds."""
    rng = random.Random(seed)
    while True:
        until = time.monotonic() + rng.uniform(0, 2)
        while time.monotonic() < until:
            pass
        time.sleep(rng.uniform(0, 2))


@pytest.fixture
def busy():
    """Two processes that come and go on the cores."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=disturb, args=(seed,), daemon=True) for seed in range(2)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.stress
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(20))
def test_equal_things_are_not_called_different_nor_slower_ones_equal(busy, tmp_path, number):
    cases = list(cases_of(AXIS, WORKLOADS["encoder"]))
    journal = Journal(tmp_path / "journal.jsonl")
    maker = "tests.bench.makers:make_work"
    with Conductor(journal, PLAN, rows=2, maker=maker) as conductor:
        conductor.ask([Members("verdicts/encoder", cases)])
        conductor.measure(Members("verdicts/encoder", cases))
    rows = {row["variant"]: row for row in record.parts(journal, PLAN.rules)["cases"]}
    told = {name: (row["verdict"], row["ratio"], row["interval"]) for name, row in rows.items()}
    rounds = len(rows["plain"]["launches"])
    print(f"{rounds} rounds; control {told['control']}; {told['equal']}; {told['slower']}")
    assert rows["equal"]["verdict"] in ("same", "ambiguous", "withheld"), told
    assert rows["slower"]["verdict"] in ("slower", "ambiguous", "withheld"), told
