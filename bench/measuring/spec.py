"""What a conductor tells a worker when it starts it, and what the two say to each other.

A worker reads a `Spec` from a file, and then commands from standard input, a line of JSON each; it
answers on standard output, a line of JSON each. Whatever else is printed goes to standard error.

    worker: {"event": "ready", ...}                   after numerics, first step and warm-up
    conductor: {"command": "block", "steps": 10}      worker: {"event": "block", ...}
    conductor: {"command": "park"}                    worker: {"event": "parked", ...}
    conductor: the end of the stream                  worker ends
    worker: {"event": "failed", "status": "oom", "reason": "..."}      at any time, and ends
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from bench.switches import Switches
from bench.workloads import Workload

PROTOCOL = 1
"""Changes when a conductor and a worker of different commits would misunderstand each other."""

PLAIN = Switches()

Kind = Literal["measure", "float64", "describe"]


@dataclass(frozen=True)
class Spec:
    """What one process, or group of processes, is to measure."""

    kind: Kind
    """measure: blocks on request. float64: the same steps in float64, for comparison. describe:
    what the machine is and can do."""
    device: str
    threads: int | None
    """Of each process; None leaves it to torch."""
    workload: Workload | None = None
    switches: Switches = PLAIN
    batch_size: int = 0
    """Samples of a step, over all processes."""
    numerics: str | None = None
    """File of the steps in float64: written by the kind of this name, read by `measure`."""
    maker: str = "bench.measuring.subject:make"
    """module:function that builds what is measured, from a spec."""
    memory_limit: int | None = None
    """Bytes of address space that a process may have."""

    def write(self, path: Path) -> None:
        """Into a file, for a worker to read."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file that `write` has made."""
        values: dict[str, Any] = json.loads(path.read_text())
        if values["workload"] is not None:
            shape = tuple(values["workload"].pop("shape"))
            values["workload"] = Workload(shape=shape, **values["workload"])
        return cls(**{**values, "switches": Switches(**values["switches"])})
