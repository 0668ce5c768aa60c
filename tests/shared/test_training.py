"""What an optimizer step changes, and how it is saved: here what fp16 adds to it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shared.training import Learner, TrainingConfig

SOURCE = Path("checkpoint.pt")


def learner(precision: str, optimizer: str = "sgd") -> Learner:
    torch.manual_seed(0)
    return Learner(nn.Linear(3, 2), TrainingConfig(precision=precision, optimizer=optimizer), 10)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_only_fp16_has_a_scaled_loss_and_an_optimizer_that_is_not_fused(optimizer):
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        made = learner(precision, optimizer)
        is_fp16 = precision == "fp16"
        assert made.scaler.is_enabled() == is_fp16
        assert made.optimizer.defaults["fused"] is not is_fp16
        assert bool(made.state_dict()["scaler"]) == is_fp16


def test_another_precision_scales_nothing():
    scaler = learner("bf16").scaler
    loss = torch.tensor(3.0)
    assert scaler.scale(loss) is loss
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_overflow_skips_the_step_and_halves_the_scale(optimizer):
    made = learner("fp16", optimizer)
    before = [weight.detach().clone() for weight in made.model.parameters()]
    scale = made.scaler.get_scale()
    loss = made.model(torch.ones(1, 3)).sum() * torch.inf
    made.scaler.scale(loss).backward()
    made.scaler.step(made.optimizer)
    made.scaler.update()
    assert all(map(torch.equal, made.model.parameters(), before))
    assert made.scaler.get_scale() == scale / 2


def test_the_scale_and_its_count_of_good_steps_are_saved(tmp_path):
    made = learner("fp16")
    made.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
    for factor in (torch.inf, 1.0, 1.0):
        made.optimizer.zero_grad()
        made.scaler.scale(made.model(torch.ones(1, 3)).sum() * factor).backward()
        made.scaler.step(made.optimizer)
        made.scaler.update()
    torch.save(made.state_dict(), tmp_path / "file")
    again = learner("fp16")
    again.load_state_dict(torch.load(tmp_path / "file", weights_only=True), SOURCE)
    assert again.scaler.state_dict() == made.scaler.state_dict()
    assert again.scaler.get_scale() == 2.0**8
    assert again.scaler.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("change", [lambda s: s.pop("scaler"), lambda s: s.update(scaler={})])
def test_a_checkpoint_without_a_scale_begins_with_a_new_one(change):
    """Of a run in another precision, or from before there was one."""
    state = learner("fp32").state_dict()
    change(state)
    again = learner("fp16")
    again.load_state_dict(state, SOURCE)
    assert again.scaler.state_dict() == learner("fp16").scaler.state_dict()
    assert all(map(torch.equal, again.model.parameters(), learner("fp32").model.parameters()))


def test_a_checkpoint_of_fp16_goes_on_in_another_precision():
    again = learner("fp32")
    again.load_state_dict(learner("fp16").state_dict(), SOURCE)
    assert not again.scaler.is_enabled()
