import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from refs import vision_resnet, vision_resnet_distributed
from refs.vision_resnet_distributed import Config, train_step
from shared import distributed
from shared.data import images
from shared.data.images import ImageBatch
from shared.data.splits import spread
from shared.errors import Diverged
from shared.program import run_program
from shared.runs import PATIENCE, Run
from shared.training import Learner

CPU = torch.device("cpu")
STEPS = Path(__file__).parent / "distributed_steps.py"
DIGITS = images.load(Config())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=tmp_path / "run", device="cpu", width=8, epochs=1, threads=1)


def learner_for(config: Config, steps: int = 10) -> Learner:
    torch.manual_seed(0)
    about = vision_resnet_distributed.describe(DIGITS.train, config)
    model = vision_resnet_distributed.build_model(about, config, CPU)
    return Learner(vision_resnet_distributed.adapt(model, config, CPU), config, steps)


def batch_of(size: int, config: Config) -> ImageBatch:
    part = spread(DIGITS.train, size)
    about = vision_resnet_distributed.describe(part, config)
    prepare = vision_resnet_distributed.make_preparation(about, part, config, CPU)
    return prepare(part.__getitems__([images.SampleKey(0, index) for index in range(size)]))


# One process


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 3, "clip_norm": 0.5, "ema": 0.9},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "accumulate": 2},
        {"precision": "bf16"},
    ],
    ids=str,
)
def test_one_process_ends_with_bitwise_the_weights_of_its_plain_sibling(config, tmp_path, changes):
    extra = ("activation_checkpointing",)
    plain = {name: value for name, value in changes.items() if name not in extra}
    theirs = vision_resnet.Config(
        run_dir=tmp_path / "plain", device="cpu", width=8, epochs=1, threads=1, **plain
    )
    expected = vision_resnet.train(theirs)
    result = vision_resnet_distributed.train(replace(config, **changes))
    assert result["test_loss"] == expected["test_loss"]
    weights = [tmp_path / name / "model.safetensors" for name in ("run", "plain")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# Several processes


def run_steps(folder: Path, processes: int) -> dict:
    file = folder / f"{processes}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={processes}", STEPS, file],
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(file)


@pytest.fixture(scope="module")
def steps_of(tmp_path_factory) -> dict[int, dict]:
    """What came of the same steps in some processes, by their number."""
    folder = tmp_path_factory.mktemp("steps")
    return {processes: run_steps(folder, processes) for processes in (1, 2, 3)}


def test_gradients_and_weights_do_not_depend_on_the_number_of_processes(steps_of):
    """In float64, with accumulation, augmentation and a last batch that does not divide."""
    one, two, three = steps_of.values()
    steps = 2 * 4
    assert one["seen"] == 2 * 37
    assert two["seen"] == 6 + 6 + 6 + 2 + 6 + 6 + 6 + 2, "rank 0 gets the larger shares"
    for found in (one, two, three):
        assert found["exchanges"] == steps, "gradients are exchanged once a step"
        for (loss, *exact), (expected, *exactly) in zip(
            found["results"], one["results"], strict=True
        ):
            assert loss == pytest.approx(expected, rel=1e-6), "it is summed in float32"
            assert exact == pytest.approx(exactly, rel=1e-11)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-9, atol=1e-12)


def test_random_choices_of_a_step_differ_between_processes_and_steps(steps_of):
    for processes, found in steps_of.items():
        seeds = [seed for of_one in found["seeds"] for seed in of_one]
        assert len(seeds) == len(set(seeds)) == processes * 2 * 4
    assert steps_of[3]["seeds"][0][0] == steps_of[1]["seeds"][0][0], "of rank 0, as of one process"


def test_batch_norm_averages_what_the_setting_says(steps_of):
    """A mean over equal shares is that of the whole; the share of rank 0 is another thing."""
    one = steps_of[1]["rank0"]
    assert torch.equal(steps_of[1]["averaged"], one)
    for processes in (2, 3):
        torch.testing.assert_close(steps_of[processes]["averaged"], one, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(steps_of[processes]["rank0"], one, rtol=1e-2, atol=1e-4)


# fp16


def test_an_overflow_leaves_everything_as_it_was_and_halves_the_scale(config):
    learner = learner_for(replace(config, precision="fp16", ema=0.9, clip_norm=1.0))
    learner.scaler = GradScaler("cpu", init_scale=2.0**120)
    batch = batch_of(4, config)
    before = learner.state_dict()
    weights = [weight.clone() for weight in learner.model.parameters()]
    settings = replace(config, precision="fp16")
    result = train_step(learner.model, learner.optimizer, learner.scaler, batch, settings, 0)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert all(map(torch.equal, learner.model.parameters(), weights))
    assert learner.state_dict()["optimizer"] == before["optimizer"], "no momentum yet"
    assert learner.scaler.get_scale() == 2.0**119


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_what_is_clipped_is_the_gradient_and_not_its_multiple(config, scale):
    settings = replace(config, precision="fp16", clip_norm=0.01, momentum=0.0, weight_decay=0.0)
    learner = learner_for(settings)
    batch = batch_of(4, config)
    before = [weight.detach().clone() for weight in learner.model.parameters()]
    scaler = GradScaler("cpu", init_scale=scale)
    result = train_step(learner.model, learner.optimizer, scaler, batch, settings, 0)
    changes = torch.cat(
        [
            (weight.detach() - old).flatten()
            for weight, old in zip(learner.model.parameters(), before, strict=True)
        ]
    )
    (lr, *_) = {group["lr"] for group in learner.optimizer.param_groups}
    assert result.grad_norm.item() > 0.1
    assert float(changes.norm()) / lr == pytest.approx(0.01, rel=1e-3)


def test_a_skipped_step_moves_neither_schedule_nor_average(config, monkeypatch):
    settings = replace(config, precision="fp16", ema=0.9, batch_size=512)
    made = vision_resnet_distributed.Learner
    learners = []

    def with_a_scale_too_large(*args):
        learners.append(made(*args))
        learners[0].scaler = GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-104)
        return learners[0]

    monkeypatch.setattr(vision_resnet_distributed, "Learner", with_a_scale_too_large)
    monkeypatch.setattr(images, "load", lambda _: DIGITS.spread(1024))
    result = vision_resnet_distributed.train(settings)
    learner = learners[0]
    assert result["steps"] == 2
    assert learner.schedule.state_dict()["count"] == 1
    assert learner.ema.state_dict()["updates"] == 1
    assert learner.scaler.get_scale() == 2.0**16


