"""What can be switched about a training step, whatever the model; and where it cannot be."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Self


class Facts(NamedTuple):
    """What a device can do, as a process that has looked says."""

    device: str
    """cpu, cuda, xpu, mps."""
    devices: int
    """Devices of this kind; 1 for a CPU."""
    memory_bytes: int
    """Of one device; of the host for a CPU."""
    tf32: bool
    bf16: bool
    fp16: bool
    """In hardware, as bf16. A CPU without them emulates them, tens to hundreds of times slower."""
    cores: int


@dataclass(frozen=True)
class Switches:
    """Defaults are the plain training step: one device, IEEE float32, eager, batches in memory."""

    parallel: Literal["single", "dp", "ddp"] = "single"
    """ddp: a process for each device (on a CPU, two processes that share the cores)."""
    devices: int = 1
    """Devices, or processes on a CPU."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    cudnn_benchmark: bool = False
    """cuDNN tries its algorithms for each new shape and takes the fastest."""
    changing_sizes: bool = False
    """Batches of images of four sizes, one after another."""
    compile: Literal["eager", "default", "reduce-overhead", "max-autotune"] = "eager"
    checkpointing: Literal["none", "full", "selective"] = "none"
    varlen: Literal["packed", "masked"] = "masked"
    bucket: bool = True
    """Batches of sequences of like length."""
    source: Literal["memory", "loader"] = "memory"
    """Batches that are on the device already, or that the reference's loader makes."""
    augmentation: Literal["none", "device", "workers"] = "none"
    """Of what the loader gives: on whole batches on the device, or image by image in workers."""
    workers: int = 0
    pinned: bool = True
    """Batches of the loader come in pinned memory, where the device is a GPU."""
    keep_freed_memory: bool = True
    """The allocator of Linux CPUs keeps freed memory."""

    def but(self, changes: Mapping[str, Any]) -> Self:
        """A copy with changes.

        Raises:
            ValueError: a name is not that of a switch.
        """
        unknown = changes.keys() - {field.name for field in fields(self)}
        if unknown:
            raise ValueError(f"no such switch: {', '.join(sorted(unknown))}")
        return replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """Those that are not at their defaults."""
        return {k: v for k, v in asdict(self).items() if v != getattr(type(self), k)}

    def computing_the_same(self) -> Self:
        """Plain switches that see the same batches, in the same shares: for a run in float64."""
        same = ("changing_sizes", "bucket", "source", "augmentation", "devices")
        return type(self)(**{name: getattr(self, name) for name in same})

    def why_not(self, facts: Facts) -> str | None:
        """Why a device cannot run it; None where it can."""
        on_gpu = facts.device == "cuda"
        if self.precision == "tf32" and not facts.tf32:
            return "TF32 needs an NVIDIA GPU of compute capability 8.0"
        if self.precision == "bf16" and not facts.bf16:
            return "no bfloat16 arithmetic here; emulated it is many times slower"
        if self.precision == "fp16" and not facts.fp16:
            return "no float16 arithmetic here; emulated it is hundreds of times slower"
        if self.cudnn_benchmark and not on_gpu:
            return "cuDNN is for NVIDIA GPUs"
        if self.parallel == "dp" and (not on_gpu or facts.devices < 2):
            return "DataParallel needs two CUDA devices"
        if self.parallel == "ddp" and facts.device != "cpu" and facts.devices < self.devices:
            return f"needs {self.devices} devices, and there is {facts.devices}"
        if self.parallel == "ddp" and facts.device == "cpu" and facts.cores < self.devices:
            return f"needs {self.devices} cores, and there is {facts.cores}"
        if self.compile in ("reduce-overhead", "max-autotune") and not on_gpu:
            return f"{self.compile} is about CUDA graphs and kernels of GPUs"
        if not self.pinned and not on_gpu:
            return "memory is pinned for copies to a GPU"
        if not self.keep_freed_memory and facts.device != "cpu":
            return "the allocator of the CPU matters to training on a CPU"
        return None
