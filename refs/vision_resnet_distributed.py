"""Train a ResNet on images in several processes, in half precision, with less memory.

    python refs/vision_resnet_distributed.py                        # one process
    torchrun --nproc-per-node 2 refs/vision_resnet_distributed.py   # two, on cores or GPUs
    torchrun --nnodes 2 ... refs/vision_resnet_distributed.py       # two machines, see docs

This is vision_resnet.py with three things more, which `diff` of the two shows: mixed precision to
the end (fp16 with a scaled loss, beside bf16), DistributedDataParallel, activation checkpointing.
The batches are the same ones whatever the number of processes, each of which takes its share.

Result: one process in fp32 ends with bitwise the weights of vision_resnet.py; gradients in float64,
without BatchNorm, are the same to 1e-11 with 1, 2 and 3 processes (tests, torch 2.9.1 and 2.14.1).
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shared.data import images
from shared.data.images import SMALL, ImageBatch, ImageConfig, ImageSet, Normalization, Preparation
from shared.data.loading import Loader
from shared.data.sampling import balancing_weights, smallest_micro_batch
from shared.distributed import (
    BUFFERS_STAY,
    is_joined,
    rank,
    settle,
    sync_buffers,
    together,
    total,
    world_size,
)
from shared.errors import UserError
from shared.initialization import initialize
from shared.metrics import Evaluation, Tally
from shared.precision import Precision, autocast
from shared.program import run_program
from shared.recomputation import Recomputation, recompute
from shared.resuming import check_about, read_trained
from shared.runs import Run, StepResult, result_of, set_up_process
from shared.seeding import seed_step
from shared.settings import LARGEST
from shared.state_dicts import load_weights, migrate
from shared.training import Learner, TrainingConfig
from shared.trials import dry_run, overfit, shorten

NAME = "vision_resnet_distributed"


@dataclass(frozen=True)
class Config(TrainingConfig, ImageConfig):
    """Settings of a run, on top of those for training and for images."""

    epochs: int = 12
    """Times that every training sample is used."""
    stem: Literal["auto", "imagenet", "cifar"] = "auto"
    """First layers. imagenet: 7x7 with stride 2 and a pool; cifar: 3x3 that keeps small images.
    auto: cifar up to 64x64."""
    width: int = 64
    """Channels of the first stage. 64 is ResNet-18."""
    evaluation: Literal["as-trained", "fp32"] = "as-trained"
    """Precision of validation and test."""
    parallel: Literal["ddp", "dp"] = "ddp"
    """ddp: as many processes as torchrun starts. dp: DataParallel, one process that copies the
    model to all GPUs in every step, to compare with: slower, one machine, BatchNorm averages of the
    first GPU alone, no --compile and no --activation-checkpointing."""
    batch_norm: Literal["rank0", "averaged", "synced"] = "rank0"
    """Of which samples BatchNorm takes its averages. rank0: those of the first process. averaged:
    those of all. synced: means of the whole batch, in training too; for GPUs."""
    activation_checkpointing: Recomputation = "none"
    """What is not kept for the backward pass but made again. full: all within blocks. selective:
    all but the outputs of convolutions."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, a line each."""
        yield from super().problems()
        yield from self.outside(1, LARGEST, "width")
        if self.parallel == "dp":
            unfit = "--parallel dp cannot have it"
            yield from self.ignored(unfit, "compile", "activation_checkpointing", "batch_norm")
        if self.batch_norm == "synced" and self.accumulate > 1:
            yield f"--batch-norm synced: --accumulate {self.accumulate} leaves no whole batch to it"

    @property
    def evaluation_precision(self) -> Precision:
        """Precision of validation and test."""
        return self.precision if self.evaluation == "as-trained" else "fp32"

    def stem_of(self, part: ImageSet) -> str:
        """The first layers for the images of a set."""
        if self.stem != "auto":
            return self.stem
        return "cifar" if max(part.shape[1:]) <= SMALL else "imagenet"


