"""The trace of a few steps."""

import json

import pytest
import torch

from shared.profiling import STEPS, TRACE_FILE, WARM_UP, profiler


def train(folder, steps):
    with profiler(folder) as profile:
        for _ in range(steps):
            torch.ones(4) @ torch.ones(4)
            profile.step()


def test_a_few_steps_are_recorded_once(tmp_path, capsys):
    train(tmp_path, 3 * (WARM_UP + 1 + STEPS))
    trace = json.loads((tmp_path / TRACE_FILE).read_text("utf-8"))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    first = WARM_UP + 1
    expected = {f"ProfilerStep#{step}" for step in range(first, first + STEPS)}
    assert {name for name in names if name.startswith("ProfilerStep")} == expected
    assert names.count("aten::dot") == STEPS
    assert "aten::dot" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [0, WARM_UP])
def test_a_run_that_is_all_warm_up_leaves_no_trace(tmp_path, steps):
    train(tmp_path, steps)
    assert list(tmp_path.iterdir()) == []
