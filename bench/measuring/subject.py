"""The thing that is measured: a training step of a reference, ready to be made again and again."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bench.measuring import models
from bench.measuring.spec import Spec
from bench.switches import Switches
from bench.workloads import Workload
from refs import sequence_lstm as sequences_script
from refs import vision_resnet_distributed as vision_script
from shared import seeding
from shared.data import sequences
from shared.data.augment import Augmentation
from shared.data.images import ImageBatch, ImageSet, Preparation
from shared.data.loading import Loader
from shared.distributed import rank, world_size
from shared.recomputation import recompute
from shared.runs import StepResult, set_up_process
from shared.training import Learner

BATCHES = 4
"""Of images in memory, used in turn."""
SEQUENCE_BATCHES = 4
"""Of sequences, whose lengths differ: a block makes whole turns."""
LR = 1e-3
"""Small, so that a model does not learn its few batches so well that numbers become strange."""
SEED = 0
IN_LOADER = 16
"""Batches in an epoch of the loader."""


class Subject(Protocol):
    """What a worker measures."""

    samples: int
    """Of a step, over all processes."""
    cycle: int
    """Steps after which batches repeat; the length of a block is a multiple."""
    waited: float
    """Seconds that steps waited for data so far."""
    model: nn.Module
    """Has the gradients of the last step."""

    def step(self) -> StepResult:
        """Make the next training step; the device may still be at work on it afterwards."""


class TrainingSteps:
    """The steps of a reference on a stream of batches."""

    def __init__(
        self,
        model: nn.Module,
        batches: Iterator[Any],
        train_step: Callable[[Any, int], StepResult],
        samples: int,
        cycle: int,
    ) -> None:
        self.model, self.samples, self.cycle, self.waited = model, samples, cycle, 0.0
        self._batches, self._train_step, self._numbers = batches, train_step, count()

    def step(self) -> StepResult:
        """Make the next training step."""
        asked = time.perf_counter()
        batch = next(self._batches)
        self.waited += time.perf_counter() - asked
        return self._train_step(batch, next(self._numbers))


def make(spec: Spec) -> Subject:
    """Build what a spec describes, on its device, from weights that are always the same."""
    assert spec.workload is not None
    recipes = {"vision": make_vision, "sequences": make_sequences}
    in_float64 = spec.kind == "float64"
    return recipes[spec.workload.recipe](spec.workload, spec.switches, spec, in_float64)


def make_vision(workload: Workload, switches: Switches, spec: Spec, in_float64: bool) -> Subject:
    """Steps of refs/vision_resnet_distributed.py."""
    script = vision_script
    config = script.Config(
        **workload.settings,
        device=spec.device,
        threads=spec.threads,
        batch_size=spec.batch_size,
        lr=LR,
        precision=switches.precision,
        channels_last=switches.channels_last,
        activation_checkpointing=switches.checkpointing,
        parallel="dp" if switches.parallel == "dp" else "ddp",
        keep_freed_memory=switches.keep_freed_memory,
        # In several shares BatchNorm sees each of them alone; so does one process in micro-batches.
        accumulate=switches.devices if switches.parallel == "single" else 1,
    )
    device = set_up_process(config)
    torch.backends.cudnn.benchmark = switches.cudnn_benchmark
    torch.manual_seed(SEED)
    if workload.model == "resnet18":
        network = {"classes": models.CLASSES, "channels": workload.shape[0]}
        about = {"model": {**network, "stem": config.stem, "width": config.width}}
        model: nn.Module = script.build_model(about, config, device)
    else:
        found = models.find(workload.model)
        model = found.build()
        for block in model.modules():
            if isinstance(block, found.block):
                recompute(block, switches.checkpointing, found.kept)
        model = model.to(device).to(memory_format=_memory_format(switches))
    model = script.adapt(model, config, device)
    model = model.double() if in_float64 else model
    learner = Learner(model, config, steps_per_epoch=IN_LOADER)
    _compile(learner.model, switches)
    learner.model.train()
    wrapped = script.parallelize(learner.model, torch.Size(workload.shape), config, device)
    if switches.source == "loader":
        batches = _from_loader(workload, switches, config, device)
    else:
        made = _images_in_memory(workload, switches, config, device)
        batches = cycle([_in_float64(batch) for batch in made] if in_float64 else made)

    cycle_of = BATCHES if switches.changing_sizes else 1

    def train_step(batch: ImageBatch, number: int) -> StepResult:
        batch = _in_float64(batch) if in_float64 else batch
        optimizer, scaler = learner.optimizer, learner.scaler
        return script.train_step(wrapped, optimizer, scaler, batch, config, number)

    return TrainingSteps(learner.model, batches, train_step, spec.batch_size, cycle_of)


def make_sequences(workload: Workload, switches: Switches, spec: Spec, in_float64: bool) -> Subject:
    """Steps of refs/sequence_lstm.py."""
    script = sequences_script
    config = script.Config(
        **workload.settings,
        data="synthetic",
        device=spec.device,
        threads=spec.threads,
        batch_size=spec.batch_size,
        lr=LR,
        dropout=0.0,  # so that numbers can be compared with those of float64
        precision=switches.precision,  # type: ignore[arg-type]
        varlen=switches.varlen,
        bucket=switches.bucket,
        keep_freed_memory=switches.keep_freed_memory,
    )
    device = set_up_process(config)
    part = sequences.load(config).train
    about = script.describe(part, config)
    torch.manual_seed(SEED)
    model = script.build_model(about, config, device)
    model = model.double() if in_float64 else model
    learner = Learner(model, config, steps_per_epoch=IN_LOADER)
    learner.model.train()
    prepare = script.make_preparation(about, config, device)
    loader = script.make_loader(part, config, device, shuffle=True)
    made = [prepare(batch) for batch in islice(loader.epoch(), SEQUENCE_BATCHES)]
    batches = cycle([_in_float64(batch) for batch in made] if in_float64 else made)

    def train_step(batch: sequences.SequenceBatch, number: int) -> StepResult:
        return script.train_step(learner.model, learner.optimizer, batch, config, number)

    return TrainingSteps(learner.model, batches, train_step, spec.batch_size, SEQUENCE_BATCHES)


def _memory_format(switches: Switches) -> torch.memory_format:
    return torch.channels_last if switches.channels_last else torch.contiguous_format


def _compile(model: nn.Module, switches: Switches) -> None:
    if switches.compile != "eager":
        model.compile(dynamic=False, mode=switches.compile)


def _in_float64(batch: Any) -> Any:
    return batch._replace(inputs=batch.inputs.double())


def _images_in_memory(
    workload: Workload, switches: Switches, config: vision_script.Config, device: torch.device
) -> list[ImageBatch]:
    """This process' share of batches that are on the device and normalized."""
    generator = seeding.generator(seeding.SETUP, SEED)
    batches = []
    for shape in _shapes(workload, switches):
        inputs = torch.randn(config.batch_size, *shape, generator=generator)
        labels = torch.randint(models.CLASSES, (config.batch_size,), generator=generator)
        whole = ImageBatch(inputs, labels, torch.arange(config.batch_size))
        share = whole.split(world_size())[rank()]
        inputs = share.inputs.to(device)
        if switches.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        batches.append(share._replace(inputs=inputs, labels=share.labels.to(device)))
    return batches