DEAR = (torch.ops.aten.convolution.default,)
"""Operators whose outputs selective checkpointing keeps; norms and ReLUs are cheap to repeat."""

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


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler,
    batch: ImageBatch,
    config: Config,
    step: int,
) -> StepResult:
    """Make one optimizer step from a batch of inputs that is on the device.

    Args:
        model: as `parallelize` has made it.
        scaler: of the loss; disabled unless in fp16.
        batch: the share of this process.
        step: number of the step, which dropout and the like depend on.
    """
    optimizer.zero_grad()
    samples = total(torch.full((), batch.samples, device=batch.inputs.device))
    loss_sum = torch.zeros((), device=batch.inputs.device)
    correct = torch.zeros((), device=batch.inputs.device, dtype=torch.int64)
    micros = batch.split(config.accumulate)
    for micro_step, micro in enumerate(micros):
        seed_step(config.seed, step, micro_step, rank())
        is_last = micro_step == len(micros) - 1
        # Gradients are exchanged once a step. DDP decides about it in the forward pass.
        with nullcontext() if is_last else gradients_stay(model):
            with autocast(config.precision, batch.inputs.device):
                logits = model(micro.inputs)
                loss = F.cross_entropy(
                    logits, micro.labels, reduction="sum", label_smoothing=config.label_smoothing
                )
            # Divided by the size of the whole batch: gradients of unequal parts add up to its mean.
            # DDP divides them by the number of processes, which is taken back here.
            scaler.scale(loss * world_size() / samples).backward()
        loss_sum += loss.detach()
        correct += (logits.argmax(1) == micro.labels).sum()
    scaler.unscale_(optimizer)  # so that what is clipped, and told, is the gradient itself
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or math.inf)
    scale = scaler.get_scale()
    scaler.step(optimizer)  # unless a gradient has overflowed: then the scale is halved
    scaler.update()
    if config.batch_norm != "synced":
        sync_buffers(model, config.batch_norm)
    skipped = scaler.get_scale() < scale
    return StepResult(total(loss_sum) / samples, grad_norm, total(correct), skipped)


def gradients_stay(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which gradients add up in each process alone."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def train_one_epoch(
    learner: Learner,
    model: nn.Module,
    loader: Loader[ImageBatch],
    prepare: Preparation,
    config: Config,
    run: Run,
) -> None:
    """Train on what is left of the epoch that the run is in.

    Args:
        model: the learner's, as `parallelize` has made it.
    """
    learner.model.train()
    rows = prepare.augmentation.table(loader.size, config.seed, run.progress.epoch)
    for batch in run.batches(loader):
        inputs = prepare(batch, rows)
        step, lr = run.progress.step, learner.schedule.lr
        result = train_step(model, learner.optimizer, learner.scaler, inputs, config, step)
        if not result.skipped:
            learner.step_ended()
        run.step_ended(result, lr)


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: Loader[ImageBatch], prepare: Preparation, config: Config
) -> Evaluation:
    """Mean loss, without smoothing, and accuracies, over the shares of all processes."""
    model.eval()
    tally = Tally(prepare.device)
    for batch in loader.epoch():
        inputs = prepare(batch)
        with autocast(config.evaluation_precision, prepare.device):
            logits = model(inputs.inputs)
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
    """Refuse batches that BatchNorm cannot learn from.

    Raises:
        UserError: the smallest micro-batch is one image of which the last stage makes one pixel,
            so one value of each channel.
    """
    smallest = smallest_micro_batch(len(part), config.batch_size, config.accumulate)
    _, height, width = part.shape
    stem = config.stem_of(part)
    if smallest == 1 and max(height, width) <= (32 if stem == "imagenet" else 8):
        raise UserError(
            f"--batch-size {config.batch_size} --accumulate {config.accumulate}: of {len(part)} "
            f"samples the smallest micro-batch of a process has one, and {height}x{width} images "
            f"end as a pixel with --stem {stem}: BatchNorm cannot learn from a single value"
        )


def describe(part: ImageSet, config: Config) -> dict[str, Any]:
    """What has to be known to use the weights; it goes into every file that holds them."""
    return {
        "version": len(MIGRATIONS),
        "model": {
            "classes": len(part.classes),
            "channels": part.shape[0],
            "stem": config.stem_of(part),
            "width": config.width,
        },
        "classes": list(part.classes),
        "normalization": part.normalization()._asdict(),
    }


