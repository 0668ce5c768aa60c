"""Train a ResNet on images, the way a real run is made: on a CPU or any accelerator.

    python refs/vision_resnet.py                                  # handwritten digits, a minute
    python refs/vision_resnet.py --run-dir runs/mine --epochs 30  # again, to continue after a stop

Shown here: the network of He et al., Deep Residual Learning for Image Recognition, 2015
(https://arxiv.org/abs/1512.03385), written out; a training step with micro-batches, clipping and
weight averaging; validation for every choice and one test at the end; checkpoints from which a
killed run goes on to bitwise the same weights.

Result: 99.1 % ± 0.4 % of the 359 test digits, 44 s ± 1 s from start to finish (mean and standard
deviation of seeds 0 to 4; 2 cores of an Intel Xeon with AVX-512 at 2.6 GHz, no GPU, torch 2.14.1).
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.data import images
from shared.data.augment import Augmentation, augment
from shared.data.images import ImageBatch, ImageConfig, ImageSet, Normalization, Splits
from shared.data.loading import Loader
from shared.data.sampling import balancing_weights
from shared.devices import move
from shared.errors import UserError
from shared.initialization import initialize
from shared.metrics import Evaluation, Tally
from shared.optimization import (
    Ema,
    Schedule,
    parameter_groups,
    plateau,
    restore,
    step_decay,
    warmup_cosine,
)
from shared.precision import autocast
from shared.program import run_program
from shared.runs import (
    WEIGHTS_FILE,
    Run,
    StepResult,
    check_about,
    read_trained,
    result_of,
    set_up_process,
)
from shared.seeding import seed_step
from shared.settings import LARGEST
from shared.state_dicts import load_weights, migrate, save_weights
from shared.trials import DRY_RUN_SAMPLES, dry_run, overfit

NAME = "vision_resnet"


@dataclass(frozen=True)
class Config(ImageConfig):
    """Settings of a run; those that every run has come first."""

    epochs: int = 12
    """Times that every training sample is used."""
    stem: Literal["imagenet", "cifar"] = "cifar"
    """First layers. imagenet: 7x7 with stride 2 and a pool; cifar: 3x3 that keeps small images."""
    width: int = 64
    """Channels of the first stage. 64 is ResNet-18."""
    batch_size: int = 64
    """Samples in an optimizer step."""
    accumulate: int = 1
    """Micro-batches that an optimizer step is made of: more of them need less memory."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd is with Nesterov momentum."""
    lr: float = 0.05
    """Highest learning rate."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 5e-4
    """L2 penalty of sgd, decoupled decay of adamw; not for biases and norms."""
    schedule: Literal["cosine", "step", "plateau"] = "cosine"
    """cosine: over all steps, after a warm-up. step: divided by 10 after each third of the epochs.
    plateau: halved when the validation loss stops falling."""
    warmup_epochs: float = 1.0
    """Epochs over which cosine rises to --lr."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    clip_norm: float | None = None
    """Scale the gradients down to this norm of them all together."""
    ema: float | None = None
    """Decay, for example 0.99, of an average of the weights; it is evaluated and exported then."""
    balance: bool = False
    """Draw samples so that all classes are seen equally often; some come again in an epoch."""
    channels_last: bool = False
    """Store images and kernels with channels innermost, which many devices prefer."""
    crop_padding: int = 1
    """Augmentation: zero pixels around an image before it is cropped back to its size. Images that
    are cropped at random already have none."""
    flip: bool = False
    """Augmentation: mirror half of the images. Not for digits."""
    color_jitter: float = 0.0
    """Augmentation: strength of random brightness, contrast and saturation, as in torchvision."""
    hue: float = 0.0
    """Augmentation: strength of random hue, at most 0.5."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, a line each."""
        yield from super().problems()
        yield from self.outside(1, LARGEST, "width", "batch_size", "accumulate")
        yield from self.outside(0, math.inf, "lr", "weight_decay", "warmup_epochs", "clip_norm")
        yield from self.outside(0, LARGEST, "crop_padding", "color_jitter")
        yield from self.outside(0, 1, "momentum", "label_smoothing", "ema")
        if self.ema == 1:
            yield "--ema must be less than 1: nothing would ever be averaged"
        yield from self.outside(0, 0.5, "hue")
        if self.accumulate > self.batch_size:
            yield f"--accumulate {self.accumulate}: a batch has only {self.batch_size} samples"
        if self.optimizer != "sgd" and self.momentum != Config.momentum:
            yield f"--momentum {self.momentum}: --optimizer {self.optimizer} has none"
        if self.schedule != "cosine" and self.warmup_epochs != Config.warmup_epochs:
            yield f"--warmup-epochs {self.warmup_epochs}: --schedule {self.schedule} has none"

    def augmentation(self, part: ImageSet) -> Augmentation:
        """What happens to the training images of a data set."""
        padding = self.crop_padding if part.transform is None else 0
        strength = self.color_jitter
        return Augmentation(padding, self.flip, strength, strength, strength, self.hue)


