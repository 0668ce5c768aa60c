"""The suite as people start it: `pytest bench`, with real models in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import record

ROOT = Path(__file__).parents[2]


def bench(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "bench", "-p", "no:cacheprovider", *flags],
        cwd=ROOT,
        env={name: v for name, v in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=550,
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A quick pass over what a CPU can show of compilation and of several processes."""
    file = tmp_path_factory.mktemp("bench") / "results.json"
    axes = ("--axis=compile", "--axis=parallel", "--bench-device=cpu", "--threads=2")
    return bench("--quick", *axes, f"--results={file}"), file


@pytest.mark.slow
def test_a_quick_pass_leaves_a_file_that_the_schema_describes(measured):
    done, file = measured
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert record.problems(content) == []
    assert {path.name for path in file.parent.iterdir()} == {"results.json", "results.jsonl"}
    rows = {row["case"]: row for row in content["cases"]}
    skipped = {name for name, row in rows.items() if row["status"] == "skipped"}
    ok = {name for name, row in rows.items() if row["status"] == "ok"}
    assert ok == {
        "compile/encoder/eager", "compile/encoder/control", "compile/encoder/default",
        "parallel/resnet18-32/single", "parallel/resnet18-32/control",
        "parallel/resnet18-32/ddp-1", "parallel/resnet18-32/ddp-2",
    }  # fmt: skip
    assert ok | skipped == set(rows)
    assert all(rows[name]["reason"] for name in skipped)
    assert len(content["benchmarks"]) == len(ok)
    for name in ok:
        assert rows[name]["numerics"]["passed"], (name, rows[name]["numerics"])
        assert rows[name]["flop_per_s"] > 0


@pytest.mark.slow
def test_compilation_is_told_apart_and_counted(measured):
    rows = {row["case"]: row for row in json.loads(measured[1].read_text())["cases"]}
    eager, compiled = rows["compile/encoder/eager"], rows["compile/encoder/default"]
    assert eager["compile"] == {"graphs": 0, "breaks": 0}
    assert compiled["compile"] == {"graphs": 1, "breaks": 0}
    assert compiled["cold"]["first_step_s"] > 5 * compiled["step_s"]
    assert "recompiled" not in compiled["flags"]


@pytest.mark.slow
def test_ranks_are_told_apart(measured):
    rows = {row["case"]: row for row in json.loads(measured[1].read_text())["cases"]}
    assert rows["parallel/resnet18-32/single"]["rank_spread"] is None
    assert 0 <= rows["parallel/resnet18-32/ddp-2"]["rank_spread"] < 1


@pytest.mark.slow
def test_pytest_benchmark_reads_the_file_and_its_times_are_ours(measured):
    file = measured[1]
    content = json.loads(file.read_text())
    rows = {row["case"]: row for row in content["cases"]}
    for benchmark in content["benchmarks"]:
        launches = rows[benchmark["params"]["case"]]["launches"]
        blocks = [step for launch in launches for step in launch["block_step_s"]]
        assert benchmark["stats"]["data"] == blocks
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "compare", file, "--group-by=group"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "ddp-2" in done.stdout


def test_mistakes_are_one_line_before_anything_is_started(tmp_path):
    done = bench("--axis=precison", f"--results={tmp_path}/a.json")
    assert done.returncode == 4
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("ERROR: --axis precison: there are parallel")
    assert list(tmp_path.iterdir()) == []