def make_preparation(
    about: Mapping[str, Any], part: ImageSet, config: Config, device: torch.device
) -> Preparation:
    """What becomes of the images of a batch before the network sees them."""
    normalization = Normalization(**about["normalization"])
    return Preparation(normalization, config.augmentation(part), device, config.channels_last)


def build_model(about: Mapping[str, Any], config: Config, device: torch.device) -> ResNet:
    """The network that a description is of, on the device."""
    model = ResNet(**about["model"])
    memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
    return model.to(device).to(memory_format=memory_format)


def adapt(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """The model with another BatchNorm and activation checkpointing, where they are asked for.

    Raises:
        UserError: the device cannot do what the settings ask for.
    """
    if config.parallel == "dp" and (is_joined() or _cuda_devices(device) < 2):
        raise UserError("--parallel dp: needs one process that has two CUDA devices or more")
    if config.batch_norm == "synced":
        if device.type not in ("cuda", "xpu"):
            raise UserError(f"--batch-norm synced: not on {device}; averaged comes near to it")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for block in model.modules():
        if isinstance(block, BasicBlock):
            recompute(block, config.activation_checkpointing, DEAR)
    return model


def _cuda_devices(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 0


def parallelize(
    model: nn.Module, shape: torch.Size, config: Config, device: torch.device
) -> nn.Module:
    """The model as steps call it.

    Args:
        shape: [C, H, W] of the images.
    """
    if config.parallel == "dp":
        return DataParallel(model)
    if not is_joined():
        return model
    # Buffers are made equal at the end of each step, so that all processes hold the same state.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **BUFFERS_STAY)
    samples = max(2, config.batch_size // world_size() // config.accumulate)
    with autocast(config.precision, device):
        settle(ddp, (samples, *shape))
    return ddp


def train(config: Config) -> dict[str, Any]:
    """Make a run, or what is left of it."""
    with Run(config, NAME) as run:
        if run.result is not None:
            return run.result
        splits = images.load(config)
        check_images(splits.train, config)
        splits = shorten(splits, config)
        about = describe(splits.train, config)
        prepare = make_preparation(about, splits.train, config, run.device)
        train_loader = make_loader(splits.train, config, run.device, shuffle=True)
        val_loader = make_loader(splits.val, config, run.device)
        model = adapt(build_model(about, config, run.device), config, run.device)
        learner = Learner(model, config, len(train_loader))
        run.begin(learner, about)
        if config.balance:
            run.log.say(f"an epoch has {train_loader.distinct_share(0):.1%} distinct samples")
        if config.compile:  # shapes that turn dynamic half-way would change the rounding
            learner.model.compile(dynamic=False)
        model = parallelize(learner.model, splits.train.shape, config, run.device)
        if run.processes > 1:
            run.log.say(f"averages of BatchNorm: {config.batch_norm}")

        while run.progress.epoch < config.epochs:
            train_one_epoch(learner, model, train_loader, prepare, config, run)
            validation = evaluate(learner.evaluated, val_loader, prepare, config)
            learner.schedule.epoch_ended(validation.loss)
            run.epoch_ended(validation)

        # What is measured is what was exported: the file, read back.
        test = evaluate_file(run.export(), splits.test, config, run.device)
        return run.finish(test, splits.test.classes)


def evaluate_file(path: Path, part: ImageSet, config: Config, device: torch.device) -> Evaluation:
    """Evaluate the weights in a file, as they were trained: with their own normalization.

    Raises:
        UserError: the file cannot be read, or is of another network or of other classes.
    """
    weights, about = read_trained(path)
    model_for_this = {**about["model"], "channels": part.shape[0]}
    check_about({"model": model_for_this, "classes": list(part.classes)}, about, path)
    model = build_model(about, config, device)
    load_weights(model, migrate(weights, about["version"], MIGRATIONS, path), path)
    prepare = make_preparation(about, part, config, device)
    return evaluate(model, make_loader(part, config, device), prepare, config)


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
    sys.exit(run_program(together(main), Config, __doc__))