MIGRATIONS: list[Mapping[str, str]] = []
"""Renamed layers, oldest first, so that old weights load: {"old.prefix": "new.prefix"}."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input is carried past."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        # No biases: the norm that follows would take them out again.
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels, H, W] to [B, channels, H / stride, W / stride]."""
        carried = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(x)) + carried, inplace=True)


class ResNet(nn.Module):
    """ResNet-18. Layers are named as in torchvision, so that weights fit both."""

    def __init__(
        self, classes: int, channels: int = 3, stem: str = "imagenet", width: int = 64
    ) -> None:
        super().__init__()
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._stage(width, width, stride=1)
        self.layer2 = self._stage(width, 2 * width, stride=2)
        self.layer3 = self._stage(2 * width, 4 * width, stride=2)
        self.layer4 = self._stage(4 * width, 8 * width, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)
        initialize(self, "relu")
        initialize(self.fc, "none")

    @staticmethod
    def _stage(in_channels: int, channels: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            BasicBlock(in_channels, channels, stride), BasicBlock(channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Images float [B, C, H, W] to logits [B, classes]."""
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of the settings, in its fused form: one kernel for all parameters."""
    groups = parameter_groups(model, config.weight_decay)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, config.lr, fused=True)
    nesterov = config.momentum > 0
    return torch.optim.SGD(groups, config.lr, config.momentum, nesterov=nesterov, fused=True)


def make_schedule(
    optimizer: torch.optim.Optimizer, config: Config, steps_per_epoch: int
) -> Schedule:
    """How the learning rate changes."""
    if config.schedule == "step":
        return step_decay(optimizer, math.ceil(config.epochs / 3), gamma=0.1)
    if config.schedule == "plateau":
        return plateau(optimizer, factor=0.5, patience=2)
    warmup = round(min(config.warmup_epochs, config.epochs) * steps_per_epoch)
    return warmup_cosine(optimizer, warmup, config.epochs * steps_per_epoch)


def prepare(
    batch: ImageBatch,
    rows: Mapping[str, Tensor],
    normalization: Normalization,
    config: Config,
    device: torch.device,
) -> ImageBatch:
    """Move a batch to the device; there augment and normalize all its images together.

    Args:
        batch: uint8 images.
        rows: augmentation of every sample of the set; empty for none.
    """
    own_rows = {name: column[batch.indices] for name, column in rows.items()}
    batch = move(batch, device)
    inputs = normalization(augment(batch.images, own_rows))
    if config.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return batch._replace(images=inputs)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: ImageBatch,
    config: Config,
    step: int,
) -> StepResult:
    """Make one optimizer step from a batch of inputs that is on the device.

    Args:
        step: number of the step, which dropout and the like depend on.
    """
    optimizer.zero_grad()
    loss_sum = torch.zeros((), device=batch.images.device)
    correct = torch.zeros((), device=batch.images.device, dtype=torch.int64)
    for micro_step, micro in enumerate(batch.split(config.accumulate)):
        seed_step(config.seed, step, micro_step)
        with autocast(config.precision, batch.images.device):
            logits = model(micro.images)
            loss = F.cross_entropy(
                logits, micro.labels, reduction="sum", label_smoothing=config.label_smoothing
            )
        # Divided by the size of the whole batch: gradients of unequal parts add up to its mean.
        (loss / batch.samples).backward()
        loss_sum += loss.detach()
        correct += (logits.argmax(1) == micro.labels).sum()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or math.inf)
    optimizer.step()
    return StepResult(loss_sum / batch.samples, grad_norm, correct)


