"""What the machine is, what it can do, and how fast it multiplies matrices at best."""

import time
from typing import Any

import torch

from bench.measuring.clock import make_clock
from bench.switches import Facts
from shared import environment
from shared.data.decoding import usable_cores
from shared.precision import computes_bf16, computes_fp16

MATRIX = {"cpu": 2048}
"""Rows and columns of the matrices of the peak; on accelerators 8192."""
SECONDS = 1.0
"""How long each product is repeated."""


def facts(device: torch.device) -> Facts:
    """What a device can do."""
    on_cpu = device.type == "cpu"
    tf32, bf16, fp16 = False, computes_bf16(device), True
    if on_cpu:
        fp16 = computes_fp16()
    elif device.type == "cuda":
        tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
        bf16 = torch.cuda.is_bf16_supported(False)
    if device.type in ("cuda", "xpu"):
        properties = torch.get_device_module(device).get_device_properties(device)
        memory_bytes = int(properties.total_memory)
    else:
        memory_bytes = int(environment.machine()["memory_bytes"])
    return Facts(
        device=device.type,
        devices=1 if on_cpu else torch.accelerator.device_count(),
        memory_bytes=memory_bytes,
        tf32=tf32,
        bf16=bf16,
        fp16=fp16,
        cores=usable_cores(),
    )


def peaks(device: torch.device, can: Facts) -> dict[str, float]:
    """Operations a second of a product of large square matrices, the best of several, by precision.

    What a training step reaches of it says how much there is to gain at all.
    """
    found = {"fp32": _peak(device, torch.float32)}
    if can.tf32:
        torch.set_float32_matmul_precision("high")
        found["tf32"] = _peak(device, torch.float32)
        torch.set_float32_matmul_precision("highest")
    if can.bf16:
        found["bf16"] = _peak(device, torch.bfloat16)
    if can.fp16:
        found["fp16"] = _peak(device, torch.float16)
    return found


def _peak(device: torch.device, dtype: torch.dtype) -> float:
    size = MATRIX.get(device.type, 8192)
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    out = left @ right
    best = 0.0
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        clock = make_clock(device)
        clock.mark()
        torch.matmul(left, right, out=out)
        clock.mark()
        (seconds,) = clock.seconds()
        best = max(best, 2 * size**3 / seconds)
    return best


def describe(device: torch.device) -> dict[str, Any]:
    """Fingerprint, abilities and peaks, for the head of a journal."""
    can = facts(device)
    return {
        "facts": can._asdict(),
        "machine": environment.machine(),
        "subject": environment.subject(),
        "peak_flop_per_s": peaks(device, can),
    }
