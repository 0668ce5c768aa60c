"""Real processes that spin, fail, hang and die, and what the journal and the file say of them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from bench import record
from bench.axes import Axis, cases_of
from bench.measuring.conductor import Conductor
from bench.measuring.journal import Journal
from bench.measuring.plan import Members, Plan
from bench.workloads import WORKLOADS
from tests.bench.makers import BIG, FAULTS

ROOT = Path(__file__).parents[2]
WORKLOAD = WORKLOADS["encoder"]
AXIS = Axis("faults", "what becomes of faults?", {"plain": {}, **FAULTS}, ("encoder",))
PLAN = Plan(device="cpu", threads=1, launches=2, blocks=2, block_s=0.02, limit_s=40.0, batch_size=8)
MAKER = "tests.bench.makers:make"
NAME = "faults/encoder"


def members(*variants: str) -> Members:
    """The baseline, the control, and some variants."""
    wanted = ("plain", "control", *variants)
    return Members(NAME, [case for case in cases_of(AXIS, WORKLOAD) if case.variant in wanted])


def measure(folder: Path, plan: Plan, *variants: str, **options) -> Journal:
    journal = Journal(folder / "journal.jsonl")
    with Conductor(journal, plan, rows=len(variants), maker=MAKER, **options) as conductor:
        conductor.ask([members(*variants)])
        conductor.measure(members(*variants))
    return journal


def rows_of(journal: Journal) -> dict[str, dict]:
    return {row["variant"]: row for row in record.parts(journal, PLAN.rules)["cases"]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict]:
    """Everything that can go wrong, measured once."""
    folder = tmp_path_factory.mktemp("faults")
    limits = {"hog": 6 << 30}
    journal = measure(folder, PLAN, *FAULTS, memory_limits=limits)
    return rows_of(journal)


def test_each_fault_is_a_row_with_its_status_and_the_others_are_there(rows):
    found = {name: (row["status"], row["reason"]) for name, row in rows.items()}
    for name in ("plain", "control", "slower", "wrong", "unsynchronised", "big"):
        assert found.pop(name) == ("ok", None)
    assert found.pop("raises") == ("failed", "ArithmeticError: planted")
    status, reason = found.pop("nan")
    assert (status, "the loss is nan" in reason) == ("failed", True)
    status, reason = found.pop("hangs")
    assert (status, reason) == ("timeout", "nothing came of it in 40 s")
    status, reason = found.pop("hog")
    assert (status, "memory" in reason) == ("oom", True)
    assert found == {}


def test_a_planted_length_is_what_is_measured(rows):
    assert rows["slower"]["ratio"] == pytest.approx(0.5, rel=0.2)
    assert rows["control"]["ratio"] == pytest.approx(1, rel=0.2)
    # 8 samples in 4 ms; other processes may have taken time, and none can have given any.
    assert 500 < rows["plain"]["samples_per_s"] <= 2000
    assert rows["plain"]["step_s"] >= 0.004


def test_what_one_case_takes_shows_in_no_other(rows):
    """Whatever the order, which is drawn."""
    peaks = {name: row["memory"]["peak_rss"] for name, row in rows.items() if row["memory"]}
    big = peaks.pop("big")
    assert max(peaks.values()) < 1.2 * min(peaks.values())
    assert big > min(peaks.values()) + BIG


def test_flags_say_what_is_wrong(rows):
    assert "numerics" in rows["wrong"]["flags"]
    assert rows["wrong"]["numerics"]["gradient_error"] == pytest.approx(0.1, rel=0.2)
    assert "unsynchronised" in rows["unsynchronised"]["flags"]
    for name in ("plain", "control", "slower"):
        assert not {"numerics", "unsynchronised", "lost_launches"} & set(rows[name]["flags"])
        assert rows[name]["numerics"]["passed"]


def test_every_launch_has_its_blocks_in_a_recorded_order(rows):
    ok = [row for row in rows.values() if row["status"] == "ok"]
    for row in ok:
        assert [launch["round"] for launch in row["launches"]] == [0, 1]
        for launch in row["launches"]:
            assert len(launch["block_step_s"]) == PLAN.blocks
            assert launch["at"] == sorted(launch["at"])
    # Forth and back: the places of a case in a pair of blocks add up to the same for all.
    for number in (0, 1):
        sums = {sum(row["launches"][number]["positions"]) for row in ok}
        assert len(sums) == 1


def test_nothing_is_said_of_what_was_not_measured(rows):
    assert rows["plain"]["memory"]["peak_allocated"] is None
    assert rows["plain"]["memory"]["peak_rss"] > 1e7
    assert rows["plain"]["samples_per_joule"] is None
    for name in ("raises", "hog"):
        assert rows[name]["samples_per_s"] is rows[name]["ratio"] is rows[name]["verdict"] is None


CONDUCT = """
import sys
from pathlib import Path
from dataclasses import replace
from tests.bench.test_conductor import PLAN, measure
measure(Path(sys.argv[1]), replace(PLAN, launches=1, blocks=6, block_s=0.2), "slower")
"""


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CONDUCT), str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def blocks_of(folder: Path) -> list[tuple]:
    """Case, round and number of each block, as the file has them."""
    file = folder / "journal.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [(e["case"], e["round"], e["block"]) for e in events if e["event"] == "block"]


def test_a_killed_suite_goes_on_and_measures_each_block_once(tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while len(blocks_of(tmp_path)) < 4:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == [], "orphans"
    before = blocks_of(tmp_path)
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "block", "ca')  # as a power cut leaves it
    assert start(tmp_path).wait() == 0
    after = blocks_of(tmp_path)
    assert after[: len(before)] == before, "nothing is lost, and nothing is measured again"
    cases = [case.name for case in members("slower").cases]
    expected = {(case, 0, block) for case in cases for block in range(6)}
    assert len(after) == len(expected)
    assert set(after) == expected
    rows = rows_of(Journal(tmp_path / "journal.jsonl"))
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert [len(launch["block_step_s"]) for launch in rows["slower"]["launches"]] == [6]
    assert rows["slower"]["ratio"] == pytest.approx(0.5, rel=0.2)
