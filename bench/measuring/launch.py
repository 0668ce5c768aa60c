"""A worker as the conductor sees it: a process, or a group of them under torchrun."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.measuring.spec import PROTOCOL, Spec

ROOT = Path(__file__).resolve().parents[2]

_VMSTAT = Path("/proc/vmstat")

Status = Literal["oom", "failed", "timeout"]


class Lost(Exception):  # noqa: N818  an end, and not always an error
    """A worker has ended, or is of no use any more."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Place:
    """An interpreter and a checkout that workers run in."""

    python: str = sys.executable
    root: Path = ROOT
    environ: dict[str, str] = field(default_factory=dict)
    """Variables on top of the conductor's."""


class Launch:
    """A worker that has been started.

    Args:
        spec: what it is to do.
        place: where.
        folder: for its spec and what it prints.
        cache: of compiled code; a fresh one makes the first step a cold one.
    """

    def __init__(self, spec: Spec, place: Place, folder: Path, cache: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "spec.json"
        spec.write(file)
        command = [place.python, "-m", "bench.measuring.worker", str(file)]
        if spec.switches.parallel == "ddp":
            group = ["--standalone", f"--nproc-per-node={spec.switches.devices}", "--module"]
            command = [place.python, "-m", "torch.distributed.run", *group, *command[2:]]
        self._stderr = folder / "stderr.txt"
        self._oom_kills = _oom_kills()
        self._buffer = b""
        self._is_over = False
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=_environment(spec, place, cache),
                start_new_session=True,  # Ctrl-C is for the conductor, which ends its workers
            )

    def ready(self, limit: float) -> dict[str, Any]:
        """Wait until it has warmed up.

        Raises:
            Lost: it has ended, or took longer than `limit` seconds.
        """
        found = self.wait("ready", limit)
        if found["protocol"] != PROTOCOL:
            self.kill()
            raise Lost("failed", f"speaks protocol {found['protocol']}, and not {PROTOCOL}")
        return found

    def block(self, steps: int, limit: float) -> dict[str, Any]:
        """Let it time some steps.

        Raises:
            Lost: as in `ready`.
        """
        return self._ask({"command": "block", "steps": steps}, "block", limit)

    def park(self, limit: float) -> dict[str, Any]:
        """Let it give back what it has cached.

        Raises:
            Lost: as in `ready`.
        """
        return self._ask({"command": "park"}, "parked", limit)

    def _ask(self, command: dict[str, Any], answer: str, limit: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._why_it_ended() from None
        return self.wait(answer, limit)

    def wait(self, event: str, limit: float) -> dict[str, Any]:
        """Wait for it to say something.

        Raises:
            Lost: as in `ready`.
        """
        deadline = time.monotonic() + limit
        while b"\n" not in self._buffer:
            self._read_some(deadline, limit)
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if said["event"] == "failed":
            self.kill()
            raise Lost(said["status"], said["reason"])
        assert said.pop("event") == event, said
        return said

    def _read_some(self, deadline: float, limit: float) -> None:
        assert self._process.stdout is not None
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
            self.kill()
            raise Lost("timeout", f"nothing came of it in {limit:.0f} s")
        data = os.read(self._process.stdout.fileno(), 1 << 16)
        if not data:
            raise self._why_it_ended()
        self._buffer += data

    def _why_it_ended(self) -> Lost:
        code = self._process.wait()
        self.kill()
        if _oom_kills() > self._oom_kills:
            return Lost("oom", "ended by the kernel, which had no memory left")
        lines = self._stderr.read_text(errors="replace").strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        if code < 0:
            return Lost("failed", f"ended by {signal.Signals(-code).name}{said}")
        return Lost("failed", f"ended with code {code}{said}")

    def kill(self) -> None:
        """End it and everything that it has started, now; the second time, nothing."""
        if self._is_over:
            return
        self._is_over = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


def _environment(spec: Spec, place: Place, cache: Path) -> dict[str, str]:
    """Variables of a worker: threads as the spec says, and a cache of its own."""
    search = os.pathsep.join(filter(None, [str(place.root), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "PYTHONPATH": search,
        **({} if spec.threads is None else {"OMP_NUM_THREADS": str(spec.threads)}),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        **place.environ,
    }


def _oom_kills() -> int:
    """How many processes the kernel has ended since it was started, to have memory."""
    if not _VMSTAT.exists():
        return 0
    lines = (line.split() for line in _VMSTAT.read_text().splitlines())
    return sum(int(value) for name, value in lines if name == "oom_kill")