def test_a_run_that_only_skips_ends(config, monkeypatch):
    def skipping(model, optimizer, scaler, batch, *_):
        infinite = torch.tensor(math.inf)
        return vision_resnet_distributed.StepResult(
            torch.tensor(1.0), infinite, torch.tensor(0), skipped=True
        )

    monkeypatch.setattr(vision_resnet_distributed, "train_step", skipping)
    with pytest.raises(Diverged, match=f"{PATIENCE} steps in a row"):
        vision_resnet_distributed.train(replace(config, batch_size=8))


def test_batch_norm_stays_in_float32_and_evaluation_follows_the_setting(config):
    learner = learner_for(replace(config, precision="bf16"))
    seen = []
    norm, convolution = learner.model.layer1[0].bn1, learner.model.layer1[0].conv1
    convolution.register_forward_hook(lambda *call: seen.append(call[2].dtype))
    part = spread(DIGITS.val, 8)
    for evaluation in ("as-trained", "fp32"):
        settings = replace(config, precision="bf16", evaluation=evaluation)
        about = vision_resnet_distributed.describe(part, settings)
        vision_resnet_distributed.evaluate(
            learner.model,
            vision_resnet_distributed.make_loader(part, settings, CPU),
            vision_resnet_distributed.make_preparation(about, part, settings, CPU),
            settings,
        )
    assert seen == [torch.bfloat16, torch.float32]
    assert {tensor.dtype for tensor in norm.state_dict().values()} == {torch.float32, torch.int64}


# Settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--parallel=dp",), "two CUDA devices"),
        (("--batch-norm=synced",), "--batch-norm synced: not on cpu"),
        (("--parallel=dp", "--compile"), "--compile True: --parallel dp cannot have it"),
        (
            ("--parallel=dp", "--activation-checkpointing=full"),
            "--activation-checkpointing full: --parallel dp cannot have it",
        ),
        (("--precision=tf32",), "needs an NVIDIA GPU"),
        (("--batch-norm=synced", "--accumulate=2"), "--accumulate 2 leaves no whole batch"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, flags, message):
    flags = (f"--run-dir={tmp_path}/run", "--device=cpu", *flags)
    assert run_program(vision_resnet_distributed.main, Config, "", flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.toml").exists()


def test_data_parallel_trains_where_there_are_gpus(config, monkeypatch):
    """Without GPUs DataParallel calls the model itself, so the loop around it can be seen to go."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    learner, settings = learner_for(config), replace(config, parallel="dp")
    bare = vision_resnet_distributed.adapt(learner.model, settings, torch.device("cuda"))
    monkeypatch.undo()
    model = vision_resnet_distributed.parallelize(bare, DIGITS.train.shape, settings, CPU)
    assert isinstance(model, nn.DataParallel)
    args = (learner.optimizer, learner.scaler, batch_of(32, config), settings)
    losses = [float(train_step(model, *args, step).loss) for step in range(6)]
    assert losses[-1] < losses[0]
    assert list(learner.state_dict()["model"]) == list(bare.state_dict())


def test_a_process_that_torchrun_did_not_start_is_alone():
    assert (distributed.world_size(), distributed.rank()) == (1, 0)


def test_a_checkpoint_of_fp16_goes_on_with_its_scale(config):
    settings = replace(config, precision="fp16", batch_size=512, checkpoint_every=1)
    vision_resnet_distributed.train(settings)
    with Run(replace(settings, epochs=2), vision_resnet_distributed.NAME) as run:
        learner = learner_for(settings)
        learner.scaler = GradScaler("cpu", init_scale=4.0)
        run.begin(learner, vision_resnet_distributed.describe(DIGITS.train, settings))
        assert learner.scaler.get_scale() == run.saved["scaler"]["scale"] >= 16384
