"""A suite: what is asked for, measured comparison by comparison, and the file that comes of it."""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench import record
from bench.axes import AXES, Axis, Case, cases_of
from bench.measuring.conductor import Conductor
from bench.measuring.journal import Journal
from bench.measuring.launch import ROOT, Lost, Place
from bench.measuring.plan import Members, Plan
from bench.workloads import WORKLOADS
from shared.errors import UserError
from shared.files import atomic_write

RESULTS = Path("results")

QUICK = {"launches": 1, "blocks": 2, "block_s": 0.2}

AGAINST = Axis(
    "against",
    "is the other interpreter or checkout faster?",
    {"here": {}, "there": {}},
    tuple(WORKLOADS),
)


@dataclass(frozen=True)
class Options:
    """What a suite is asked to do; None stands for the default."""

    results: Path | None = None
    resume: bool = False
    quick: bool = False
    axis: Sequence[str] | None = None
    workload: Sequence[str] | None = None
    device: str = "auto"
    threads: int | None = None
    launches: int | None = None
    blocks: int | None = None
    block_s: float | None = None
    budget_minutes: float | None = None
    margin: float | None = None
    batch_size: str | None = None
    limit_s: float | None = None
    against: str | None = None
    against_commit: str | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise UserError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        for flag, names, known in (
            ("--axis", self.axis, AXES),
            ("--workload", self.workload, WORKLOADS),
        ):
            for name in names or ():
                if name not in known:
                    yield f"{flag} {name}: there are {', '.join(known)}"
        for flag, value, low, high in (
            ("--threads", self.threads, 1, 1024),
            ("--launches", self.launches, 1, 1000),
            ("--blocks", self.blocks, 1, 1000),
            ("--block-seconds", self.block_s, 0.001, 3600),
            ("--budget-minutes", self.budget_minutes, 0.01, 1e6),
            ("--limit-seconds", self.limit_s, 1, 1e6),
            ("--margin", self.margin, 0.0001, 0.9),
        ):
            if value is not None and not low <= value <= high:
                yield f"{flag} {value}: must be between {low:g} and {high:g}"
        size = self.batch_size
        if size is not None and size != "auto" and not (size.isdecimal() and int(size) > 0):
            yield f"--batch-size {size}: must be a positive number, or auto"
        if self.against and self.against_commit:
            yield "--against and --against-commit exclude each other"
        if self.resume and self.results is None:
            yield "--resume needs --results, the file that was to be written"
        if self.quick:
            for flag, value in (
                ("--launches", self.launches),
                ("--blocks", self.blocks),
                ("--block-seconds", self.block_s),
            ):
                if value is not None:
                    yield f"{flag}: --quick has its own"

    def plan(self) -> Plan:
        """How to measure."""
        values: dict[str, Any] = {
            "device": self.device,
            "threads": self.threads,
            "launches": self.launches,
            "blocks": self.blocks,
            "block_s": self.block_s,
            "budget_s": self.budget_minutes and 60 * self.budget_minutes,
            "margin": self.margin,
            "limit_s": self.limit_s,
        } | (QUICK if self.quick else {})
        if self.batch_size is not None:
            values["batch_size"] = "auto" if self.batch_size == "auto" else int(self.batch_size)
        return Plan(**{name: value for name, value in values.items() if value is not None})

    def axes(self) -> list[Axis]:
        """The axes to measure, in the order of the table."""
        if self.against or self.against_commit:
            return [AGAINST] + [AXES[name] for name in self.axis or ()]
        return [axis for name, axis in AXES.items() if self.axis is None or name in self.axis]

    def cases(self) -> Iterator[Case]:
        """All cases to measure."""
        for axis in self.axes():
            names = [n for n in axis.workloads if self.workload is None or n in self.workload]
            for name in names[:1] if self.quick else names:
                yield from cases_of(axis, WORKLOADS[name])


