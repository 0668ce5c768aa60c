"""Runs launches of variants in rounds, their blocks in turn, and keeps what comes of it.

In each round every variant, the baseline and the control are launched anew, and take turns at short
blocks, so that whatever the machine does meanwhile falls on all of them alike.
"""

import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from bench import statistics
from bench.axes import CONTROL, Case
from bench.measuring.journal import Journal
from bench.measuring.launch import Launch, Lost, Place
from bench.measuring.spec import Spec
from bench.statistics import Comparison, Rules
from bench.switches import Facts, Switches
from shared.errors import UserError

Mode = Literal["together", "parked", "alone"]
"""How launches of a round share the memory: all at once; giving back what they have cached between
blocks; or one after another, not interleaved."""

MODES: tuple[Mode, ...] = ("together", "parked", "alone")

LARGEST_BATCH = 8192
"""Where the search for a batch size ends."""
SLOWEST_STEP = 5.0
"""Seconds of a step at which it ends, too."""


@dataclass(frozen=True)
class Plan:
    """How to measure. It is the head of the journal, and the same when a suite is resumed."""

    device: str = "auto"
    threads: int = 1
    """Of each process; shared by the processes of a group on a CPU."""
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

    @property
    def rules(self) -> Rules:
        """What verdicts promise."""
        return Rules(margin=self.margin)


class Members(NamedTuple):
    """What is compared with each other: one axis on one workload."""

    name: str
    """axis/workload."""
    cases: Sequence[Case]
    """Baseline first, then the control, then variants."""


