"""What a suite is asked for, and what it refuses before anything is started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import record
from bench.axes import AXES
from bench.suite import Options, Suite
from shared.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": ["precison"]}, "--axis precison: there are parallel, precision"),
        ({"workload": ["alexnet"]}, "--workload alexnet: there are resnet18-32"),
        ({"launches": 0}, "--launches 0: must be between 1 and 1000"),
        ({"block_s": float("nan")}, "--block-seconds nan: must be between"),
        ({"margin": 1.5}, "--margin 1.5: must be between"),
        ({"batch_size": "big"}, "--batch-size big: must be a positive number, or auto"),
        ({"batch_size": "0"}, "--batch-size 0: must be a positive number, or auto"),
        ({"against": "python", "against_commit": "HEAD"}, "exclude each other"),
        ({"resume": True}, "--resume needs --results"),
        ({"quick": True, "launches": 3}, "--launches: --quick has its own"),
    ],
)
def test_what_cannot_be_is_named(changes, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        Options(**changes)


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(UserError) as caught:
        Options(axis=["x"], launches=-1, batch_size="y")
    assert len(str(caught.value).splitlines()) == 3


def test_a_quick_pass_has_one_workload_of_every_axis():
    cases = list(Options(quick=True).cases())
    assert {case.axis for case in cases} == set(AXES)
    assert len({(case.axis, case.workload.name) for case in cases}) == len(AXES)


def test_files_that_are_there_are_not_written_over(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(UserError, match=r"a\.jsonl: exists; --resume goes on with it"):
        Suite(Options(results=tmp_path / "a.json"), print)
    with pytest.raises(UserError, match=r"--resume: there is no .*b\.jsonl"):
        Suite(Options(results=tmp_path / "b.json", resume=True), print)


def test_a_selected_variant_brings_its_baseline_and_control(tmp_path):
    suite = Suite(Options(results=tmp_path / "a.json", axis=["precision"]), print)
    suite.select(["precision/lstm/bf16"])
    assert {name: [case.variant for case in cases] for name, cases in suite.selected.items()} == {
        "precision/lstm": ["fp32", "control", "bf16"]
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"against": "/no/python"}, "--against /no/python: .*No such file"),
        ({"against": "/bin/false"}, "--against /bin/false: it says nothing"),
        ({"against_commit": "no-such-commit"}, "--against-commit no-such-commit: fatal"),
    ],
)
def test_another_place_that_is_not_there_is_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        Suite(Options(results=tmp_path / "a.json", **changes), print)


def test_reading_tables_and_files_takes_no_torch():
    code = "import sys, bench.suite, bench.record; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_another_commit_is_checked_out_and_taken_away_again(tmp_path):
    git = ["git", "-C", str(ROOT)]
    trees = [*git, "worktree", "list"]
    before = subprocess.run(trees, capture_output=True, check=True).stdout
    suite = Suite(Options(results=tmp_path / "a.json", against_commit="HEAD"), print)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert suite.plan.against == f"commit {head.stdout.strip()}"
    assert subprocess.run(trees, capture_output=True, check=True).stdout != before
    suite.close()
    assert subprocess.run(trees, capture_output=True, check=True).stdout == before


RESULTS = sorted((ROOT / "bench/results").glob("*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_committed_results_are_what_the_schema_describes(file):
    assert record.problems(json.loads(file.read_text())) == []


def test_there_are_committed_results_and_each_is_told_of():
    told = (ROOT / "bench/results/README.md").read_text()
    assert len(RESULTS) >= 3
    assert all(f"]({file.name})" in told for file in RESULTS)
