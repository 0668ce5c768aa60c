"""What a number was measured on: the machine and the subject parts of a run's fingerprint.

`machine` is what the computer is, `subject` is what runs on it. Both hold only what stays the same
from one call to the next: a momentary clock, free memory, the load or a host name would make
"another machine" out of the same one (pytest-benchmark#255). What cannot be read is None, never 0
and never an empty text. Everything can be written as strict JSON.

    python -m shared.environment           for people
    python -m shared.environment --json    for programs
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared import nvml

_ROOT = Path(__file__).resolve().parent.parent

_ALLOCATOR_VARIABLES = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "THP_MEM_ALLOC_ENABLE",
)


def machine() -> dict[str, Any]:
    """Describe the computer: accelerators, CPU, threads, memory, operating system, allocator.

    Memory is in bytes, power in watts, clocks in MHz. Where there is a CUDA device its driver is
    initialised, so a process that wants to fork and use CUDA in its children forks before.
    """
    import psutil

    return {
        "accelerator": _accelerator(),
        "cpu": {
            "model": _cpu_model(),
            "architecture": platform.machine() or None,
            "physical_cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else None,
        },
        "threads": {
            "intra_op": torch.get_num_threads(),
            "inter_op": torch.get_num_interop_threads(),
        },
        "memory_bytes": psutil.virtual_memory().total,
        "os": {
            "system": platform.system(),
            "release": platform.release(),
            "distribution": _distribution(),
            "libc": " ".join(platform.libc_ver()).strip() or None,
        },
        "allocator": {
            "environment": _allocator_environment(os.environ),
            "transparent_huge_pages": _huge_pages(
                _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
            ),
        },
    }


def subject() -> dict[str, Any]:
    """Describe what is run: commit, versions, libraries, and the flags that change results.

    `dirty` is true when the checkout differs from the commit, files that git does not know
    included, since one of them may be the script that runs. Commit and flag are None where refbench
    is installed and not a checkout.
    """
    commit, dirty = _checkout(_ROOT)
    return {
        "commit": commit,
        "dirty": dirty,
        "versions": {
            "python": platform.python_version(),
            "refbench": _installed("refbench"),
            "torch": str(torch.__version__),  # its metadata lacks the +cu130 of the build
            "torchvision": _installed("torchvision"),
            "torchaudio": _installed("torchaudio"),
            "numpy": _installed("numpy"),
            "triton": _installed("triton"),
        },
        "libraries": _libraries(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "numerics": _numerics(),
    }


def why_no_accelerator() -> str | None:
    """Say in one sentence why torch has no accelerator here; None when it has one."""
    if torch.accelerator.is_available():
        return None
    if torch.version.cuda is not None:
        return _why_no_cuda(torch.version.cuda)
    if torch.version.hip is not None:
        return f"torch is built for ROCm {torch.version.hip}, which finds no AMD GPU"
    if torch.version.xpu is not None:
        return "torch is built for Intel GPUs (XPU) and finds none"
    if torch.backends.mps.is_built():
        return "torch is built for MPS, which this macOS or this computer does not offer"
    with nvml.opened() as (_, driver_problem):
        gpu = "; this computer has an NVIDIA driver" if driver_problem is None else ""
    return f"torch {torch.__version__} is built without CUDA (a build for the CPU alone){gpu}"


# --- accelerators -------------------------------------------------------------------------------


def _accelerator() -> dict[str, Any]:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return {"type": None, "count": 0, "devices": [], "topology": None}
    count = torch.accelerator.device_count()
    with nvml.opened() as (library, _):
        handles = [nvml.card_at(library, device.type, index) for index in range(count)]
        devices = [
            _device_properties(device.type, index) | nvml.limits(library, handle)
            for index, handle in enumerate(handles)
        ]
        paired = library is not None and device.type == "cuda" and count > 1
        topology = nvml.topology(library, handles) if paired else None
    return {"type": device.type, "count": count, "devices": devices, "topology": topology}


def _device_properties(kind: str, index: int) -> dict[str, Any]:
    """What torch itself knows of a device; memory is None where CPU and GPU share it."""
    if kind == "mps":
        return {
            "name": torch.backends.mps.get_name(),
            "memory_bytes": None,
            "compute_capability": None,
        }
    properties = torch.get_device_module(kind).get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}" if kind == "cuda" else None
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": capability,
    }


def _why_no_cuda(built_for: str) -> str:
    """Find why a torch that is built for CUDA `built_for` ("13.0") sees no device."""
    with nvml.opened() as (library, problem):
        if problem is not None:
            return problem
        driver = nvml.ask(library, library.nvmlSystemGetDriverVersion)
        supported = nvml.ask(library, library.nvmlSystemGetCudaDriverVersion)  # 12020 for CUDA 12.2
        count = nvml.ask(library, library.nvmlDeviceGetCount)
    # Within one major version an older driver runs newer CUDA code; across two it does not:
    # https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
    if supported is not None and supported // 1000 < int(built_for.split(".")[0]):
        return (
            f"the NVIDIA driver {driver} is too old: it runs CUDA up to "
            f"{supported // 1000}.{supported % 1000 // 10}, and this torch is built for {built_for}"
        )
    if count == 0:
        return f"the NVIDIA driver {driver} works but sees no GPU"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and _hides_all(visible, count):
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides all NVIDIA GPUs (the driver sees {count})"
    return f"the NVIDIA driver {driver} sees {count} GPU(s), but CUDA does not start: {_refusal()}"


def _hides_all(visible: str, count: int | None) -> bool:
    """Whether this CUDA_VISIBLE_DEVICES leaves no device.

    CUDA reads the list up to the first entry that is no device, so the first one decides. A UUID
    counts as a device: that it names none shows in what CUDA itself says.
    """
    first = visible.split(",")[0].strip()
    if not re.fullmatch(r"-?\d+", first):
        return first == ""
    return int(first) < 0 or (count is not None and int(first) >= count)


def _refusal() -> str:
    """Return the first line of what torch says when CUDA is made to start."""
    cuda: Any = torch.cuda  # without annotations of its own
    try:
        cuda.init()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return "torch gives no reason"


# --- CPU, operating system, allocator -----------------------------------------------------------


def _cpu_model() -> str | None:
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    cpuinfo = _text(Path("/proc/cpuinfo"))
    return _model_in_cpuinfo(cpuinfo) if cpuinfo is not None else platform.processor() or None


def _model_in_cpuinfo(cpuinfo: str) -> str | None:
    """Read the model from the text of /proc/cpuinfo; 64-bit Arm gives numbers and no name."""
    pattern = r"^([^\t:]+?)\s*:[ \t]*(\S.*?)\s*$"
    fields: dict[str, str] = dict(re.findall(pattern, cpuinfo, flags=re.MULTILINE))
    if "model name" in fields:
        return fields["model name"]
    if "CPU implementer" in fields and "CPU part" in fields:
        return f"implementer {fields['CPU implementer']} part {fields['CPU part']}"
    return None


def _distribution() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:  # not Linux, or a container without /etc/os-release
        return None


def _allocator_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Pick the variables that are set and steer malloc or torch's caching allocators."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if environment[name] and (name in _ALLOCATOR_VARIABLES or name.startswith("MALLOC_"))
    }


def _huge_pages(enabled: str | None) -> str | None:
    """Read the mode in "always [madvise] never"; None where the kernel has none."""
    return _first(r"\[(\w+)\]", enabled or "")


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


# --- commit, versions, flags --------------------------------------------------------------------


def _checkout(root: Path) -> tuple[str | None, bool | None]:
    """Return (commit, dirty) of the git checkout whose top folder is `root`, or (None, None)."""
    # In a container the checkout often belongs to another user, which git refuses unless told; its
    # code is what runs here, so there is nothing to protect it from.
    git = ("git", "-C", str(root), "-c", f"safe.directory={root}")
    found = _output(*git, "rev-parse", "--show-toplevel", "HEAD")
    if found is None:
        return None, None
    top, commit = found.splitlines()
    # Installed into a virtual environment inside somebody's project, `root` lies in *their* git.
    if not root.samefile(top):
        return None, None
    # --no-optional-locks: refreshing the index would get in the way of a git that is at work.
    changes = _output(*git, "--no-optional-locks", "status", "--porcelain")
    return commit, None if changes is None else changes != ""


def _output(*command: str) -> str | None:
    """Run a small program; its output stripped, or None where it is absent, fails or hangs."""
    # In a git hook these point at the repository that is being committed to, whatever -C says.
    hook = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    environment = {name: value for name, value in os.environ.items() if name not in hook}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=10, check=True
        )
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()


def _installed(distribution: str) -> str | None:
    """Return the version of a distribution without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _libraries() -> dict[str, Any]:
    with nvml.opened() as (library, _):
        driver = None if library is None else nvml.ask(library, library.nvmlSystemGetDriverVersion)
    build = torch.__config__.show()
    backends: Any = torch.backends  # without annotations of their own
    return {
        "nvidia_driver": driver,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": backends.cudnn.version(),
        "nccl": _nccl(),
        "onednn": _first(r"MKL-DNN v([\d.]+)", build),
        "mkl": _first(r"Math Kernel Library Version ([\d.]+)", build),
    }


