import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from refs import vision_resnet
from refs.vision_resnet import Config, ResNet
from shared import seeding, trials
from shared.data import images
from shared.data.images import ImageBatch
from shared.data.splits import spread
from shared.errors import UserError
from shared.program import run_program
from shared.runs import Run
from shared.training import make_optimizer

GOLDEN = Path(__file__).parent / "vision_resnet_keys.json"
CPU = torch.device("cpu")
DIGITS = images.load(Config())


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        run_dir=tmp_path / "run", device="cpu", width=8, epochs=2, batch_size=300, threads=1
    )


def batch_of(size: int, channels: int = 3, side: int = 32, dtype=torch.float32) -> ImageBatch:
    generator = seeding.generator(1)
    pixels = torch.randn(size, channels, side, side, generator=generator, dtype=dtype)
    labels = torch.randint(10, (size,), generator=generator)
    return ImageBatch(pixels, labels, torch.arange(size))


def preparation(part: images.ImageSet, config: Config) -> images.Preparation:
    about = vision_resnet.describe(part, config)
    return vision_resnet.make_preparation(about, part, config, CPU)


def without_batch_norm(model: ResNet) -> ResNet:
    """Samples of a batch do not see each other then, so parts of it add up."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return model


# The network


@pytest.mark.parametrize("size", [32, 65, 224])
def test_the_same_weights_give_bitwise_torchvisions_outputs(size):
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18(num_classes=10)
    ours = ResNet(classes=10)
    ours.load_state_dict(theirs.state_dict())
    pixels = torch.randn(2, 3, size, size)
    for mode in (True, False):
        ours.train(mode), theirs.train(mode)
        assert torch.equal(ours(pixels), theirs(pixels))
    assert sum(parameter.numel() for parameter in ours.parameters()) == 11_181_642


def test_keys_and_shapes_are_those_that_are_written_down():
    """If this fails, old weights no longer load: add to MIGRATIONS, then write the file anew."""
    expected = json.loads(GOLDEN.read_text())
    for stem in ("imagenet", "cifar"):
        model = ResNet(classes=10, stem=stem)
        found = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
        assert found == expected[stem]


@pytest.mark.parametrize(("stem", "side"), [("cifar", 1), ("imagenet", 1), ("cifar", 9)])
def test_images_of_any_size_fit(stem, side):
    model = ResNet(classes=7, channels=1, stem=stem, width=8)
    assert model(torch.randn(2, 1, side, side)).shape == (2, 7)


@pytest.mark.parametrize(("side", "stem"), [(8, "cifar"), (64, "cifar"), (65, "imagenet")])
def test_the_stem_follows_the_size_of_the_images(side, stem):
    images_of = torch.zeros(2, 3, side, side, dtype=torch.uint8)
    part = images.ImageSet(images_of, torch.tensor([0, 1]), ("a", "b"))
    assert vision_resnet.describe(part, Config())["model"]["stem"] == stem
    assert vision_resnet.describe(part, Config(stem="imagenet"))["model"]["stem"] == "imagenet"


def test_a_single_value_for_batch_norm_is_refused_before_training(config):
    part = spread(DIGITS.train, 9)
    with pytest.raises(UserError, match="--batch-size 4"):
        vision_resnet.check_images(part, replace(config, batch_size=4))
    with pytest.raises(UserError, match="--accumulate 3"):
        vision_resnet.check_images(part, replace(config, batch_size=5, accumulate=3))
    vision_resnet.check_images(part, replace(config, batch_size=5))
    vision_resnet.check_images(part, replace(config, batch_size=3))
    with pytest.raises(ValueError, match="more than 1 value"):  # what it spares the user
        ResNet(10, channels=1, stem="cifar", width=8)(torch.randn(1, 1, 8, 8))


# The step


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 9), parts=st.integers(1, 9), smoothing=st.sampled_from([0.0, 0.1]))
def test_micro_batches_give_the_gradient_of_the_whole_batch(size, parts, smoothing):
    torch.manual_seed(0)
    model = without_batch_norm(ResNet(10, stem="cifar", width=2)).double()
    batch = batch_of(size, side=8, dtype=torch.float64)
    whole = F.cross_entropy(model(batch.inputs), batch.labels, label_smoothing=smoothing)
    gradients = torch.autograd.grad(whole, list(model.parameters()))
    config = Config(accumulate=min(parts, size), batch_size=size, label_smoothing=smoothing)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    result = vision_resnet.train_step(model, still, batch, config, step=0)
    torch.testing.assert_close(result.loss.double(), whole.detach(), rtol=1e-6, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(result.grad_norm, norm, rtol=1e-10, atol=1e-12)


def test_a_step_clips_and_then_steps_once():
    torch.manual_seed(0)
    model = ResNet(10, stem="cifar", width=4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    config = Config(accumulate=3, clip_norm=0.01)
    result = vision_resnet.train_step(model, optimizer, batch_of(8, side=8), config, step=0)
    moved = [old - new for old, new in zip(before, model.parameters(), strict=True)]
    assert len(calls) == 1
    assert result.grad_norm > 0.01, "the norm that is told is the one before clipping"
    total = torch.cat([change.flatten() for change in moved]).norm().item()
    assert total == pytest.approx(0.01, rel=1e-3)


def test_dropout_depends_on_seed_step_and_micro_step_alone():
    masks = []

    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3 * 8 * 8, 10)

        def forward(self, x):
            masks.append(F.dropout(torch.ones(64)))
            return self.fc(x.flatten(1))

    model = Recording()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = Config(accumulate=2)
    for step, noise in ((0, 0), (1, 1), (0, 7)):
        torch.manual_seed(noise)
        vision_resnet.train_step(model, optimizer, batch_of(4, side=8), config, step)
    first, second, third, fourth, again, again_second = masks
    assert torch.equal(first, again)
    assert torch.equal(second, again_second)
    assert len({tuple(m.tolist()) for m in (first, second, third, fourth)}) == 4


def test_training_and_evaluation_run_in_the_same_precision(config):
    dtypes = []

    class Recording(ResNet):
        def forward(self, x):
            logits = super().forward(x)
            dtypes.append(logits.dtype)
            return logits

    model = Recording(10, channels=1, stem="cifar", width=4)
    config = replace(config, precision="bf16")
    part = spread(DIGITS.val, 20)
    batch = batch_of(4, channels=1, side=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    vision_resnet.train_step(model, optimizer, batch, config, step=0)
    loader = vision_resnet.make_loader(part, config, CPU)
    evaluation = vision_resnet.evaluate(model, loader, preparation(part, config), config)
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert math.isfinite(evaluation.loss)


@pytest.mark.parametrize("batch_size", [1, 7, 179])
def test_an_evaluation_does_not_depend_on_the_batch_size(config, batch_size):
    torch.manual_seed(0)
    model = ResNet(10, channels=1, stem="cifar", width=4)
    part = DIGITS.val

    def evaluate(size: int):
        settings_of_size = replace(config, batch_size=size)
        loader = vision_resnet.make_loader(part, settings_of_size, CPU)
        prepare = preparation(part, settings_of_size)
        return vision_resnet.evaluate(model, loader, prepare, settings_of_size)

    expected, found = evaluate(64), evaluate(batch_size)
    assert found.accuracy == expected.accuracy
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def test_inputs_are_normalized_and_in_the_memory_format_that_was_asked_for(config):
    part = images.load(Config(data="synthetic")).train
    batch = part.__getitems__([images.SampleKey(0, i) for i in range(500)])
    inputs = preparation(part, replace(config, channels_last=True))(batch)
    assert inputs.inputs.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(inputs.inputs.mean((0, 2, 3)), torch.zeros(3), atol=0.02, rtol=0)
    torch.testing.assert_close(inputs.inputs.std((0, 2, 3)), torch.ones(3), atol=0.02, rtol=0)


def test_no_decay_on_norms_and_biases(config):
    model = ResNet(10, width=4)
    groups = make_optimizer(model, config).param_groups
    without = {id(p) for group in groups if group["weight_decay"] == 0 for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in without) == (parameter.ndim == 1), name


# The run


def final_weights(config: Config) -> dict[str, torch.Tensor]:
    result = vision_resnet.train(config)
    assert result["epochs"] == config.epochs
    return weights_of(config)


def weights_of(config: Config) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    assert config.run_dir is not None
    return load_file(config.run_dir / "model.safetensors")


def assert_bitwise(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_number_of_workers_changes_no_weight(config, tmp_path):
    weights = final_weights(config)
    for workers in (1, 4):
        folder = tmp_path / str(workers)
        assert_bitwise(final_weights(replace(config, workers=workers, run_dir=folder)), weights)


def test_another_seed_changes_the_weights(config, tmp_path):
    weights = final_weights(config)
    others = final_weights(replace(config, seed=1, run_dir=tmp_path / "other"))
    assert not torch.equal(weights["conv1.weight"], others["conv1.weight"])


class PowerCut(BaseException):
    """Nothing catches it."""


def die_at(monkeypatch, step: int, config: Config) -> None:
    """Start a run, which dies right after it was told of a step."""
    step_ended = Run.step_ended

    def dying(self, *args, **kwargs):
        step_ended(self, *args, **kwargs)
        if self.progress.step == step:
            raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step_ended", dying)
        with pytest.raises(PowerCut):
            vision_resnet.train(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"ema": 0.9, "accumulate": 2, "optimizer": "adamw", "schedule": "plateau"},
        {"ema": 0.9, "color_jitter": 0.4, "clip_norm": 1.0, "batch_size": 250},
        {"schedule": "step", "precision": "bf16", "channels_last": True},
    ],
    ids=["adamw plateau", "cosine", "bf16 step"],
)
@pytest.mark.parametrize("step", [1, 5, 8])
def test_a_run_that_died_goes_on_to_the_same_weights(config, tmp_path, monkeypatch, changes, step):
    config = replace(config, checkpoint_every=1, **changes)
    weights = final_weights(config)
    again = replace(config, run_dir=tmp_path / "again")
    die_at(monkeypatch, step, again)
    torch.manual_seed(99)  # nothing of the process may matter
    assert_bitwise(final_weights(again), weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_run_on_an_accelerator_resumes_bitwise(
    config, tmp_path, monkeypatch, precision
):
    config = replace(
        config, device="auto", deterministic=True, precision=precision, checkpoint_every=1
    )
    weights = final_weights(config)
    again = replace(config, run_dir=tmp_path / "again")
    die_at(monkeypatch, 5, again)
    assert_bitwise(final_weights(again), weights)


def test_compiled_and_eager_agree_and_a_compiled_run_resumes_bitwise(config, tmp_path, monkeypatch):
    few = DIGITS.spread(64)  # one shape alone is to be compiled, to save time
    monkeypatch.setattr(images, "load", lambda *_, **__: few)
    config = replace(config, compile=True, width=8, batch_size=32, checkpoint_every=1)
    weights = final_weights(config)
    again = replace(config, run_dir=tmp_path / "again")
    die_at(monkeypatch, 1, again)
    assert_bitwise(final_weights(again), weights)
    eager = final_weights(replace(config, compile=False, run_dir=tmp_path / "eager"))
    for name, tensor in eager.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_the_average_of_the_weights_is_what_is_exported(config, tmp_path):
    plain = final_weights(config)
    config = replace(config, ema=0.9, run_dir=tmp_path / "ema")
    averaged = final_weights(config)
    newest = max((tmp_path / "ema" / "checkpoints").glob("step-*.pt"))
    saved = torch.load(newest, weights_only=True)
    assert_bitwise(averaged, saved["ema"]["model"])
    assert_bitwise(plain, saved["model"])
    assert saved["ema"]["updates"] == saved["progress"]["step"]


def test_a_batch_that_is_not_learnt_fails(config, monkeypatch, capsys):
    monkeypatch.setattr(trials, "OVERFIT_EPOCHS", 2)
    flags = ["--overfit-batch", "--device=cpu", "--width=4", "--lr=0"]
    flags.append(f"--run-dir={config.run_dir}")
    assert run_program(vision_resnet.main, Config, "", flags) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["passed"] is False


def test_the_test_part_is_read_once_and_at_the_end(config, monkeypatch):
    read = []
    test = DIGITS.test
    load = images.load
    monkeypatch.setattr(images, "load", lambda *a, **k: load(*a, **k)._replace(test=test))
    original = images.ImageSet.__getitems__

    def watching(self, keys):
        read.append("test" if self is test else "other")
        return original(self, keys)

    monkeypatch.setattr(images.ImageSet, "__getitems__", watching)
    vision_resnet.train(config)
    first = read.index("test")
    assert read[first:] == ["test"] * math.ceil(len(test) / config.batch_size)


def test_weights_bring_their_network_and_are_refused_for_other_data(config):
    result = vision_resnet.train(config)
    weights = Path(result["run_dir"]) / "model.safetensors"
    found = vision_resnet.main(replace(config, evaluate=weights, width=16, stem="imagenet"))
    assert found["test_accuracy"] == result["test_accuracy"]
    with pytest.raises(UserError, match=r"model\.safetensors: its model is .*'channels': 1"):
        vision_resnet.main(replace(config, evaluate=weights, data="synthetic"))
    stranger = weights.parent / "stranger.safetensors"
    torch.save({"x": torch.ones(1)}, stranger)
    with pytest.raises(UserError, match="stranger"):
        vision_resnet.main(replace(config, evaluate=stranger))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--lr=-1", "--seed=-2"), "--lr must be ≥ 0, got -1.0"),
        (("--lr=-1", "--seed=-2"), "--seed must be ≥ 0, got -2"),
        (("--lr=nan",), "--lr must be ≥ 0, got nan"),
        (("--width=0",), "--width must be ≥ 1"),
        (("--width=3000000000",), "--width must be between 1 and 2147483647"),
        (("--threads=100000",), "--threads must be between 1 and 1024"),
        (("--ema=1",), "--ema must be less than 1"),
        (("--accumulate=65",), "--accumulate 65"),
        (("--ema=1.5",), "--ema must be between 0 and 1"),
        (("--crop-padding=-1",), "--crop-padding must be"),
        (("--optimizer=adamw", "--momentum=0.8"), "--momentum 0.8"),
        (("--schedule=step", "--warmup-epochs=2"), "--warmup-epochs 2.0"),
        (("--cache-gb=1",), "--cache-gb 1.0: --data digits has no files to decode"),
        (("--dry-run", "--overfit-batch"), "--dry-run and --overfit-batch exclude each other"),
        (("--device=gpu",), "--device gpu"),
        (("--device=cuda:99",), "--device cuda:99"),
        (("--precision=tf32",), "--precision tf32"),
        (("--config=absent.toml",), "absent.toml: No such file"),
        (("--evaluate=absent.pt",), "absent.pt"),
        (("--resume=absent.pt",), "absent.pt"),
        (("--run-dir=/proc/mine",), "/proc/mine"),
        (("--batch-size=1258", "--stem=imagenet"), "--batch-size 1258"),
        (("--warmup-epochs=-1",), "--warmup-epochs must be"),
    ],
)
def test_bad_settings_are_one_clear_line(tmp_path, monkeypatch, capsys, flags, complaint):
    monkeypatch.chdir(tmp_path)
    assert run_program(vision_resnet.main, Config, "", ["--device=cpu", *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.strip().splitlines()) == 1
    assert not any(tmp_path.rglob("*.toml")), "nothing was begun"
