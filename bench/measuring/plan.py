"""How to measure, and what is measured together."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from bench import statistics
from bench.axes import Case
from bench.statistics import Rules

Mode = Literal["together", "parked", "alone"]
"""How launches of a round share the memory: all at once; giving back what they have cached between
blocks; or one after another, not interleaved."""

MODES: tuple[Mode, ...] = ("together", "parked", "alone")


@dataclass(frozen=True)
class Plan:
    """How to measure. It is the head of the journal, and the same when a suite is resumed."""

    device: str = "auto"
    threads: int | None = None
    """Of each process, or torch's own choice; on a CPU the processes of a group share them."""
    launches: int = statistics.DEFAULT_LAUNCHES
    """Of each variant, at most."""
    blocks: int = 8
    """Of each launch."""
    block_s: float = 0.5
    """Seconds of a block, at least a step."""
    budget_s: float = math.inf
    """Seconds for one comparison; begun rounds are finished."""
    margin: float = statistics.DEFAULT_RULES.margin
    """Differences up to this count as none."""
    seed: int = 0
    """Of the order in which blocks are timed."""
    limit_s: float = 900.0
    """Longest silence of a worker; compilation is part of it."""
    batch_size: int | Literal["auto", "table"] = "table"
    """auto: the largest power of two that all variants of a comparison fit. table: that of the
    workload for a device of this size."""

    against: str | None = None
    """What the variant `there` is: a version of torch, or a commit."""

    @property
    def rules(self) -> Rules:
        """What verdicts promise."""
        return Rules(margin=self.margin)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no infinity."""
        return asdict(self) | ({"budget_s": None} if math.isinf(self.budget_s) else {})


class Members(NamedTuple):
    """What is compared with each other: one axis on one workload."""

    name: str
    """axis/workload."""
    cases: Sequence[Case]
    """Baseline first, then the control, then variants."""