def _nccl() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    cuda: Any = torch.cuda
    return ".".join(str(part) for part in cuda.nccl.version())


def _first(pattern: str, text: str) -> str | None:
    """Return what the first group of `pattern` matches in `text`, or None."""
    found = re.search(pattern, text)
    return str(found[1]) if found else None


def _numerics() -> dict[str, Any]:
    """Read the flags that change results.

    The precision of float32 is read through `fp32_precision` alone: torch has an older interface
    (`allow_tf32`) too, and may refuse to answer once both were touched
    (https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices).
    """
    backends: Any = torch.backends
    return {
        "fp32_precision": {
            "default": backends.fp32_precision,
            "cuda.matmul": backends.cuda.matmul.fp32_precision,
            "cudnn.conv": backends.cudnn.conv.fp32_precision,
            "cudnn.rnn": backends.cudnn.rnn.fp32_precision,
            "mkldnn.matmul": backends.mkldnn.matmul.fp32_precision,
            "mkldnn.conv": backends.mkldnn.conv.fp32_precision,
            "mkldnn.rnn": backends.mkldnn.rnn.fp32_precision,
        },
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG") or None,
        "cudnn_deterministic": backends.cudnn.deterministic,
        "cudnn_benchmark": backends.cudnn.benchmark,
    }