def train_one_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    ema: Ema | None,
    loader: Loader[ImageBatch],
    augmentation: Augmentation,
    normalization: Normalization,
    config: Config,
    run: Run,
) -> None:
    """Train on what is left of the epoch that the run is in."""
    model.train()
    rows = augmentation.table(loader.size, config.seed, run.progress.epoch)
    for batch in run.batches(loader):
        inputs = prepare(batch, rows, normalization, config, run.device)
        result = train_step(model, optimizer, inputs, config, run.progress.step)
        lr = schedule.lr
        schedule.step_ended()
        if ema is not None:
            ema.update()
        run.step_ended(result, batch.samples, lr)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Loader[ImageBatch],
    classes: int,
    normalization: Normalization,
    config: Config,
    device: torch.device,
) -> Evaluation:
    """Mean loss, without smoothing, and accuracies; in the precision that training has."""
    model.eval()
    tally = Tally(classes, device)
    for batch in loader.epoch():
        inputs = prepare(batch, {}, normalization, config, device)
        with autocast(config.precision, device):
            logits = model(inputs.images)
            loss = F.cross_entropy(logits, inputs.labels, reduction="sum")
        tally.add(loss, logits, inputs.labels)
    return tally.evaluation()


def make_loader(
    part: ImageSet, config: Config, device: torch.device, shuffle: bool = False
) -> Loader[ImageBatch]:
    """Batches of a part of the data."""
    return Loader(
        part,
        config.batch_size,
        seed=config.seed,
        shuffle=shuffle,
        workers=part.workers if config.workers == "auto" else config.workers,
        pin=device.type == "cuda",
        weights=balancing_weights(part.labels) if shuffle and config.balance else None,
    )