class Suite:
    """Comparisons that are measured when they are first asked for.

    Args:
        options: what is asked for.
        tell: is called with a line about what happens.

    Raises:
        UserError: a file is in the way, or another interpreter or commit is not to be had.
    """

    def __init__(self, options: Options, tell: Callable[[str], None]) -> None:
        self.options = options
        self.plan = options.plan()
        self.results = options.results or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
        self.journal_file = self.results.with_suffix(".jsonl")
        if options.resume and not self.journal_file.exists():
            raise UserError(f"--resume: there is no {self.journal_file}")
        if not options.resume:
            for file in (self.results, self.journal_file):
                if file.exists():
                    raise UserError(f"{file}: exists; --resume goes on with it")
        self.results.parent.mkdir(parents=True, exist_ok=True)
        self.part_file = self.results.with_suffix(".pytest-benchmark")
        self._tell = tell
        self._other = _other(options)
        if self._other is not None:
            self.plan = replace(self.plan, against=self._other.what)
        self.selected: dict[str, list[Case]] = {}
        """The cases to measure, by axis/workload."""
        self._begun: list[str] = []
        self._conductor: Conductor | None = None
        self.journal: Journal | None = None

    def select(self, names: Sequence[str | None]) -> None:
        """Measure these cases only, with the baselines and controls of what they belong to."""
        wanted = set(names)
        for case in self.options.cases():
            comparison = f"{case.axis}/{case.workload.name}"
            self.selected.setdefault(comparison, []).append(case)
        for comparison, cases in list(self.selected.items()):
            kept = [c for i, c in enumerate(cases) if i < 2 or c.name in wanted]
            if not any(case.name in wanted for case in cases):
                del self.selected[comparison]
            else:
                self.selected[comparison] = kept

    def row(self, case: str) -> dict[str, Any]:
        """What came of a case, which is measured if it has not been.

        Raises:
            UserError: the machine is not that of the journal, or cannot be described.
        """
        conductor = self._open()
        comparison, _, _ = case.rpartition("/")
        if comparison not in self._begun:
            self._begun.append(comparison)
            self._tell(f"{comparison}: comparison {len(self._begun)} of {len(self.selected)}")
        conductor.measure(Members(comparison, self.selected[comparison]))
        return next(row for row in self.parts()["cases"] if row["case"] == case)

    def _open(self) -> Conductor:
        if self._conductor is None:
            self.journal = Journal(self.journal_file)
            rows = sum(len(cases) - 2 for cases in self.selected.values())
            places = {"there": self._other.place} if self._other else {}
            try:
                self._conductor = Conductor(self.journal, self.plan, rows, places, self._tell)
            except Lost as lost:
                raise UserError(f"the machine cannot be described: {lost.reason}") from None
            self._conductor.ask([Members(*pair) for pair in self.selected.items()])
        return self._conductor

    def parts(self) -> dict[str, Any]:
        """What is added to pytest-benchmark's file."""
        assert self.journal is not None
        return record.parts(self.journal, self.plan.rules)

    def close(self) -> None:
        """End what is running, and give back what was taken."""
        if self._conductor is not None:
            self._conductor.__exit__()
        if self.journal is not None:
            self.journal.close()
        if self._other is not None and self._other.place.root != ROOT:
            checkout = self._other.place.root
            shutil.rmtree(checkout.parent)
            subprocess.run(["git", "-C", str(ROOT), "worktree", "prune"], check=True)


class Other(NamedTuple):
    """Where the variant `there` runs."""

    place: Place
    what: str
    """For the file: a version of torch, or a commit."""


def _other(options: Options) -> Other | None:
    """The other interpreter or checkout, where one is asked for.

    Raises:
        UserError: it cannot be run there.
    """
    if options.against is not None:
        code = "import torch, tyro, safetensors; print(torch.__version__)"
        version = _output("--against", options.against, [options.against, "-c", code])
        return Other(Place(python=options.against), f"torch {version}")
    if options.against_commit is not None:
        flag, name = "--against-commit", options.against_commit
        git = ["git", "-C", str(ROOT)]
        commit = _output(flag, name, [*git, "rev-parse", "--verify", f"{name}^{{commit}}"])
        worker = f"{commit}:bench/measuring/worker.py"
        _output(flag, f"{name}: has no benchmarks", [*git, "cat-file", "-e", worker])
        folder = Path(tempfile.mkdtemp(prefix="refbench-commit-")) / "checkout"
        _output(flag, name, [*git, "worktree", "add", "--detach", str(folder), commit])
        return Other(Place(root=folder), f"commit {commit}")
    return None


def _output(flag: str, value: str, command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        UserError: it fails; names the flag, its value, and the last line that was said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{flag} {value}: {error}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise UserError(f"{flag} {value}: {last}")
    return done.stdout.strip()


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of results in strict JSON; as a whole, or not at all.

    Raises:
        ValueError: something in it is not a number that JSON has.
    """
    text = json.dumps(content, indent=1, allow_nan=False)
    with atomic_write(path) as file:
        file.write(text.encode() + b"\n")
