"""What a run makes of steps that were skipped."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from shared import runlog
from shared.data.images import ImageBatch
from shared.data.loading import Loader
from shared.data.sampling import SampleKey
from shared.errors import Diverged
from shared.runs import PATIENCE, Run, StepResult
from shared.training import Learner, TrainingConfig


class Numbers:
    """A data set whose samples hold nothing."""

    def __len__(self) -> int:
        return 2 * (PATIENCE + 10)

    def __getitems__(self, keys: list[SampleKey]) -> ImageBatch:
        size = len(keys)
        return ImageBatch(torch.zeros(size, 1), torch.zeros(size), torch.zeros(size))


def result(skipped: bool, loss: float = 1.0, grad_norm: float | None = None) -> StepResult:
    if grad_norm is None:
        grad_norm = math.inf if skipped else 2.0
    return StepResult(torch.tensor(loss), torch.tensor(grad_norm), torch.tensor(1), skipped)


def told(folder: Path, *results: StepResult) -> list[dict]:
    """The events in the log of a run whose first steps gave these results."""
    config = TrainingConfig(
        run_dir=folder, device="cpu", batch_size=2, log_every=1, checkpoint_every=0,
        keep_freed_memory=False,
    )  # fmt: skip
    loader = Loader(Numbers(), config.batch_size, seed=0, shuffle=True, workers=0, pin=False)
    with Run(config, "test") as run:
        run.begin(Learner(nn.Linear(1, 1), config, len(loader)), {})
        for _, step in zip(run.batches(loader), results, strict=False):
            run.step_ended(step, lr=0.1)
    return runlog.read(folder)


def test_a_skipped_step_is_told_and_logged_without_a_norm_and_counted(tmp_path, capsys):
    events = told(tmp_path, result(False), result(True), result(False))
    assert [event["step"] for event in events if event["event"] == "skipped"] == [2]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3]
    assert [event["grad_norm"] for event in steps] == [2.0, None, 2.0]
    assert [event["loss"] for event in steps] == [1.0] * 3
    said = capsys.readouterr().out
    assert said.count("is skipped") == 1
    assert "step 2 is skipped: gradients overflowed; the loss scale is halved\n" in said


def test_many_steps_may_be_skipped_if_not_in_a_row(tmp_path):
    most = [result(True)] * (PATIENCE - 1)
    events = told(tmp_path, *most, result(False), *most[:9])
    assert len([event for event in events if event["event"] == "skipped"]) == PATIENCE + 8


def test_too_many_in_a_row_have_diverged(tmp_path):
    with pytest.raises(Diverged) as caught:
        told(tmp_path, result(False), *[result(True)] * (PATIENCE + 3))
    assert str(caught.value).startswith(
        f"{PATIENCE} steps in a row had gradients that are not finite, up to step {PATIENCE + 1}; "
    )
    assert "\n" not in str(caught.value)
    skipped = [event for event in runlog.read(tmp_path) if event["event"] == "skipped"]
    assert len(skipped) == PATIENCE, "the last one is in the log too"


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (result(False, grad_norm=math.inf), "gradient norm is inf"),
        (result(False, loss=math.nan), "loss is nan"),
        (result(True, loss=math.nan), "loss is nan"),
    ],
)
def test_only_the_norm_of_a_skipped_step_may_be_infinite(tmp_path, step, name):
    with pytest.raises(Diverged, match=rf"^the {name} at step 2 \(epoch 1\)"):
        told(tmp_path, result(False), step)
