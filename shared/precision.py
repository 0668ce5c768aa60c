"""The number formats of a run: float32 as IEEE defines it, TF32, bfloat16 or float16 autocast."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

from shared.errors import UserError

Precision = Literal["fp32", "tf32", "bf16", "fp16"]

UnscaledPrecision = Literal["fp32", "tf32", "bf16"]
"""Those that need no more of a training step than a context: the loss is not scaled."""


def set_precision(precision: Precision, device: torch.device) -> None:
    """Choose how float32 products are computed, for matrix products and convolutions alike.

    PyTorch has two interfaces for this, which must not be mixed, and this is the older one: after
    `fp32_precision = "tf32"`, asking through the older one raises, as torch.compile does for GPUs.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html

    Raises:
        UserError: the device has no such precision.
    """
    if precision == "tf32" and not _has_tf32(device):
        raise UserError(
            f"--precision tf32: needs an NVIDIA GPU of compute capability 8.0, not {device}"
        )
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        raise UserError(f"--precision bf16: {torch.cuda.get_device_name(device)} has no bfloat16")
    if precision == "fp16" and device.type not in ("cpu", "cuda", "xpu"):
        raise UserError(f"--precision fp16: gradients cannot be scaled on {device}; try bf16")
    if precision == "fp16" and device.type == "cpu" and not computes_fp16():
        print(
            "warning: --precision fp16: this CPU has no float16 arithmetic, and emulates it: tens "
            "of times slower than fp32"
        )
    if precision == "bf16" and not computes_bf16(device):
        print(
            "warning: --precision bf16: this CPU has no bfloat16 arithmetic, and emulates it: tens "
            "of times slower than fp32"
        )
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def computes_fp16() -> bool:
    """Whether the CPU has arithmetic of its own for float16: on x86 it takes AVX-512 with FP16."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def computes_bf16(device: torch.device) -> bool:
    """Whether the device has kernels of its own for bfloat16: on x86 they take AVX-512."""
    return device.type != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which forward and loss run: half the bits where it is safe, or unchanged.

    bfloat16 has the range of float32, so it needs no scaling of the loss; float16 does.
    """
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision in ("bf16", "fp16"))
