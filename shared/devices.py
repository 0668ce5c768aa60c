"""Where tensors live: choosing a device, moving batches to it, the allocator of the CPU."""

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from shared.errors import UserError

T = TypeVar("T")

_HEAP_FOREVER = 2**31 - 1  # mallopt takes an int; larger than any batch's activations here
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # from malloc.h


def choose_device(name: str) -> torch.device:
    """The device called `name`; `auto` is the accelerator if there is one, else the CPU.

    Raises:
        UserError: PyTorch knows no such device, or this machine has none.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(
            f"--device {name}: not a device; try auto, cpu, cuda, cuda:1, mps, xpu"
        ) from None
    if device.type == "cpu":
        if device.index:
            raise UserError(f"--device {name}: the cores of a machine are one device, cpu")
        return torch.device("cpu")
    if accelerator is None or device.type != accelerator.type:
        has = f"its accelerator is {accelerator.type}" if accelerator else "it has no accelerator"
        raise UserError(
            f"--device {name}: not on this machine, {has}; `python -m shared.environment` says why"
        )
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise UserError(f"--device {name}: this machine has {count} of them, counted from 0")
    return device


def move(batch: T, device: torch.device) -> T:
    """Move every tensor of a nested batch to `device`, except sequence lengths.

    `pack_padded_sequence` wants lengths on the CPU (pytorch#43227), so whatever is called
    `lengths`, as a key or as a field, stays there. Copies from pinned memory do not block.
    """
    return _move(batch, device)  # type: ignore[no-any-return]


def _move_field(name: str, value: Any, device: torch.device) -> Any:
    return value if name == "lengths" else _move(value, device)


def _move(item: Any, device: torch.device) -> Any:
    if isinstance(item, Tensor):
        return item.to(device, non_blocking=item.is_pinned())
    if isinstance(item, Mapping):
        return {name: _move_field(name, value, device) for name, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):  # a NamedTuple
        return type(item)(
            *(_move_field(*field, device) for field in zip(item._fields, item, strict=True))
        )
    if isinstance(item, list | tuple):
        return type(item)(_move(part, device) for part in item)
    return item


def keep_freed_memory() -> bool:
    """Tell the allocator of Linux not to give large blocks back to the system after every step.

    By default glibc maps every large tensor anew and unmaps it when it is freed, so that each
    training step pays for fresh zeroed pages. Kept on the heap, the pages are used again; huge
    pages make the first touch cheaper. Call it before the first tensor is made. What it gains is
    measured by the axis `allocator` of `bench`.

    Returns:
        Whether the setting took hold: False off Linux, and where malloc is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read once by PyTorch's CPU allocator
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has none
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _HEAP_FOREVER))