def check_images(part: ImageSet, config: Config) -> None:
    """Refuse batches that cannot be filled, or that BatchNorm cannot learn from.

    Raises:
        UserError: there are fewer samples than a batch has; or the smallest micro-batch is one
            image of which the last stage makes one pixel, so one value of each channel.
    """
    size = len(part)
    if config.batch_size > size:
        raise UserError(f"--batch-size {config.batch_size}: there are {size} training samples")
    batches = {config.batch_size, size % config.batch_size or config.batch_size}
    smallest = min(batch // min(config.accumulate, batch) for batch in batches)
    _, height, width = part.shape
    reduction = 32 if config.stem == "imagenet" else 8
    if smallest == 1 and max(height, width) <= reduction:
        raise UserError(
            f"--batch-size {config.batch_size} --accumulate {config.accumulate}: of {size} samples "
            f"one is left alone, and {height}x{width} images end as one pixel with --stem "
            f"{config.stem}: BatchNorm cannot learn from a single value"
        )


def describe(part: ImageSet, config: Config) -> dict[str, Any]:
    """What has to be known to use the weights; it goes into every file that holds them."""
    return {
        "version": len(MIGRATIONS),
        "model": {
            "classes": len(part.classes),
            "channels": part.shape[0],
            "stem": config.stem,
            "width": config.width,
        },
        "classes": list(part.classes),
        "normalization": part.normalization()._asdict(),
    }


def build_model(about: Mapping[str, Any], config: Config, device: torch.device) -> ResNet:
    """The network that a description is of, on the device."""
    model = ResNet(**about["model"])
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(device).to(memory_format=memory_format)


def train(config: Config) -> dict[str, Any]:
    """Make a run, or what is left of it."""
    with Run(config, NAME) as run:
        if run.result is not None:
            return run.result
        splits = images.load(config)
        check_images(splits.train, config)
        if config.dry_run:
            splits = splits.spread(DRY_RUN_SAMPLES)
        if config.overfit_batch:
            splits = Splits(*[splits.train.spread(config.batch_size)] * 3)
        about = describe(splits.train, config)
        normalization = Normalization(**about["normalization"])
        augmentation = config.augmentation(splits.train)
        classes = len(about["classes"])
        train_loader = make_loader(splits.train, config, run.device, shuffle=True)
        val_loader = make_loader(splits.val, config, run.device)

        model = build_model(about, config, run.device)
        optimizer = make_optimizer(model, config)
        schedule = make_schedule(optimizer, config, len(train_loader))
        if run.saved is not None:
            check_about(about, run.saved["about"], run.source)
            load_weights(model, run.saved["model"], run.source)
            restore(optimizer, schedule, run.saved["optimizer"], run.saved["schedule"])
        ema = Ema(model, config.ema) if config.ema is not None else None
        if ema is not None and run.saved is not None and run.saved["ema"] is not None:
            ema.load_state_dict(run.saved["ema"])
        evaluated = model if ema is None else ema.model
        if config.compile:
            model.compile(dynamic=False)  # shapes that turn dynamic half-way change the rounding

        def state() -> dict[str, Any]:
            return {
                "about": about,
                "model": model.state_dict(),
                "ema": None if ema is None else ema.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }

        run.begin(state, model)
        if config.balance:
            run.log.say(f"an epoch has {train_loader.distinct_share(0):.1%} distinct samples")
        while run.progress.epoch < config.epochs:
            train_one_epoch(
                model,
                optimizer,
                schedule,
                ema,
                train_loader,
                augmentation,
                normalization,
                config,
                run,
            )
            validation = evaluate(evaluated, val_loader, classes, normalization, config, run.device)
            schedule.epoch_ended(validation.loss)
            run.epoch_ended(validation, {"about": about, "model": evaluated.state_dict()})

        # What is measured is what was exported: the file, read back.
        exported = run.folder / WEIGHTS_FILE
        save_weights(exported, evaluated, about)
        test = evaluate_file(exported, splits.test, config, run.device)
        return run.finish(test, splits.test.classes)


def evaluate_file(path: Path, part: ImageSet, config: Config, device: torch.device) -> Evaluation:
    """Evaluate the weights in a file, as they were trained: with their own normalization.

    Raises:
        UserError: the file cannot be read, or is of another network or of other classes.
    """
    weights, about = read_trained(path)
    model_for_this = {**about["model"], "channels": part.shape[0]}
    check_about({"model": model_for_this, "classes": list(part.classes)}, about, path)
    normalization = Normalization(**about["normalization"])
    model = build_model(about, config, device)
    load_weights(model, migrate(weights, about["version"], MIGRATIONS, path), path)
    loader = make_loader(part, config, device)
    return evaluate(model, loader, len(part.classes), normalization, config, device)


def main(config: Config) -> dict[str, Any]:
    """Do what the settings ask for."""
    if config.evaluate is not None:
        device = set_up_process(config)
        test = evaluate_file(config.evaluate, images.load(config).test, config, device)
        return {"weights": str(config.evaluate), **result_of(test)}
    if config.check_data:
        return images.check(config)
    if config.dry_run:
        return dry_run(train, config)
    if config.overfit_batch:
        bare = replace(config, crop_padding=0, flip=False, color_jitter=0.0, hue=0.0)
        return overfit(train, replace(bare, label_smoothing=0.0))
    return train(config)


if __name__ == "__main__":
    sys.exit(run_program(main, Config, __doc__))
