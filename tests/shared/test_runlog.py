"""The log of a run: for programs, for TensorBoard, for people."""

import io
import json
import math
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shared import runlog
from shared.runlog import METRICS_FILE, PLAIN_LINE_EVERY, RunLog, read


@pytest.fixture
def log(tmp_path):
    with RunLog(tmp_path) as log:
        yield log


@pytest.fixture
def now(monkeypatch):
    """A clock that the test sets."""
    fake = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(runlog, "time", SimpleNamespace(monotonic=lambda: fake.seconds))
    return fake


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Counted(io.StringIO):
    """What was written when it was last flushed."""

    flushed = ""

    def flush(self):
        self.flushed = self.getvalue()


def batches(*sizes):
    return [SimpleNamespace(samples=size) for size in sizes]


# ------------------------------------------------------------------------------------ for programs


def test_events_are_lines_of_json(tmp_path, log):
    log.event("step", 3, loss=0.5, peak=None, note="ü\u2028\n")
    log.event("result", 3, result={"passed": True})
    lines = (tmp_path / METRICS_FILE).read_text("utf-8").split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"event": "step", "step": 3, "loss": 0.5, "peak": None, "note": "ü\u2028\n"},
        {"event": "result", "step": 3, "result": {"passed": True}},
    ]
    assert lines[-1] == ""
    assert read(tmp_path) == [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_json_is_refused_and_leaves_no_trace(tmp_path, log, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.event("step", 1, loss=value)
    assert read(tmp_path) == []


def test_a_line_that_a_crash_tore_is_not_read(tmp_path, log):
    log.event("step", 1, loss=1.0)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"event": "step", "st')
    assert [event["step"] for event in read(tmp_path)] == [1]


def test_a_folder_without_a_log_has_no_events(tmp_path):
    assert read(tmp_path) == []


def test_the_position_is_the_length_of_the_file(tmp_path, log):
    assert log.flushed_position() == 0
    log.event("step", 1, note="ü")
    assert log.flushed_position() == (tmp_path / METRICS_FILE).stat().st_size > 0


def steps_after(tmp_path, position):
    """Steps in the log after a crash that is continued from a position."""
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"event": "step", "st')
    with RunLog(tmp_path, position, step=2) as log:
        assert log.flushed_position() == position
        log.event("step", 3)
    return [event["step"] for event in read(tmp_path)]


def test_what_was_logged_after_the_checkpoint_is_cut_off(tmp_path):
    with RunLog(tmp_path) as log:
        log.event("step", 1)
        log.event("step", 2)
        position = log.flushed_position()
        log.event("step", 3)
        log.event("step", 4)
    assert steps_after(tmp_path, position) == [1, 2, 3]


def test_a_log_without_a_checkpoint_starts_anew(tmp_path):
    with RunLog(tmp_path) as log:
        log.event("step", 1)
    assert steps_after(tmp_path, 0) == [3]


def test_a_log_that_is_shorter_than_its_position_is_not_filled_up(tmp_path):
    with RunLog(tmp_path) as log:
        log.event("step", 1)
        position = log.flushed_position()
    with RunLog(tmp_path, position + 100, step=1) as log:
        assert log.flushed_position() == position
        log.event("step", 2)
    assert [event["step"] for event in read(tmp_path)] == [1, 2]


# --------------------------------------------------------------------------------- for TensorBoard


def test_tensorboard_shows_numbers_and_forgets_later_steps(tmp_path):
    with RunLog(tmp_path) as log:
        for step in range(1, 5):
            log.event("step", step, loss=float(step), count=step, flag=True, peak=None, note="x")
    with RunLog(tmp_path, step=2) as log:
        log.event("step", 3, loss=30.0)
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(board.Tags()["scalars"]) == ["step/count", "step/loss"]
    scalars = [(scalar.step, scalar.value) for scalar in board.Scalars("step/loss")]
    assert scalars == [(1, 1.0), (2, 2.0), (3, 30.0)]


# -------------------------------------------------------------------------------------- for people


def test_progress_passes_batches_through(log):
    given = batches(4, 4, 2)
    assert list(log.progress(iter(given), 0, 10, 4, "epoch 1/2")) == given


def test_a_bar_starts_where_the_epoch_does_and_counts_samples(log, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    for _ in log.progress(batches(4, 2), 4, 10, 4, "epoch 1/2"):
        log.show(loss=0.123456, lr=0.1)
    assert "epoch 1/2:  40%" in terminal.getvalue()
    assert "4/10" in terminal.getvalue()
    assert "8/10" in terminal.getvalue()
    assert "loss 0.1235, lr 0.1" in terminal.getvalue()


def test_lines_are_printed_above_the_bar(log, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = log.progress(batches(4, 4), 0, 8, 4, "epoch 1/2")
    next(progress)
    before = len(terminal.getvalue())
    log.say("a line")
    assert "0/8" in terminal.getvalue()[before:], "the bar is drawn again below it"
    progress.close()
    log.say("another")
    assert capsys.readouterr().out == "a line\nanother\n"


def test_a_bar_that_was_left_early_is_gone(log, monkeypatch, now, capsys):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    progress = log.progress(batches(4, 4), 0, 8, 4, "epoch 1/2")
    next(progress)
    progress.close()
    screen = terminal.getvalue()
    now.seconds = PLAIN_LINE_EVERY + 1e6
    log.show(loss=1.0)
    assert terminal.getvalue() == screen
    assert capsys.readouterr().out == "loss 1\n"


def test_without_a_terminal_values_are_a_line_now_and_then(tmp_path, now, capsys):
    with RunLog(tmp_path) as log:
        for _ in log.progress(batches(*[1] * 10), 0, 10, 1, "epoch 1/2"):
            now.seconds += PLAIN_LINE_EVERY / 4
            log.show(step=now.seconds)
    out, err = capsys.readouterr()
    assert out.splitlines() == ["step 30", "step 60"]
    assert err == ""


def test_a_line_is_there_at_once_also_in_a_file(log, monkeypatch):
    """Who watches a log file must not wait for a buffer to fill."""
    file = Counted()
    monkeypatch.setattr(sys, "stdout", file)
    log.say("before")
    assert file.flushed == "before\n"
    for _ in log.progress(batches(1), 0, 1, 1, "epoch 1/2"):
        log.say("within")
    assert file.flushed == "before\nwithin\n"
