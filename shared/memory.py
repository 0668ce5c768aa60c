"""Peak memory by name: of tensors, of the allocator, and of the host process."""

from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> None:
    """Forget the peaks so far, so that the next reading is of what comes now."""
    if _is_counted(device):
        torch.accelerator.reset_peak_memory_stats(device)
    if _CLEAR.exists():
        _CLEAR.write_text("5")  # resets VmHWM; see proc_pid_clear_refs(5)


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Peaks since the last reset, in bytes; None for what cannot be measured here, never 0.

    `peak_allocated` and `peak_reserved` are the accelerator's: tensors, and the blocks that the
    caching allocator holds for them. `peak_rss` is the resident set of this process, without its
    loader workers.
    """
    counted = _is_counted(device)
    return {
        "peak_allocated": torch.accelerator.max_memory_allocated(device) if counted else None,
        "peak_reserved": torch.accelerator.max_memory_reserved(device) if counted else None,
        "peak_rss": _peak_rss(),
    }


def peak_of_run(device: torch.device) -> int | None:
    """The one number for a summary: allocated on an accelerator, resident set on a CPU; bytes."""
    peaks = peak_memory(device)
    return peaks["peak_rss"] if device.type == "cpu" else peaks["peak_allocated"]


def _is_counted(device: torch.device) -> bool:
    return device.type in ("cuda", "xpu")  # MPS keeps no peak


def _peak_rss() -> int | None:
    # Not getrusage: its maximum survives exec, so a child of a large process reports its parent.
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024  # the kernel counts in KiB
    return None
