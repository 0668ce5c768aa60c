"""What NVIDIA's management library (NVML) knows of the cards, where there is one.

Source: https://docs.nvidia.com/deploy/nvml-api
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch

# The names of `nvidia-smi topo -m`, by nvmlGpuTopologyLevel_t (nvml.h), nearest first.
_TOPOLOGY_LEVELS = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

# NVML_P2P_CAPS_INDEX_READ of nvml.h. The constant in pynvml is the tuple (0,), by a stray comma.
_P2P_READ = 0


@contextmanager
def opened() -> Iterator[tuple[Any, str | None]]:
    """Open NVML and yield (pynvml, None), or (None, what is wrong) where no driver works."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:  # the library comes with the driver
        yield None, "no NVIDIA driver found"
        return
    except pynvml.NVMLError as error:
        yield None, f"the NVIDIA driver does not work: {error}"
        return
    try:
        yield pynvml, None
    finally:
        pynvml.nvmlShutdown()


def ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; None for what this card, driver or user may not read.

    Every error of NVML counts: which one a card answers with differs by driver (not supported, no
    permission, unknown), and no run should end because a description of it has a gap.
    """
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def card_at(nvml: Any, kind: str, index: int) -> Any:
    """Find the card by its place on the bus: CUDA_VISIBLE_DEVICES renumbers torch's devices."""
    if nvml is None or kind != "cuda":
        return None
    card: Any = torch.cuda.get_device_properties(index)
    # domain:bus:device.function, in hexadecimal
    place = f"{card.pci_domain_id:08X}:{card.pci_bus_id:02X}:{card.pci_device_id:02X}.0"
    return ask(nvml, nvml.nvmlDeviceGetHandleByPciBusId, place)


def limits(nvml: Any, handle: Any) -> dict[str, Any]:
    """What the card is allowed to do, where NVML tells.

    `requested` clocks are those that somebody set (`nvidia-smi -ac`) or the default; a card may be
    unable to hold them, which only readings during a run show.
    """
    if handle is None:
        return {
            "power_cap_w": None,
            "sm_mhz": {"requested": None, "max": None},
            "memory_mhz": {"requested": None, "max": None},
            "nvlinks": None,
        }
    milliwatts = ask(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return {
        "power_cap_w": None if milliwatts is None else milliwatts / 1000,
        "sm_mhz": _clocks(nvml, handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": _clocks(nvml, handle, nvml.NVML_CLOCK_MEM),
        "nvlinks": _nvlinks(nvml, handle),
    }


def _clocks(nvml: Any, handle: Any, clock: int) -> dict[str, int | None]:
    return {
        "requested": ask(nvml, nvml.nvmlDeviceGetApplicationsClock, handle, clock),
        "max": ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, clock),
    }


def _nvlinks(nvml: Any, handle: Any) -> int | None:
    """Count the active NVLinks of a card: a bridge of four is not a switch with eighteen."""
    states = [
        ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
    ]
    known = [state for state in states if state is not None]
    return known.count(nvml.NVML_FEATURE_ENABLED) if known else None


def topology(nvml: Any, handles: Sequence[Any]) -> list[dict[str, Any]]:
    """How each pair of devices is joined: the way over PCIe, NVLink, and direct access."""
    return [
        {
            "devices": [first, second],
            "path": _path(nvml, handles[first], handles[second]),
            "nvlink": _peer(nvml, handles[first], handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK),
            "p2p": _peer(nvml, handles[first], handles[second], _P2P_READ),
        }
        for first, second in combinations(range(len(handles)), 2)
    ]


def _path(nvml: Any, first: Any, second: Any) -> str | None:
    if first is None or second is None:
        return None
    return _TOPOLOGY_LEVELS.get(ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, first, second))


def _peer(nvml: Any, first: Any, second: Any, capability: int) -> bool | None:
    if first is None or second is None:
        return None
    status = ask(nvml, nvml.nvmlDeviceGetP2PStatus, first, second, capability)
    return None if status is None else bool(status == nvml.NVML_P2P_STATUS_OK)
