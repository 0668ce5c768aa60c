"""Parameter groups, schedules, resuming with other hyperparameters, EMA, and accumulation."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from shared.errors import UserError
from shared.optimization import (
    Ema,
    parameter_groups,
    plateau,
    restore,
    step_decay,
    warmup_cosine,
)


@pytest.fixture(autouse=True)
def _one_seeded_thread():
    """A second thread only waits for work on tensors as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def through_a_file(state):
    """Save and load as a checkpoint does: what is not plain data is refused."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---------------------------------------------------------------------------- parameter groups


class Net(nn.Module):
    """One of every kind of parameter that the split has to know."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.batch_norm = nn.BatchNorm2d(2)
        self.layer_norm = nn.LayerNorm((3, 4))
        self.rms_norm = nn.RMSNorm((3, 4))
        self.lstm = nn.LSTM(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.rel_pos_bias = nn.Parameter(torch.zeros(3, 3))
        self.layer_scale = nn.Parameter(torch.ones(4))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.linear = nn.Linear(4, 6)


DECAYED = {
    "embedding.weight",
    "conv.weight",
    "lstm.weight_ih_l0",
    "lstm.weight_hh_l0",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "linear.weight",
}


def names_in(group, model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in group["params"]]


def test_matrices_decay_and_norms_biases_and_scales_do_not():
    model = Net()
    decayed, kept = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    assert set(names_in(decayed, model)) == DECAYED
    assert set(names_in(kept, model)) == {n for n, _ in model.named_parameters()} - DECAYED


def test_a_shared_parameter_is_in_the_groups_once():
    model = Net()
    model.linear.weight = model.embedding.weight
    grouped = [p for group in parameter_groups(model, 0.1) for p in group["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))
    torch.optim.SGD(parameter_groups(model, 0.1))  # which refuses a parameter that comes twice


def test_frozen_parameters_are_left_out():
    model = Net()
    model.lstm.requires_grad_(False)
    names = [name for group in parameter_groups(model, 0.1) for name in names_in(group, model)]
    expected = {name for name, _ in model.named_parameters() if not name.startswith("lstm")}
    assert set(names) == expected


def test_an_empty_group_is_left_out():
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
    assert len(parameter_groups(nn.BatchNorm1d(2), 0.1)) == 1
    assert parameter_groups(nn.ReLU(), 0.1) == []


def test_the_split_does_not_depend_on_the_weight_decay():
    model = Net()
    sizes = [[len(g["params"]) for g in parameter_groups(model, wd)] for wd in (0.0, 0.1)]
    assert sizes[0] == sizes[1]


def test_only_the_decayed_group_shrinks_when_gradients_are_zero():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = model.state_dict()
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * 0.95)
    assert all(torch.equal(after[k], before[k]) for k in ("0.bias", "1.weight", "1.bias"))


# ---------------------------------------------------------------------------- schedules


def sgd(lr=0.1, parameters=1, **kwargs):
    groups = [{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(parameters)]
    return torch.optim.SGD(groups, lr=lr, **kwargs)


def lrs(schedule, optimizer, epochs, steps_per_epoch, metrics=None):
    """The learning rate of every step of a loop that makes both calls, and the one after it."""
    seen = []
    for epoch in range(epochs):
        for _ in range(steps_per_epoch):
            seen.append(schedule.lr)
            optimizer.step()
            schedule.step_ended()
        schedule.epoch_ended(metrics[epoch] if metrics else 1.0)
    return [*seen, schedule.lr]


def test_warmup_rises_from_a_first_step_that_counts_and_the_cosine_falls_to_zero():
    optimizer = sgd(lr=0.8)
    seen = lrs(warmup_cosine(optimizer, warmup_steps=4, total_steps=8), optimizer, 2, 4)
    cosine = [0.8 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, *cosine])
    assert seen[-1] == 0.0


def test_without_warmup_the_first_step_has_the_whole_learning_rate():
    assert warmup_cosine(sgd(lr=0.3), warmup_steps=0, total_steps=5).lr == 0.3


def test_a_run_that_is_all_warmup_ends_at_the_whole_learning_rate():
    optimizer = sgd(lr=0.3)
    seen = lrs(warmup_cosine(optimizer, warmup_steps=3, total_steps=3), optimizer, 1, 3)
    assert seen == pytest.approx([0.1, 0.2, 0.3, 0.0])


def test_steps_beyond_the_total_stay_at_the_final_value():
    optimizer = sgd()
    seen = lrs(warmup_cosine(optimizer, warmup_steps=1, total_steps=3), optimizer, 1, 9)
    assert seen[3:] == [0.0] * 7


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_warmup_never_falls_and_the_cosine_never_rises(lengths):
    warmup, total = lengths
    optimizer = sgd(lr=1.0)
    seen = lrs(warmup_cosine(optimizer, warmup, total), optimizer, 1, total)
    assert seen[:warmup] == sorted(seen[:warmup])
    assert seen[warmup:] == sorted(seen[warmup:], reverse=True)
    assert all(0.0 < lr <= 1.0 for lr in seen[:-1])
    assert seen[-1] == 0.0


def test_step_decay_is_steplr_and_does_not_count_steps():
    optimizer, reference = sgd(lr=0.4), sgd(lr=0.4)
    seen = lrs(step_decay(optimizer, epochs_between=2, gamma=0.3), optimizer, 7, 3)
    scheduler, expected = StepLR(reference, 2, 0.3), []
    for _ in range(7):
        expected += [reference.param_groups[0]["lr"]] * 3
        reference.step()
        scheduler.step()
    assert seen == pytest.approx([*expected, reference.param_groups[0]["lr"]], rel=1e-12)
    assert len(set(seen)) == 4


def test_plateau_is_reducelronplateau_and_does_not_count_steps():
    metrics = [1.0, 0.9, 0.9, 0.95, 0.9, 0.5, 0.6, 0.7, 0.8, math.nan, 0.4, 0.4]
    optimizer, reference = sgd(lr=0.4), sgd(lr=0.4)
    seen = lrs(plateau(optimizer, factor=0.5, patience=1), optimizer, 12, 2, metrics)
    scheduler, expected = ReduceLROnPlateau(reference, factor=0.5, patience=1), []
    for metric in metrics:
        expected += [reference.param_groups[0]["lr"]] * 2
        scheduler.step(metric)
    assert seen == [*expected, reference.param_groups[0]["lr"]]
    assert 3 <= len(set(seen)) <= 5


def test_the_cosine_does_not_count_epochs():
    optimizer = sgd()
    schedule = warmup_cosine(optimizer, warmup_steps=2, total_steps=4)
    before = schedule.lr
    for _ in range(3):
        schedule.epoch_ended(1.0)
    assert schedule.lr == before


def test_every_group_keeps_its_own_learning_rate_in_proportion():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    schedule = warmup_cosine(optimizer, warmup_steps=2, total_steps=9)
    for _ in range(6):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert schedule.lr == first
        assert second == pytest.approx(first / 10)
        optimizer.step()
        schedule.step_ended()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o: warmup_cosine(o, 51, 50), "51 steps does not fit into a run of 50 steps"),
        (lambda o: warmup_cosine(o, -1, 50), "-1"),
        (lambda o: step_decay(o, 0, 0.1), "every 0 epochs"),
        (lambda o: step_decay(o, 1, 0.0), r"\(0, 1\], not 0.0"),
        (lambda o: step_decay(o, 1, 1.5), "1.5"),
        (lambda o: plateau(o, 1.0, 3), "1.0"),
        (lambda o: plateau(o, 0.0, 3), "0.0"),
        (lambda o: plateau(o, 0.5, -1), "-1 epochs"),
        (lambda o: Ema(nn.Linear(1, 1), 1.0), r"\[0, 1\), not 1.0"),
        (lambda o: Ema(nn.Linear(1, 1), -0.1), "-0.1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_line_that_names_its_value(make, says):
    with pytest.raises(UserError, match=says) as error:
        make(sgd())
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------- resuming

OPTIMIZERS = {
    "sgd": lambda groups, lr=0.1, **kw: torch.optim.SGD(
        groups, lr=lr, **{"momentum": 0.9, "nesterov": True, **kw}
    ),
    "adamw": lambda groups, lr=0.01, **kw: torch.optim.AdamW(groups, lr=lr, **kw),
}
SCHEDULES = {
    "cosine": lambda optimizer: warmup_cosine(optimizer, warmup_steps=5, total_steps=40),
    "step": lambda optimizer: step_decay(optimizer, epochs_between=2, gamma=0.3),
    "plateau": lambda optimizer: plateau(optimizer, factor=0.3, patience=1),
}


class Run:
    """A tiny training run; everything random in it is a function of the step."""

    def __init__(self, optimizer="sgd", schedule="cosine", weight_decay=0.1, **hyperparameters):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
        groups = parameter_groups(self.model, weight_decay)
        self.optimizer = OPTIMIZERS[optimizer](groups, **hyperparameters)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.lrs = []

    def train(self, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(6, 4, generator=generator)
            y = torch.randint(3, (6,), generator=generator)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.lrs.append(self.schedule.lr)
            self.optimizer.step()
            self.schedule.step_ended()
            if step % 3 == 2:  # the end of an epoch; the metric rises at times
                self.schedule.epoch_ended([1.0, 0.8, 0.9, 0.95, 0.7, 0.75, 0.72][step // 3 % 7])
        return self

    def saved(self):
        return through_a_file(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
            }
        )

    def resume(self, saved):
        saved = copy.deepcopy(saved)  # the optimizer makes the tensors its own
        self.model.load_state_dict(saved["model"])
        restore(self.optimizer, self.schedule, saved["optimizer"], saved["schedule"])
        return self

    def weights(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


@pytest.mark.parametrize(("cut", "fused"), [(1, False), (4, True), (9, False), (13, True)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_continues_bitwise(optimizer, schedule, cut, fused):
    """Cut in warm-up, in mid-epoch, between two bad epochs, and after a reduction."""
    whole = Run(optimizer, schedule, fused=fused).train(range(22))
    first = Run(optimizer, schedule, fused=fused).train(range(cut))
    second = Run(optimizer, schedule, fused=fused).resume(first.saved()).train(range(cut, 22))
    assert len(set(whole.lrs)) >= 3, "a schedule that does not move proves nothing"
    assert whole.weights().isfinite().all()
    assert first.lrs + second.lrs == whole.lrs
    assert torch.equal(second.weights(), whole.weights())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_another_learning_rate_acts_from_the_first_step_and_for_the_rest(optimizer, schedule):
    saved = Run(optimizer, schedule, lr=0.02).train(range(8)).saved()
    same = Run(optimizer, schedule, lr=0.02).resume(saved).train(range(8, 22))
    doubled = Run(optimizer, schedule, lr=0.04).resume(saved).train(range(8, 22))
    assert doubled.lrs == pytest.approx([2 * lr for lr in same.lrs], rel=1e-12)
    assert len(set(doubled.lrs)) > 1


def test_a_changed_learning_rate_survives_a_second_resume():
    saved = Run(schedule="plateau", lr=0.02).train(range(8)).saved()
    changed = Run(schedule="plateau", lr=0.04).resume(saved).train(range(8, 12))
    whole = copy.deepcopy(changed.lrs)
    again = Run(schedule="plateau", lr=0.04).resume(changed.saved()).train(range(12, 20))
    whole += changed.train(range(12, 20)).lrs[4:]
    assert changed.lrs[:4] + again.lrs == whole


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters"),
    [
        ("sgd", {"weight_decay": 0.7}),
        ("sgd", {"momentum": 0.5}),
        ("sgd", {"nesterov": False}),
        ("adamw", {"weight_decay": 0.7}),
        ("adamw", {"betas": (0.5, 0.9)}),
        ("adamw", {"eps": 0.1}),
    ],
)
def test_every_other_hyperparameter_acts_as_it_is_configured_now(optimizer, hyperparameters):
    saved = Run(optimizer).train(range(6)).saved()
    run = Run(optimizer, **hyperparameters).resume(saved)
    # What the configured hyperparameters make of the saved moments, set one by one.
    by_hand = Run(optimizer).resume(saved)
    for group in by_hand.optimizer.param_groups:
        for key, value in hyperparameters.items():
            if not (key == "weight_decay" and group["weight_decay"] == 0.0):
                group[key] = value
    assert torch.equal(run.train(range(6, 12)).weights(), by_hand.train(range(6, 12)).weights())
    unchanged = Run(optimizer).resume(saved).train(range(6, 12))
    assert not torch.equal(run.weights(), unchanged.weights())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_run_can_change_to_or_from_a_fused_optimizer(optimizer, fused):
    saved = Run(optimizer, fused=not fused).train(range(6)).saved()
    run = Run(optimizer, fused=fused).resume(saved).train(range(6, 12))
    assert all(group["fused"] is fused for group in run.optimizer.param_groups)
    whole = Run(optimizer, fused=not fused).train(range(12))
    torch.testing.assert_close(run.weights(), whole.weights())


def test_a_fused_optimizer_gets_its_step_count_where_the_parameters_are():
    """Seen on the meta device, since on a CPU both places are the same."""
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    saved = Run("adamw", fused=False).train(range(2)).saved()
    saved["optimizer"]["param_groups"] = [
        {**group, "params": [0]} for group in saved["optimizer"]["param_groups"][:1]
    ]
    optimizer = torch.optim.AdamW([parameter], fused=True)
    restore(optimizer, SCHEDULES["cosine"](optimizer), saved["optimizer"], saved["schedule"])
    assert optimizer.state[parameter]["step"].device.type == "meta"


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (warmup_cosine, {"warmup_steps": 2, "total_steps": 90}),
        (step_decay, {"epochs_between": 1, "gamma": 0.9}),
    ],
)
def test_a_resumed_schedule_follows_the_lengths_that_are_configured_now(make, changed):
    before = {"warmup_steps": 1, "total_steps": 30}
    if make is step_decay:
        before = {"epochs_between": 3, "gamma": 0.5}
    optimizer = sgd()
    schedule = make(optimizer, **before)
    lrs(schedule, optimizer, 5, 4)
    whole_optimizer = sgd()
    whole = lrs(make(whole_optimizer, **changed), whole_optimizer, 7, 4)
    resumed = sgd()
    resumed_schedule = make(resumed, **changed)
    states = through_a_file([optimizer.state_dict(), schedule.state_dict()])
    restore(resumed, resumed_schedule, *states)
    assert lrs(resumed_schedule, resumed, 2, 4) == whole[20:]


def test_a_resumed_plateau_follows_the_factor_and_patience_that_are_configured_now():
    optimizer = sgd(lr=1.0)
    schedule = plateau(optimizer, factor=0.5, patience=0)
    lrs(schedule, optimizer, 2, 1, [1.0, 1.0])
    assert schedule.lr == 0.5
    resumed = sgd(lr=1.0)
    resumed_schedule = plateau(resumed, factor=0.1, patience=2)
    restore(resumed, resumed_schedule, optimizer.state_dict(), schedule.state_dict())
    seen = lrs(resumed_schedule, resumed, 3, 1, [1.0, 1.0, 1.0])
    assert seen == pytest.approx([0.5, 0.5, 0.5, 0.05])


def test_a_resumed_plateau_has_exactly_the_saved_learning_rate():
    """With these numbers lr / base * base is not lr."""
    optimizer = sgd(lr=0.3)
    schedule = plateau(optimizer, factor=0.1, patience=0)
    lrs(schedule, optimizer, 4, 1)
    assert schedule.lr / 0.3 * 0.3 != schedule.lr
    resumed = sgd(lr=0.3)
    resumed_schedule = plateau(resumed, factor=0.1, patience=0)
    restore(resumed, resumed_schedule, optimizer.state_dict(), schedule.state_dict())
    assert resumed_schedule.lr == schedule.lr


def test_another_kind_of_schedule_is_refused():
    saved = Run(schedule="cosine").train(range(2)).saved()
    with pytest.raises(UserError, match="StepSchedule, which a PlateauSchedule cannot"):
        Run(schedule="plateau").resume(saved)


@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
@pytest.mark.parametrize(("now", "then"), [("sgd", "adamw"), ("adamw", "sgd")])
def test_another_kind_of_optimizer_is_refused(now, then, schedule):
    saved = Run(then, schedule).train(range(2)).saved()
    with pytest.raises(UserError, match=r"another optimizer: it has .*, and not .*"):
        Run(now, schedule).resume(saved)


def test_a_hyperparameter_that_a_newer_pytorch_added_is_no_other_optimizer():
    saved = Run("adamw").train(range(4)).saved()
    for group in saved["optimizer"]["param_groups"]:
        del group["decoupled_weight_decay"]
    run = Run("adamw").resume(saved).train(range(4, 8))
    assert torch.equal(run.weights(), Run("adamw").train(range(8)).weights())


def test_another_set_of_parameters_is_refused():
    saved = Run().train(range(2)).saved()
    run = Run()
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"groups of \[2, 4\] tensors, this model's has \[6\]"):
        restore(optimizer, SCHEDULES["cosine"](optimizer), saved["optimizer"], saved["schedule"])


# ---------------------------------------------------------------------------- EMA


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        return self.norm(self.conv(x)).relu()


def change(model, seed):
    """Stand in for an optimizer step: move the weights, and the buffers by a forward pass."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    model.train()
    model(torch.randn(2, 3, 5, 5, generator=generator))
    model.mask.logical_not_()


def test_the_first_update_copies_and_later_ones_average_weights_and_buffers():
    model = Averaged()
    ema = Ema(model, decay=0.9)
    change(model, 0)
    ema.update()
    expected = copy.deepcopy(model.state_dict())
    assert all(torch.equal(value, expected[key]) for key, value in ema.model.state_dict().items())
    for seed in range(1, 6):
        change(model, seed)
        ema.update()
        for key, value in model.state_dict().items():
            floating = value.is_floating_point()
            expected[key] = 0.9 * expected[key] + 0.1 * value if floating else value.clone()
    averaged = ema.model.state_dict()
    assert averaged["norm.num_batches_tracked"] == 6
    assert not torch.equal(averaged["norm.running_mean"], model.norm.running_mean)
    torch.testing.assert_close(averaged, expected)


def test_integer_buffers_are_those_of_the_model():
    model = Averaged()
    ema = Ema(model, decay=0.999)
    for seed in range(5):
        change(model, seed)
        ema.update()
        assert torch.equal(ema.model.norm.num_batches_tracked, model.norm.num_batches_tracked)
        assert torch.equal(ema.model.mask, model.mask)


def test_the_averaged_model_has_the_same_keys_and_is_ready_to_evaluate():
    model = Averaged()
    ema = Ema(model, decay=0.9)
    change(model, 0)
    ema.update()
    assert list(ema.model.state_dict()) == list(model.state_dict())
    assert type(ema.model) is Averaged
    assert not ema.model.training
    assert not any(parameter.requires_grad for parameter in ema.model.parameters())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(ema.model(x), model.eval()(x))


def test_a_resumed_average_continues_bitwise_with_its_count():
    def advance(model, ema, seeds):
        for seed in seeds:
            change(model, seed)
            ema.update()

    torch.manual_seed(1)
    model = Averaged()
    ema = Ema(model, decay=0.9)
    advance(model, ema, range(3))
    saved = through_a_file({"model": model.state_dict(), "ema": ema.state_dict()})
    resumed_model = Averaged()
    resumed = Ema(resumed_model, decay=0.9)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["ema"])
    assert resumed.state_dict()["updates"] == 3
    advance(model, ema, range(3, 6))
    advance(resumed_model, resumed, range(3, 6))
    assert not torch.equal(ema.model.conv.weight, model.conv.weight)
    for key, value in ema.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[key]), key


def test_a_resumed_average_takes_the_decay_that_is_configured_now():
    model = nn.Linear(1, 1, bias=False)
    ema = Ema(model, decay=0.9)
    nn.init.zeros_(model.weight)
    ema.update()
    resumed = Ema(model, decay=0.5)
    resumed.load_state_dict(ema.state_dict())
    nn.init.ones_(model.weight)
    resumed.update()
    assert resumed.model.weight.item() == 0.5


def test_a_tied_weight_stays_tied_and_is_averaged_once():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    ema = Ema(model, decay=0.5)
    nn.init.zeros_(model["a"].weight)
    ema.update()
    nn.init.ones_(model["a"].weight)
    ema.update()
    assert ema.model["a"].weight is ema.model["b"].weight
    assert torch.equal(ema.model["b"].weight, torch.full((2, 2), 0.5))


@pytest.mark.parametrize("after", [False, True], ids=["before the Ema", "after the Ema"])
def test_a_channels_last_model_has_the_same_average(after):
    plain = Averaged()
    model = copy.deepcopy(plain)
    if not after:
        model.to(memory_format=torch.channels_last)
    ema, reference = Ema(model, decay=0.9), Ema(plain, decay=0.9)
    if after:
        model.to(memory_format=torch.channels_last)
    for seed in range(3):
        change(plain, seed)
        model.load_state_dict(plain.state_dict())
        ema.update()
        reference.update()
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    if not after:
        assert ema.model.conv.weight.stride() == model.conv.weight.stride()
    torch.testing.assert_close(ema.model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("after", [False, True], ids=["before the Ema", "after the Ema"])
def test_a_compiled_model_can_be_averaged(after):
    model = Averaged()
    if not after:
        model.compile(backend="eager")
        model(torch.randn(2, 3, 5, 5))
    ema = Ema(model, decay=0.9)
    if after:
        model.compile(backend="eager")
    change(model, 0)
    ema.update()
    assert list(ema.model.state_dict()) == list(model.state_dict())
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(ema.model(x), model.eval()(x))


# ---------------------------------------------------------------------------- accumulation


def gradients(model, batches, loss):
    model.zero_grad()
    for x, y in batches:
        loss(model(x), y).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.sampled_from([0.0, 0.1]))
def test_a_sum_over_the_samples_of_the_whole_batch_accumulates_to_its_gradient(sizes, smoothing):
    """Micro-batches of any size, so also a last group that is smaller than the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    x = torch.randn(sum(sizes), 5, dtype=torch.float64)
    y = torch.randint(4, (sum(sizes),))

    def mean(logits, targets):
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def share_of_the_whole(logits, targets):
        total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        return total / sum(sizes)

    micro_batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    whole = gradients(model, [(x, y)], mean)
    assert difference(gradients(model, micro_batches, share_of_the_whole), whole) < 1e-12
    if len(set(sizes)) > 1:
        mean_of_means = gradients(model, micro_batches, mean) / len(sizes)
        assert difference(mean_of_means, whole) > 1e-3


def test_a_plateau_that_began_with_a_learning_rate_of_0_resumes():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = plateau(optimizer, 0.5, 1).state_dict()
    for lr in (0.0, 0.1):
        again = torch.optim.SGD(model.parameters(), lr=lr)
        schedule = plateau(again, 0.5, 1)
        schedule.load_state_dict(state)
        assert schedule.lr == lr
