"""What is trained: a model, the shape of its input, and the reference whose step trains it.

A new workload is a new row of `WORKLOADS`; the model has to be one of `bench.measuring.models`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Workload:
    """A model, an input and a batch, trained with the `train_step` of a reference."""

    name: str
    about: str
    recipe: Literal["vision", "sequences"]
    """vision: refs/vision_resnet_distributed.py, whose inputs are tensors of one shape, of images
    or not; sequences: refs/sequence_lstm.py."""
    model: str
    """A name in `bench.measuring.models.MODELS`, or that of the reference's own."""
    shape: tuple[int, ...] = ()
    """Of one input of the vision recipe: [C, H, W] of images, [T, F] of frames."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the reference's `Config`, where its defaults do not fit."""
    batch_small: int = 16
    """Samples of a step on a CPU, or on a GPU with less than 16 GB."""
    batch_large: int = 256
    """On a larger GPU."""


_ROWS = (
    Workload(
        "resnet18-32",
        "ResNet-18 of the vision reference, 3x3 stem, images of 3x32x32",
        "vision",
        "resnet18",
        (3, 32, 32),
        {"stem": "cifar"},
        batch_small=8,
        batch_large=1024,
    ),
    Workload(
        "resnet18-32-7x7",
        "ResNet-18 of the vision reference, 7x7 stem, images of 3x32x32",
        "vision",
        "resnet18",
        (3, 32, 32),
        {"stem": "imagenet"},
        batch_small=32,
        batch_large=4096,
    ),
    Workload(
        "resnet50-224",
        "ResNet-50 of torchvision, images of 3x224x224",
        "vision",
        "resnet50",
        (3, 224, 224),
        batch_small=4,
        batch_large=256,
    ),
    Workload(
        "lstm",
        "LSTM of the sequence reference, 2 layers, both directions, 128 states; 40 features, "
        "20 to 100 frames, as spoken digits have",
        "sequences",
        "lstm",
        settings={"shortest": 20, "longest": 100},
        batch_small=32,
        batch_large=512,
    ),
    Workload(
        "encoder",
        "transformer encoder, 4 layers of width 256, 4 heads; 128 frames of 64 features",
        "vision",
        "encoder",
        (128, 64),
        batch_small=8,
        batch_large=512,
    ),
)

WORKLOADS = {workload.name: workload for workload in _ROWS}