class Conductor:
    """Measures comparisons, and writes everything into a journal.

    Args:
        journal: what it has already is not measured again.
        plan: how.
        rows: variants in the whole suite, which share the error rate.
        places: of variants that run elsewhere, by their name; others run here.
        tell: is called with a line about what happens.
        maker: builds what is measured; see `Spec`.
    """

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        rows: int,
        places: dict[str, Place] | None = None,
        tell: Callable[[str], None] = lambda line: None,
        maker: str = Spec.maker,
        memory_limits: dict[str, int] | None = None,
    ) -> None:
        self.journal, self.plan, self.rows = journal, plan, max(1, rows)
        self._places, self._tell, self._maker = places or {}, tell, maker
        self._memory_limits = memory_limits or {}
        self._folder = Path(tempfile.mkdtemp(prefix="refbench-"))
        self._number = 0
        self._facts: Facts | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def open_suite(self) -> Facts:
        """Describe the machine, or check that it is the one of the journal.

        Raises:
            UserError: the journal is of another plan or another machine.
            Lost: the machine could not be described.
        """
        plan = asdict(self.plan) | {
            "budget_s": None if math.isinf(self.plan.budget_s) else self.plan.budget_s
        }
        described = self._describe()
        for begun in self.journal.find("suite"):
            for name, now in (("plan", plan), ("machine", described["machine"])):
                if begun[name] != now:
                    raise UserError(
                        f"{self.journal.path}: is of another {name}, so it cannot be continued: "
                        + "; ".join(differences(begun[name], now))
                    )
            break
        else:
            self.journal.write("suite", plan=plan, began=time.time(), **described)
        self._facts = Facts(**described["facts"])
        return self._facts

    def _describe(self) -> dict[str, Any]:
        spec = Spec("describe", self.plan.device, self.plan.threads)
        launch = self._start(spec, Place(), "describe")
        try:
            found = launch.wait("described", self.plan.limit_s)
        finally:
            launch.kill()
        del found["event"]
        return found

    def measure(self, members: Members, facts: Facts) -> None:
        """Measure one comparison, as far as the journal does not have it.

        Args:
            members: the comparison.
            facts: of the device.
        """
        if any(self.journal.find("ended", comparison=members.name)):
            return
        batch_size = self._choose_batch_size(members, facts)
        runnable = []
        for case in members.cases:
            self._write_case(case, batch_size)
            reason = case.why_not(facts, batch_size)
            if reason is None:
                runnable.append(case)
            elif not any(self.journal.find("skipped", case=case.name)):
                self.journal.write("skipped", case=case.name, reason=reason)
        if members.cases[0] not in runnable or len(runnable) <= 2 < len(members.cases):
            for case in runnable:
                if not any(self.journal.find("skipped", case=case.name)):
                    reason = "nothing can run here that it could be compared with"
                    self.journal.write("skipped", case=case.name, reason=reason)
            runnable = []
        stop = self._measure_rounds(members.name, runnable, batch_size) if runnable else "skipped"
        self.journal.write("ended", comparison=members.name, stop=stop)

    def ask(self, comparisons: Sequence[Members]) -> None:
        """Note what will be measured, so that a file has it whatever happens."""
        for members in comparisons:
            for case in members.cases:
                if not any(self.journal.find("case", case=case.name)):
                    self._write_case(case, None)

    def _write_case(self, case: Case, batch_size: int | None) -> None:
        """Note a case, once its batch size is known again."""
        if any(self.journal.find("case", case=case.name, batch_size=batch_size)):
            return
        self.journal.write(
            "case",
            case=case.name,
            axis=case.axis,
            workload=case.workload.name,
            about=case.workload.about,
            variant=case.variant,
            role=case.role,
            changes=case.switches.changed(),
            batch_size=batch_size,
        )

    def _measure_rounds(self, name: str, cases: Sequence[Case], batch_size: int) -> str:
        """Measure rounds until enough is known; why it ended."""
        began = time.monotonic()
        exact: dict[str, Path | None] = {}
        for case in cases:
            exact[case.name] = self._exact_steps(case, batch_size)
        while True:
            comparison = launches_of(self.journal, [case.name for case in cases])
            rounds = self._rounds(cases)
            reached = statistics.progress(
                comparison, self.rows, self.plan.rules, most=self.plan.launches
            )
            self._tell(_progress_line(name, reached, rounds, self.plan))
            unfinished = self._missing(cases, rounds - 1) if rounds else []
            if not unfinished:
                if reached.stop is not None:
                    return reached.stop
                if time.monotonic() - began > self.plan.budget_s:
                    return "budget"
            left = [case for case in cases if not self._given_up(case)]
            if not left:
                return "failed"
            number = rounds - 1 if unfinished else rounds
            self._round(name, number, left, batch_size, exact)

    def _rounds(self, cases: Sequence[Case]) -> int:
        """How many have begun."""
        names = {case.name for case in cases}
        began = [
            event["round"]
            for kind in ("block", "lost")
            for event in self.journal.find(kind)
            if event["case"] in names
        ]
        return max(began, default=-1) + 1

    def _missing(self, cases: Sequence[Case], number: int) -> list[Case]:
        """Those of which a round has neither all blocks nor a loss."""
        return [
            case
            for case in cases
            if not self._given_up(case)
            and not any(self.journal.find("lost", case=case.name, round=number))
            and self._blocks(case, number) < self.plan.blocks
        ]

    def _blocks(self, case: Case, number: int) -> int:
        return sum(1 for _ in self.journal.find("block", case=case.name, round=number))

    def _given_up(self, case: Case) -> bool:
        """Whether it is launched no more."""
        return any(self.journal.find("given_up", case=case.name))

    def _mode(self, name: str) -> Mode:
        """How the launches of a comparison share memory, by what was found so far."""
        modes: list[Mode] = [event["mode"] for event in self.journal.find("mode", comparison=name)]
        return modes[-1] if modes else "together"

    def _round(
        self,
        name: str,
        number: int,
        cases: Sequence[Case],
        batch_size: int,
        exact: dict[str, Path | None],
    ) -> None:
        """Launch each case once, and let them take turns; again with less shared if memory ends."""
        missing = self._missing(cases, number)
        while missing:
            mode = self._mode(name)
            groups = [[case] for case in missing] if mode == "alone" else [missing]
            short = False
            for group in groups:
                short = self._group(group, number, batch_size, exact, mode) or short
            if not short or mode == "alone":
                return
            mode = MODES[MODES.index(mode) + 1]
            self.journal.write("mode", comparison=name, mode=mode)
            missing = self._missing(missing, number)

    def _group(
        self,
        cases: Sequence[Case],
        number: int,
        batch_size: int,
        exact: dict[str, Path | None],
        mode: Mode,
    ) -> bool:
        """Launch some cases together. Whether one of them found too little memory beside others."""
        launches: dict[str, Launch] = {}
        steps: dict[str, int] = {}
        short = False
        rng = random.Random(f"{self.plan.seed}/{cases[0].name}/{number}")
        try:
            for case in rng.sample(cases, len(cases)):
                spec = self._spec("measure", case, batch_size, exact[case.name])
                cache = self._folder / "caches" / case.name
                fresh = not cache.exists()
                self._tell(f"{case.name}: launch {number + 1} warms up")
                launch = self._start(spec, self._place(case), case.name, cache)
                launches[case.name] = launch
                try:
                    said = launch.ready(self.plan.limit_s)
                    if mode == "parked":
                        launch.park(self.plan.limit_s)
                except Lost as lost:
                    del launches[case.name]
                    short = self._lose(case, number, lost, mode, len(launches)) or short
                    continue
                steps[case.name] = steps_of_block(said, self.plan.block_s)
                self.journal.write(
                    "launch",
                    case=case.name,
                    round=number,
                    mode=mode,
                    fresh_cache=fresh,
                    steps=steps[case.name],
                    **{k: v for k, v in said.items() if k != "event"},
                )
            order = list(launches)
            for block in range(self.plan.blocks):
                # A pair of blocks has each order and its reverse, so that a drift adds up to none.
                order = order[::-1] if block % 2 else rng.sample(order, len(order))
                for position, case_name in enumerate(order):
                    case = next(case for case in cases if case.name == case_name)
                    if case_name not in launches or self._blocks(case, number) > block:
                        continue
                    launch = launches[case_name]
                    try:
                        said = launch.block(steps[case_name], self.plan.limit_s)
                        if mode == "parked":
                            launch.park(self.plan.limit_s)
                    except Lost as lost:
                        del launches[case_name]
                        short = self._lose(case, number, lost, mode, len(launches)) or short
                        continue
                    del said["event"]
                    self.journal.write(
                        "block",
                        case=case_name,
                        round=number,
                        block=block,
                        position=position,
                        at=time.time(),
                        **said,
                    )
        finally:
            for launch in launches.values():
                launch.kill()
        return short

    def _lose(self, case: Case, number: int, lost: Lost, mode: Mode, beside: int) -> bool:
        """Note a loss; or say that it comes again, where memory was short beside others."""
        if lost.status == "oom" and beside and mode != "alone":
            return True
        self._tell(f"{case.name}: {lost.status}: {lost.reason}")
        self.journal.write(
            "lost", case=case.name, round=number, status=lost.status, reason=lost.reason
        )
        rounds = [event["round"] for event in self.journal.find("lost", case=case.name)]
        if rounds[0] == 0 or rounds[-2:] == [number - 1, number]:  # it will not do better
            self.journal.write("given_up", case=case.name, status=lost.status, reason=lost.reason)
        return False

    def _exact_steps(self, case: Case, batch_size: int) -> Path | None:
        """File of the first steps in float64: the same for all that see the same batches."""
        switches = case.switches.computing_the_same()
        key = f"{case.workload.name}-{batch_size}-{hash(switches) & 0xFFFFFFFF:08x}"
        path = self._folder / f"{key}.safetensors"
        if path.exists():
            return path
        # On the CPU, where a packed LSTM is made of products that can be counted.
        device = "cpu" if case.workload.recipe == "sequences" else self.plan.device
        spec = Spec(
            "float64",
            device,
            self.plan.threads,
            case.workload,
            Switches(**{**asdict(switches), "varlen": "packed"}),
            batch_size,
            str(path),
            self._maker,
        )
        self._tell(f"{case.workload.name}: first steps in float64")
        launch = self._start(spec, Place(), key)
        try:
            said = launch.wait("exact", self.plan.limit_s)
        except Lost as lost:
            self.journal.write("inexact", case=case.name, status=lost.status, reason=lost.reason)
            return None
        finally:
            launch.kill()
        if not any(self.journal.find("exact", workload=case.workload.name, batch_size=batch_size)):
            self.journal.write(
                "exact",
                workload=case.workload.name,
                batch_size=batch_size,
                losses=said["losses"],
                flop_per_step=said["flop_per_step"],
            )
        return path

    def _spec(self, kind: Literal["measure"], case: Case, size: int, exact: Path | None) -> Spec:
        on_cpu = self._facts is not None and self._facts.device == "cpu"
        shared_by = case.switches.devices if case.switches.parallel == "ddp" and on_cpu else 1
        return Spec(
            kind,
            self.plan.device,
            max(1, self.plan.threads // shared_by),
            case.workload,
            case.switches,
            size,
            None if exact is None else str(exact),
            self._maker,
            self._memory_limits.get(case.variant),
        )

    def _place(self, case: Case) -> Place:
        return self._places.get(case.variant, Place())

    def _start(self, spec: Spec, place: Place, name: str, cache: Path | None = None) -> Launch:
        self._number += 1
        folder = self._folder / f"{self._number:04d}-{name.replace('/', '-')}"
        return Launch(spec, place, folder, cache or self._folder / "caches" / "common")

    def _choose_batch_size(self, members: Members, facts: Facts) -> int:
        """One size for a whole comparison."""
        workload = members.cases[0].workload
        is_large = facts.device != "cpu" and facts.memory_bytes >= 16e9
        small = workload.batch_large if is_large else workload.batch_small
        if self.plan.batch_size == "table":
            return small
        if isinstance(self.plan.batch_size, int):
            return self.plan.batch_size
        for event in self.journal.find("batch_size", comparison=members.name):
            return int(event["size"])
        sizes: list[int] = []
        why = None
        for case in members.cases:
            if case.variant != CONTROL and case.why_not(facts, LARGEST_BATCH) is None:
                size, why_here = self._largest_batch(case)
                if not sizes or size < min(sizes):
                    why = f"{case.name}: {why_here}"
                sizes.append(size)
        chosen = max(1, min(sizes, default=small))
        self.journal.write("batch_size", comparison=members.name, size=chosen, because=why)
        return chosen

    def _largest_batch(self, case: Case) -> tuple[int, str]:
        """The largest power of two that fits, and why no larger one; 0 if none does."""
        size = max(1, case.switches.devices)
        fits = 0
        while size <= LARGEST_BATCH:
            self._tell(f"{case.name}: does a batch of {size} fit?")
            spec = self._spec("measure", case, size, None)
            launch = self._start(spec, self._place(case), case.name)
            try:
                step_s = launch.ready(self.plan.limit_s)["step_s"]
            except Lost as lost:
                return fits, f"{size}: {lost.status}: {lost.reason}"
            finally:
                launch.kill()
            fits = size
            if step_s > SLOWEST_STEP:
                return fits, f"a step of {size} takes {step_s:.1f} s"
            size *= 2
        return fits, f"{LARGEST_BATCH} is the largest that is tried"


def steps_of_block(ready: dict[str, Any], seconds: float) -> int:
    """Steps that take about so many seconds, and make whole turns over the batches."""
    turn: int = ready["cycle"]
    turns: float = seconds / ready["step_s"] / turn
    return turn * max(1, round(turns))


def launches_of(journal: Journal, names: Sequence[str]) -> Comparison:
    """The rounds so far of a comparison.

    Args:
        names: of its cases: the baseline, the control, and variants.
    """
    series: dict[str, list[list[float]]] = {name: [] for name in names}
    for event in journal.find("block"):
        if event["case"] in series:
            launches = series[event["case"]]
            launches += [[] for _ in range(event["round"] + 1 - len(launches))]
            launches[event["round"]].append(event["step_s"])
    rounds = max(map(len, series.values()), default=0)
    for launches in series.values():
        launches += [[] for _ in range(rounds - len(launches))]
    baseline, control, *variants = names
    return Comparison(series[baseline], series[control], {name: series[name] for name in variants})


def _progress_line(name: str, reached: statistics.Progress, rounds: int, plan: Plan) -> str:
    line = f"{name}: round {rounds} of at most {plan.launches}"
    if reached.half_width is not None:
        line += f", intervals ±{math.expm1(reached.half_width):.1%}"
    if reached.needed is not None:
        line += f", {reached.needed} launches would do"
    return line


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Where two nested values differ, as text."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted(old.keys() | new.keys()):
            place = f"{name}.{key}" if name else str(key)
            found += differences(old.get(key), new.get(key), place)
        return found
    return [] if old == new else [f"{name} was {old} and is {new}"]