def _shapes(workload: Workload, switches: Switches) -> Iterator[Sequence[int]]:
    """Of the inputs of each batch."""
    for number in range(BATCHES):
        if switches.changing_sizes:
            channels, height, width = workload.shape
            less = number * height // 8
            yield channels, height - less, width - less
        else:
            yield workload.shape


def _from_loader(
    workload: Workload, switches: Switches, config: vision_script.Config, device: torch.device
) -> Iterator[ImageBatch]:
    """Batches of bytes that the reference's loader makes, augmented by it or on the device."""
    generator = seeding.generator(seeding.SETUP, SEED)
    size = IN_LOADER * config.batch_size
    images = torch.randint(256, (size, *workload.shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(models.CLASSES, (size,), generator=generator)
    part = ImageSet(images, labels, tuple("0123456789"))
    padding = workload.shape[-1] // 8
    normalization, augmentation = part.normalization(), Augmentation()
    if switches.augmentation == "workers":
        part = _augmented(part, padding)
    elif switches.augmentation == "device":
        augmentation = Augmentation(crop_padding=padding, flip=True)
    prepare = Preparation(normalization, augmentation, device, switches.channels_last)
    loader: Loader[ImageBatch] = Loader(
        part,
        config.batch_size,
        seed=SEED,
        shuffle=True,
        workers=switches.workers,
        pin=switches.pinned and device.type == "cuda",
    )
    return _epochs(loader, prepare)


def _augmented(part: ImageSet, padding: int) -> ImageSet:
    """The same images, cropped and flipped one by one when they are read."""
    from torchvision.transforms import v2

    size = part.shape[-2:]
    transform = v2.Compose([v2.RandomCrop(size, padding), v2.RandomHorizontalFlip()])
    return ImageSet(part.images, part.labels, part.classes, transform, SEED)


def _epochs(loader: Loader[ImageBatch], prepare: Preparation) -> Iterator[ImageBatch]:
    for epoch in count():
        rows: dict[str, Tensor] = prepare.augmentation.table(loader.size, SEED, epoch)
        for batch in loader.epoch(epoch):
            yield prepare(batch, rows)