# --- the command --------------------------------------------------------------------------------


def _rows(value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Flatten nested dicts and lists of dicts to (indented label, text) for `_table`."""
    for name, item in value.items():
        label = "  " * depth + name
        if isinstance(item, list) and item and isinstance(item[0], dict):
            for index, entry in enumerate(item):
                yield f"{label}[{index}]", ""
                yield from _rows(entry, depth + 1)
        elif isinstance(item, dict) and item:
            yield label, ""
            yield from _rows(item, depth + 1)
        else:
            yield label, _words(name, item)


def _words(name: str, value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(description: dict[str, Any]) -> str:
    rows = list(_rows(description))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}".rstrip() for label, text in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the machine and the subject, and why there is no accelerator where there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m shared.environment",
        description="Describe this machine and what runs on it.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    options = parser.parse_args(argv)
    with warnings.catch_warnings():
        # torch warns about a driver that it cannot use; the same is said below, in words.
        warnings.filterwarnings("ignore", message="CUDA initialization")
        reason = why_no_accelerator()
        description = {"machine": machine(), "subject": subject()}
    if options.json:
        print(json.dumps(description | {"why_no_accelerator": reason}, indent=2, allow_nan=False))
        return
    print(_table(description))
    if reason is not None:
        print(f"\nNo accelerator: {reason}.")


if __name__ == "__main__":
    main()
