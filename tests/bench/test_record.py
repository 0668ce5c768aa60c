"""From a journal that is made up to the rows of a file, and what the schema lets through."""

import json
import math

import pytest

from bench import record
from bench.measuring.journal import Journal
from bench.statistics import DEFAULT_RULES
from bench.suite import write

MEMORY = {"peak_allocated": None, "peak_reserved": None, "peak_rss": 1 << 30, "driver_used": None}
TELEMETRY = {
    "cpu_mhz": 2600.0, "cpu_own_cores": 1.9, "cpu_other_cores": 0.01, "cpu_steal_cores": 0.0,
    "load_1min": 2.0, "sm_mhz": None, "memory_mhz": None, "power_w": None, "energy_j": None,
    "temperature_c": None, "throttled": None,
}  # fmt: skip
NUMERICS = {
    "losses": [2.3, 2.2, 2.1], "loss_error": 1e-7, "gradient_error": 1e-6,
    "loss_tolerance": 1e-4, "gradient_tolerance": 2e-3, "passed": True,
}  # fmt: skip
MACHINE = dict.fromkeys(("accelerator", "cpu", "threads", "memory_bytes", "os", "allocator"))
SUBJECT = dict.fromkeys(("commit", "dirty", "versions", "libraries", "numerics"))
FACTS = {
    "device": "cpu", "devices": 1, "memory_bytes": 1 << 34, "tf32": False, "bf16": False,
    "fp16": False, "cores": 2,
}  # fmt: skip


def journal_of(path, times: dict[str, float], rounds: int = 8, **changes) -> Journal:
    """A suite of one comparison, of which each launch has two blocks of two steps of 8 samples.

    Args:
        times: seconds of a step by variant; the first is the baseline.
        changes: of every block.
    """
    journal = Journal(path)
    peaks = {"fp32": 1e11}
    journal.write(
        "suite", plan={}, began=0.0, facts=FACTS, machine=MACHINE, subject=SUBJECT,
        peak_flop_per_s=peaks,
    )  # fmt: skip
    names = [name for name in times if name != "control"]
    names.insert(1, "control")
    for name in names:
        role = {names[0]: "baseline", "control": "control"}.get(name, "variant")
        for size in (None, 8):
            journal.write(
                "case", case=f"a/w/{name}", axis="a", workload="w", about="", variant=name,
                role=role, changes={}, batch_size=size,
            )  # fmt: skip
    for name in names:
        journal.write("exact", case=f"a/w/{name}", losses=[1.0], flop_per_step=5e9)
    for number in range(rounds):
        for name in names:
            journal.write(
                "launch", case=f"a/w/{name}", round=number, mode="together", steps=2,
                fresh_cache=number == 0, first_step_s=1.0 if number else 9.0, warm_up_steps=10,
                steady=True, torch="2.14.1", compile={"graphs": 0, "breaks": 0},
                numerics=NUMERICS, cold_memory=MEMORY,
            )  # fmt: skip
            for block in range(2):
                step = times.get(name, times[names[0]]) * (
                    1 + 0.001 * ((number * len(name) + block) % 5)
                )
                values = {
                    "step_s": step, "steps_s": [step] * 2, "rank_spread": None, "samples": 16,
                    "memory": MEMORY, "recompilations": 0, "data_wait": 0.0,
                    "unsynchronised": False, "telemetry": TELEMETRY,
                }  # fmt: skip
                journal.write(
                    "block", case=f"a/w/{name}", round=number, block=block, position=0, at=0.0,
                    **values | changes,
                )  # fmt: skip
    journal.write("ended", comparison="a/w", stop="limit")
    return journal


def file_of(journal: Journal) -> dict:
    """What pytest-benchmark would have made of it, in short."""
    parts = record.parts(journal, DEFAULT_RULES)
    head = {"machine_info": MACHINE, "commit_info": {}, "datetime": "", "version": "5.3.1"}
    benchmarks = [
        {
            "group": "a/w", "name": row["case"], "fullname": row["case"], "params": {},
            "extra_info": {k: v for k, v in row.items() if k != "launches"},
            "stats": dict.fromkeys(("min", "max", "mean", "median", "rounds", "data")),
        }
        for row in parts["cases"]
        if row["status"] == "ok"
    ]  # fmt: skip
    return {**head, "benchmarks": benchmarks, **parts}


@pytest.fixture
def content(tmp_path) -> dict:
    times = {"fp32": 0.1, "bf16": 0.05, "tf32": 0.1}
    return file_of(journal_of(tmp_path / "journal.jsonl", times))


