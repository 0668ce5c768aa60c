"""What the tests of more than one room use."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests share the cores. OpenMP threads that spin while they wait for one that has none make a
# step of a busy machine tens of times slower. Read when torch is loaded, here and in children.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).parent.parent
TINY = ("--epochs=2", "--device=cpu", "--threads=1", "--log-every=5")
"""On one thread, so that tests can share the machine: a run takes seconds."""
NARROW = {"vision_resnet.py": ("--width=8",), "sequence_lstm.py": ("--hidden=8", "--batch-size=13")}
"""A small network for each script, and batches of which an epoch has about twenty."""

LONGEST = 600
"""Seconds of any test."""

Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Here and not in pyproject.toml: a comparison of `pytest bench` may take hours."""
    for item in items:
        item.add_marker(pytest.mark.timeout(LONGEST))


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a reference as a person would, tiny, in a folder of its own."""

    def start_script(script: str, *flags: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, ROOT / "refs" / script, *TINY, *NARROW[script], *flags],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "80", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_script


@pytest.fixture
def run(start: Start) -> Run:
    """Run a reference to its end."""

    def run_script(script: str, *flags: str) -> "subprocess.CompletedProcess[str]":
        process = start(script, *flags)
        stdout, stderr = process.communicate(timeout=400)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run_script
