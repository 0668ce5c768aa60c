"""The questions: each is a table of variants, the baseline first, and what one of them changes.

A new axis is a new row of `AXES`; a new switch is a field of `bench.switches.Switches` and the line
of `bench.measuring.subject` that obeys it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.switches import Facts, Switches
from bench.workloads import WORKLOADS, Workload

CONTROL = "control"
"""The baseline, measured again as if it were a variant. What comes out is the noise."""


Role = Literal["baseline", "control", "variant"]


@dataclass(frozen=True)
class Axis:
    """One question about a training step."""

    name: str
    question: str
    variants: Mapping[str, Mapping[str, Any]]
    """What each changes of `base`; the first is the baseline."""
    workloads: tuple[str, ...]
    """Those that it makes sense for. The first is the one of a quick pass."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Switches that all variants share."""

    def __post_init__(self) -> None:
        for name in self.variants:
            self.switches(name)
        unknown = [name for name in self.workloads if name not in WORKLOADS]
        if unknown:
            raise ValueError(f"axis {self.name}: no such workload: {', '.join(unknown)}")

    @property
    def baseline(self) -> str:
        """The variant that the others are compared with."""
        return next(iter(self.variants))

    def switches(self, variant: str) -> Switches:
        """All switches of a variant, or of the control."""
        changes = self.variants[self.baseline if variant == CONTROL else variant]
        return Switches().but(self.base).but(changes)


_IMAGES = ("resnet18-32", "resnet18-32-7x7", "resnet50-224")

_ROWS = (
    Axis(
        "parallel",
        "what do more devices gain, under DataParallel and under DistributedDataParallel?",
        {
            "single": {},
            "dp-2": {"parallel": "dp", "devices": 2},
            "ddp-1": {"parallel": "ddp", "devices": 1},
            "ddp-2": {"parallel": "ddp", "devices": 2},
            "ddp-4": {"parallel": "ddp", "devices": 4},
            "ddp-8": {"parallel": "ddp", "devices": 8},
        },
        ("resnet18-32", "resnet50-224"),
    ),
    Axis(
        "precision",
        "what do fewer bits gain?",
        {
            "fp32": {},
            "tf32": {"precision": "tf32"},
            "bf16": {"precision": "bf16"},
            "fp16": {"precision": "fp16"},
        },
        (*_IMAGES, "encoder", "lstm"),
    ),
    Axis(
        "memory_format",
        "what does it gain to have channels innermost?",
        {"contiguous": {}, "channels_last": {"channels_last": True}},
        _IMAGES,
    ),
    Axis(
        "cudnn_benchmark",
        "what does it gain to let cuDNN try its algorithms?",
        {"off": {}, "on": {"cudnn_benchmark": True}},
        _IMAGES,
    ),
    Axis(
        "cudnn_benchmark-changing",
        "and where the size of images changes from batch to batch?",
        {"off": {}, "on": {"cudnn_benchmark": True}},
        _IMAGES,
        base={"changing_sizes": True},
    ),
    Axis(
        "compile",
        "what does torch.compile gain, and how long does it take?",
        {
            "eager": {},
            "default": {"compile": "default"},
            "reduce-overhead": {"compile": "reduce-overhead"},
            "max-autotune": {"compile": "max-autotune"},
        },
        ("encoder", *_IMAGES),
    ),
    Axis(
        "checkpointing",
        "what memory does it save to compute activations again, and what time does it cost?",
        {
            "none": {},
            "full": {"checkpointing": "full"},
            "selective": {"checkpointing": "selective"},
        },
        ("encoder", *_IMAGES),
    ),
    Axis(
        "varlen",
        "how should padding be kept out of an LSTM?",
        {
            "packed": {"varlen": "packed", "bucket": False},
            "packed-bucketed": {"varlen": "packed"},
            "masked": {"bucket": False},
            "masked-bucketed": {},
        },
        ("lstm",),
    ),
    Axis(
        "loader",
        "who should prepare images, and what does it cost to wait for them?",
        {
            "memory": {},
            "device": {"source": "loader", "augmentation": "device"},
            "device-unpinned": {"source": "loader", "augmentation": "device", "pinned": False},
            "workers-1": {"source": "loader", "augmentation": "workers", "workers": 1},
            "workers-2": {"source": "loader", "augmentation": "workers", "workers": 2},
            "workers-8": {"source": "loader", "augmentation": "workers", "workers": 8},
        },
        ("resnet18-32-7x7",),
    ),
    Axis(
        "allocator",
        "what does it gain to keep freed memory, on Linux CPUs?",
        {"kept": {}, "given-back": {"keep_freed_memory": False}},
        ("resnet18-32-7x7", "resnet18-32", "lstm", "encoder"),
    ),
    Axis(
        "stack",
        "the ladder: what do the switches gain together, one more at each rung?",
        {
            "fp32": {},
            "bf16": {"precision": "bf16"},
            "bf16+channels_last": {"precision": "bf16", "channels_last": True},
            "bf16+channels_last+compile": {
                "precision": "bf16",
                "channels_last": True,
                "compile": "default",
            },
        },
        ("resnet18-32", "resnet50-224"),
    ),
)

AXES = {axis.name: axis for axis in _ROWS}


@dataclass(frozen=True)
class Case:
    """A workload with one variant of an axis."""

    axis: str
    workload: Workload
    variant: str
    role: Role
    switches: Switches

    @property
    def name(self) -> str:
        """Of a row: axis/workload/variant."""
        return f"{self.axis}/{self.workload.name}/{self.variant}"

    def why_not(self, facts: Facts, batch_size: int) -> str | None:
        """Why a device cannot run it; None where it can."""
        if self.switches.precision == "fp16" and self.workload.recipe == "sequences":
            return "refs/sequence_lstm.py does not scale its loss"
        if self.switches.workers > max(2, facts.cores):
            return f"{self.switches.workers} workers, and {facts.cores} cores"
        if self.switches.devices > batch_size:
            return f"{self.switches.devices} devices, and a batch of {batch_size}"
        return self.switches.why_not(facts)


def cases_of(axis: Axis, workload: Workload) -> Iterator[Case]:
    """Baseline, control and the other variants."""
    baseline, *others = axis.variants
    roles: dict[str, Role] = {baseline: "baseline", CONTROL: "control"}
    roles |= dict.fromkeys(others, "variant")
    for variant, role in roles.items():
        yield Case(axis.name, workload, variant, role, axis.switches(variant))