def test_rows_say_what_the_blocks_said(content):
    rows = {row["variant"]: row for row in content["cases"]}
    assert list(rows) == ["fp32", "control", "bf16", "tf32"]
    assert rows["fp32"]["samples_per_s"] == pytest.approx(80, rel=0.01)
    assert rows["fp32"]["flop_per_s"] == pytest.approx(5e10, rel=0.01)
    assert rows["fp32"]["share_of_peak"] == pytest.approx(0.5, rel=0.01)
    assert rows["fp32"]["cold"]["first_step_s"] == 9.0
    assert rows["fp32"]["cold"]["first_step_again_s"] == 1.0
    assert rows["bf16"]["ratio"] == pytest.approx(2, rel=0.01)
    assert [rows[name]["verdict"] for name in rows] == [None, None, "faster", "same"]
    low, high = rows["bf16"]["interval"]
    assert low < rows["bf16"]["ratio"] < high
    assert all(row["flags"] == [] for row in rows.values())


def test_the_file_is_what_the_schema_describes(content, tmp_path):
    assert record.problems(content) == []
    write(tmp_path / "file.json", content)

    def refuse(name):
        raise AssertionError(name)

    read = json.loads((tmp_path / "file.json").read_text(), parse_constant=refuse)
    assert read == content


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("refbench", "schema_version"), 2, "$.refbench.schema_version: 1 was expected"),
        (("cases", 0, "status"), "fine", "$.cases[0].status: 'fine' is not one of"),
        (("cases", 1, "samples_per_s"), 0, "$.cases[1].samples_per_s"),
        (("cases", 1, "memory", "peak_rss"), 0, "$.cases[1].memory.peak_rss"),
        (("cases", 2, "surprise"), 1, "('surprise' was unexpected)"),
        (("benchmarks", 0, "extra_info", "ratio"), "1", "$.benchmarks[0].extra_info.ratio"),
    ],
)
def test_the_schema_names_the_place_of_what_is_wrong(content, place, value, message):
    content = json.loads(json.dumps(content))
    target = content
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    (problem,) = record.problems(content)
    assert message in problem


@pytest.mark.parametrize("key", ["cases", "refbench", "machine_info", "benchmarks"])
def test_the_schema_misses_what_is_not_there(content, key):
    del content[key]
    assert record.problems(content) == [f"$: '{key}' is a required property"]


def test_a_file_with_something_that_json_has_not_leaves_the_old_one(content, tmp_path):
    file = tmp_path / "file.json"
    file.write_text("old")
    content["cases"][0]["step_s"] = math.nan
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(file, content)
    assert file.read_text() == "old"
    assert list(tmp_path.glob("*.partial")) == []


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"recompilations": 1}, "recompiled"),
        ({"unsynchronised": True}, "unsynchronised"),
        ({"telemetry": TELEMETRY | {"cpu_other_cores": 1.0}}, "busy"),
        ({"telemetry": TELEMETRY | {"throttled": ["power"]}}, "throttled"),
    ],
)
def test_what_disturbs_a_block_is_flagged_and_counts(tmp_path, changes, flag):
    times = {"fp32": 0.1, "bf16": 0.05}
    content = file_of(journal_of(tmp_path / "journal.jsonl", times, **changes))
    assert all(row["flags"] == [flag] for row in content["cases"])
    assert content["cases"][2]["verdict"] == "faster"
    assert record.problems(content) == []


def test_energy_gives_samples_per_joule(tmp_path):
    telemetry = TELEMETRY | {"energy_j": 4.0, "throttled": []}
    times = {"fp32": 0.1, "bf16": 0.05}
    content = file_of(journal_of(tmp_path / "journal.jsonl", times, telemetry=telemetry))
    assert content["cases"][0]["samples_per_joule"] == pytest.approx(4)
    assert content["cases"][0]["telemetry"]["throttled"] == {}
    assert record.problems(content) == []


def test_what_was_asked_for_and_not_measured_is_pending(tmp_path):
    journal = journal_of(tmp_path / "journal.jsonl", {"fp32": 0.1, "bf16": 0.05}, rounds=0)
    content = file_of(journal)
    assert {row["status"] for row in content["cases"]} == {"pending"}
    assert record.problems(content) == []


def test_a_machine_that_differs_from_itself_gives_no_verdicts(tmp_path):
    journal = journal_of(tmp_path / "journal.jsonl", {"fp32": 0.1, "control": 0.11, "bf16": 0.05})
    rows = {row["variant"]: row for row in file_of(journal)["cases"]}
    assert rows["bf16"]["verdict"] == "withheld"
    assert "noisy" in rows["bf16"]["flags"]
