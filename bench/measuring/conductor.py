"""Measures comparisons: batch sizes, first steps in float64, then rounds until enough is known."""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from bench import statistics
from bench.axes import CONTROL, Case
from bench.measuring.history import is_given_up, launches_of, mode_of, rounds_begun, unfinished
from bench.measuring.journal import Journal
from bench.measuring.launch import Launch, Lost, Place
from bench.measuring.plan import MODES, Members, Plan
from bench.measuring.spec import Spec
from bench.measuring.turns import Round, Started
from bench.switches import Facts
from shared.errors import UserError

LARGEST_BATCH = 8192
"""Where the search for a batch size ends."""
SLOWEST_STEP = 5.0
"""Seconds of a step at which it ends, too."""
LARGE_DEVICE = 16e9
"""Bytes of memory from which an accelerator gets the larger batch of the table."""


class Conductor:
    """Measures comparisons, and writes everything into a journal.

    Args:
        journal: what it has already is not measured again.
        plan: how.
        rows: variants in the whole suite, which share the error rate.
        places: of variants that run elsewhere, by their name; others run here.
        tell: is called with a line about what happens.
        maker: builds what is measured; see `Spec`.
        memory_limits: bytes of address space, by variant.

    Raises:
        UserError: the journal is of another plan or another machine.
        Lost: the machine could not be described.
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
        self._launches = 0
        self._exact: dict[str, dict[str, Any] | None] = {}
        described = self._open_suite()
        self._facts = Facts(**described["facts"])
        self._threads: int = plan.threads or described["machine"]["threads"]["intra_op"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open_suite(self) -> dict[str, Any]:
        """Describe the machine, and check that it is the one of the journal."""
        self._tell("what this machine is, and how fast it multiplies matrices")
        spec = Spec("describe", self.plan.device, self.plan.threads)
        launch = self._start(spec, Place(), "describe")
        try:
            described = launch.wait("described", self.plan.limit_s)
        finally:
            launch.kill()
        now = {"plan": self.plan.as_dict(), "machine": described["machine"]}
        for begun in self.journal.find("suite"):
            for name, value in now.items():
                if begun[name] != value:
                    raise UserError(
                        f"{self.journal.path}: is of another {name}, so it cannot be continued: "
                        + "; ".join(differences(begun[name], value))
                    )
            return described
        self.journal.write("suite", plan=now["plan"], began=time.time(), **described)
        return described

    def ask(self, comparisons: Sequence[Members]) -> None:
        """Note what will be measured, so that a file has it whatever happens."""
        for members in comparisons:
            for case in members.cases:
                if not any(self.journal.find("case", case=case.name)):
                    self._write_case(case, None)

    def measure(self, members: Members) -> None:
        """Measure one comparison, as far as the journal does not have it."""
        if any(self.journal.find("ended", comparison=members.name)):
            return
        batch_size = self._batch_size(members)
        runnable = []
        for case in members.cases:
            self._write_case(case, batch_size)
            reason = case.why_not(self._facts, batch_size)
            if reason is None:
                runnable.append(case)
            else:
                self._skip(case, reason)
        if members.cases[0] not in runnable or len(runnable) <= 2 < len(members.cases):
            for case in runnable:
                self._skip(case, "nothing can run here that it could be compared with")
            runnable = []
        stop = self._measure_rounds(members.name, runnable, batch_size) if runnable else "skipped"
        self.journal.write("ended", comparison=members.name, stop=stop)

    def _write_case(self, case: Case, batch_size: int | None) -> None:
        """Note a case, and again when its batch size is known."""
        if not any(self.journal.find("case", case=case.name, batch_size=batch_size)):
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

    def _skip(self, case: Case, reason: str) -> None:
        if not any(self.journal.find("skipped", case=case.name)):
            self.journal.write("skipped", case=case.name, reason=reason)

    def _measure_rounds(self, name: str, cases: Sequence[Case], batch_size: int) -> str:
        """Measure rounds until enough is known; why it ended."""
        began = time.monotonic()
        specs = {case.name: self._spec(case, batch_size) for case in cases}
        while True:
            comparison = launches_of(self.journal, [case.name for case in cases])
            reached = statistics.progress(
                comparison, self.rows, self.plan.rules, most=self.plan.launches
            )
            number = rounds_begun(self.journal, cases)
            self._tell(_progress_line(name, reached, number, self.plan))
            last = number - 1
            if number and unfinished(self.journal, cases, last, self.plan.blocks):
                number = last
            elif reached.stop is not None:
                return reached.stop
            elif time.monotonic() - began > self.plan.budget_s:
                return "budget"
            left = [case for case in cases if not is_given_up(self.journal, case)]
            if not left:
                return "failed"
            self._measure_round(name, number, left, specs)

    def _measure_round(
        self, name: str, number: int, cases: Sequence[Case], specs: dict[str, Spec]
    ) -> None:
        """Launch each case once; again, sharing less, where memory is short."""
        while missing := unfinished(self.journal, cases, number, self.plan.blocks):
            mode = mode_of(self.journal, name)
            was_short = False
            for group in [[case] for case in missing] if mode == "alone" else [missing]:
                turns = Round(
                    self.journal,
                    self.plan,
                    number,
                    mode,
                    lambda case: self._start_case(case, specs[case.name]),
                    self._tell,
                )
                turns.measure(group)
                was_short = was_short or turns.was_short
            if not was_short:
                return
            self.journal.write("mode", comparison=name, mode=MODES[MODES.index(mode) + 1])

    def _spec(self, case: Case, batch_size: int) -> Spec:
        """What a launch of a case is to do."""
        shared_by = 1
        if case.switches.parallel == "ddp" and self._facts.device == "cpu":
            shared_by = case.switches.devices
        spec = Spec(
            "measure",
            self.plan.device,
            max(1, self._threads // shared_by),
            case.workload,
            case.switches,
            batch_size,
            maker=self._maker,
            memory_limit=self._memory_limits.get(case.variant),
        )
        return replace(spec, numerics=self._exact_steps(case, spec))

    def _exact_steps(self, case: Case, spec: Spec) -> str | None:
        """File of the first steps in float64: one for all cases that see the same batches."""
        same = case.switches.computing_the_same()
        key = f"{case.workload.name}-{spec.batch_size}-" + "-".join(map(str, asdict(same).values()))
        path = self._folder / f"{key}.safetensors"
        if key not in self._exact:
            self._tell(f"{case.name}: first steps in float64")
            # LSTMs on the CPU and packed: made of products that can be counted, without padding.
            exact = replace(
                spec,
                kind="float64",
                device="cpu" if case.workload.recipe == "sequences" else self.plan.device,
                threads=self._threads,
                switches=replace(same, varlen="packed"),
                numerics=str(path),
                memory_limit=None,
            )
            launch = self._start(exact, Place(), key)
            try:
                self._exact[key] = launch.wait("exact", self.plan.limit_s)
            except Lost as lost:
                self._tell(f"{case.name}: no first steps in float64: {lost.reason}")
                self._exact[key] = None
            finally:
                launch.kill()
        said = self._exact[key]
        if said is None:
            return None
        if not any(self.journal.find("exact", case=case.name)):
            self.journal.write("exact", case=case.name, **said)
        return str(path)

    def _start_case(self, case: Case, spec: Spec) -> Started:
        cache = self._folder / "caches" / case.name
        is_fresh = not cache.exists()
        place = self._places.get(case.variant, Place())
        return Started(self._start(spec, place, case.name, cache), is_fresh)

    def _start(self, spec: Spec, place: Place, name: str, cache: Path | None = None) -> Launch:
        self._launches += 1
        folder = self._folder / f"{self._launches:04d}-{name.replace('/', '-')}"
        return Launch(spec, place, folder, cache or self._folder / "caches" / "common")

    def _batch_size(self, members: Members) -> int:
        """One size for a whole comparison."""
        if isinstance(self.plan.batch_size, int):
            return self.plan.batch_size
        workload = members.cases[0].workload
        is_large = self._facts.device != "cpu" and self._facts.memory_bytes >= LARGE_DEVICE
        of_table = workload.batch_large if is_large else workload.batch_small
        if self.plan.batch_size == "table":
            return of_table
        for event in self.journal.find("batch_size", comparison=members.name):
            return int(event["size"])
        found = [
            (*self._largest_batch(case), case.name)
            for case in members.cases
            if case.variant != CONTROL and case.why_not(self._facts, LARGEST_BATCH) is None
        ]
        size, reason, name = min(found, default=(of_table, "nothing can run here", members.name))
        because = f"{name}: {reason}"
        self.journal.write(
            "batch_size", comparison=members.name, size=max(1, size), because=because
        )
        return max(1, size)

    def _largest_batch(self, case: Case) -> tuple[int, str]:
        """The largest power of two that fits, and why no larger one; 0 if none does."""
        size, fits = 1 << (case.switches.devices - 1).bit_length(), 0
        while size <= LARGEST_BATCH:
            self._tell(f"{case.name}: does a batch of {size} fit?")
            spec = Spec(
                "measure", self.plan.device, self._threads, case.workload, case.switches, size,
                maker=self._maker, memory_limit=self._memory_limits.get(case.variant),
            )  # fmt: skip
            place = self._places.get(case.variant, Place())
            launch = self._start(spec, place, case.name, self._folder / "caches/batch_size")
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


def _progress_line(name: str, reached: statistics.Progress, rounds: int, plan: Plan) -> str:
    line = f"{name}: {rounds} of at most {plan.launches} launches"
    if reached.half_width is not None:
        line += f", intervals ±{math.expm1(reached.half_width):.1%}"
    if reached.needed is not None:
        line += f", {reached.needed} would do"
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
