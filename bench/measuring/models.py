"""Models that are measured and are not a reference's own; how to checkpoint and compile any."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from refs import vision_resnet_distributed as vision
from shared.initialization import initialize

CLASSES = 10


class Model(NamedTuple):
    """A model of the vision recipe."""

    build: Callable[[], nn.Module]
    block: type[nn.Module]
    """What activation checkpointing works on."""
    kept: Sequence[OpOverload]
    """Operators whose outputs selective checkpointing keeps."""


class Encoder(nn.Module):
    """A transformer encoder that classifies sequences of one length, after Vaswani et al., 2017.

    Norms come first in each block, as in GPT-2. No dropout: steps are to repeat.
    """

    def __init__(
        self, classes: int = CLASSES, frames: int = 128, features: int = 64, width: int = 256
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.positions = nn.Parameter(torch.zeros(frames, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)
        initialize(self, "tanh")
        initialize(self.fc, "none")
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, inputs: Tensor) -> Tensor:
        """Frames float [B, T, F] to logits [B, classes]."""
        steps = self.blocks(self.embed(inputs) + self.positions)
        logits: Tensor = self.fc(self.norm(steps).mean(1))
        return logits


class Block(nn.Module):
    """Attention and two layers, each around which the input is carried past."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, steps: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        qkv = self.qkv(self.norm1(steps)).unflatten(2, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        steps = steps + self.project(attended.transpose(1, 2).flatten(2))
        widened = nn.functional.gelu(self.widen(self.norm2(steps)))
        narrowed: Tensor = self.narrow(widened)
        return steps + narrowed


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50(num_classes=CLASSES)
    # As it starts, each block amplifies the rounding of the one before: after 16 of them gradients
    # in float32 are 2 % from those in float64, and nothing could be told by comparing them.
    for block in model.modules():
        if isinstance(block, _bottleneck()):
            norm = block.get_submodule("bn3")
            nn.init.constant_(norm.get_parameter("weight"), 0.2)
    return model


def _bottleneck() -> type[nn.Module]:
    from torchvision.models.resnet import Bottleneck

    block: type[nn.Module] = Bottleneck
    return block


MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def find(name: str) -> Model:
    """The model called `name`, which is not a reference's own."""
    match name:
        case "encoder":
            return Model(Encoder, Block, MATRIX_PRODUCTS)
        case "resnet50":
            return Model(_resnet50, _bottleneck(), vision.DEAR)
    raise ValueError(f"no such model: {name}")
