"""The frame around main: exit codes, and what is printed where."""

import json
import math
import signal
import sys
from dataclasses import dataclass

import pytest

from shared.errors import Diverged, Interrupted, UserError
from shared.program import run_program
from shared.settings import RunConfig


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings."""


@pytest.fixture(autouse=True)
def _called_as_a_script(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["refs/some where/train.py", "--seed", "7"])


def run(main, *argv):
    return run_program(main, Config, "Trains.", argv)


def raising(error):
    def main(config):
        print("working")
        raise error

    return main


def test_the_last_line_is_the_result_as_json(capsys):
    def main(config):
        print("working")
        return {"seed": config.seed, "loss": 0.5, "share": None, "name": "ü"}

    assert run(main, "--seed", "3") == 0
    out, err = capsys.readouterr()
    *others, last = out.splitlines()
    assert others == ["working"]
    assert json.loads(last) == {"seed": 3, "loss": 0.5, "share": None, "name": "ü"}
    assert err == ""


def test_the_command_line_is_read_where_no_other_is_given(capsys):
    assert run_program(lambda config: {"seed": config.seed}, Config, "Trains.") == 0
    assert json.loads(capsys.readouterr().out) == {"seed": 7}


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_a_check_that_failed_ends_with_1_and_its_result(capsys, passed, code):
    assert run(lambda config: {"passed": passed}) == code
    assert json.loads(capsys.readouterr().out) == {"passed": passed}


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("a.toml: unknown key x"), 2, "train.py: error: a.toml: unknown key x"),
        (Diverged("the loss is nan at step 3"), 1, "train.py: the loss is nan at step 3"),
        (Interrupted(signal.SIGINT, "go on with"), 130, "train.py: go on with"),
        (Interrupted(signal.SIGTERM, "go on with"), 143, "train.py: go on with"),
        (KeyboardInterrupt(), 130, "train.py: interrupted"),
    ],
)
def test_an_early_end_is_one_line_and_a_code(capsys, error, code, said):
    assert run(raising(error)) == code
    assert capsys.readouterr() == ("working\n", said + "\n")


def test_a_bad_setting_ends_before_main(capsys):
    assert run(raising(AssertionError), "--epochs", "0") == 2
    assert capsys.readouterr() == ("", "train.py: error: --epochs must be ≥ 1, got 0\n")


def test_a_flag_that_does_not_exist_ends_with_2(capsys):
    with pytest.raises(SystemExit) as ended:
        run(raising(AssertionError), "--epoch", "3")
    assert ended.value.code == 2
    assert "--epochs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ValueError("a fault"), RuntimeError("a fault"), OSError("a fault")]
)
def test_a_fault_of_the_program_keeps_its_traceback(error):
    with pytest.raises(type(error), match="a fault") as caught:
        run(raising(error))
    assert caught.value is error


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, -math.inf]])
def test_a_result_that_is_not_json_is_a_fault(capsys, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        run(lambda config: {"test_loss": value})
    assert capsys.readouterr().out == ""
