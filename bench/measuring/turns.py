"""A round: every case is launched anew, and their blocks take turns."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.axes import Case
from bench.measuring.history import blocks_timed
from bench.measuring.journal import Journal
from bench.measuring.launch import Launch, Lost
from bench.measuring.plan import Mode, Plan


class Started(NamedTuple):
    """A launch that warms up."""

    launch: Launch
    fresh_cache: bool
    """Of compiled code: then its first step is a cold one."""


class Turn(NamedTuple):
    """A launch that is ready to time blocks."""

    case: Case
    launch: Launch
    steps: int
    """Of a block."""


class Round:
    """Launches some cases, lets them take turns, and writes down what comes of it.

    Args:
        journal: what it has already of this round is not measured again.
        plan: how to measure.
        number: of the round, from 0.
        mode: how the launches share memory.
        start: launches a case.
        tell: is called with a line about what happens.
    """

    def __init__(
        self,
        journal: Journal,
        plan: Plan,
        number: int,
        mode: Mode,
        start: Callable[[Case], Started],
        tell: Callable[[str], None],
    ) -> None:
        self._journal, self._plan, self._number, self._mode = journal, plan, number, mode
        self._start, self._tell = start, tell
        self._alive: dict[str, Launch] = {}
        self.was_short = False
        """Whether one was lost for lack of memory beside others, and should come again."""

    def measure(self, cases: Sequence[Case]) -> None:
        """Measure what is left of the round."""
        rng = random.Random(f"{self._plan.seed}/{cases[0].name}/{self._number}")
        try:
            turns = [self._launch(case) for case in rng.sample(cases, len(cases))]
            order = [turn for turn in turns if turn is not None]
            for block in range(self._plan.blocks):
                # A pair of blocks has an order and its reverse, so that a drift adds up to none.
                order = order[::-1] if block % 2 else rng.sample(order, len(order))
                for position, turn in enumerate(order):
                    if blocks_timed(self._journal, turn.case, self._number) <= block:
                        self._time(turn, block, position)
        finally:
            for launch in self._alive.values():
                launch.kill()

    def _launch(self, case: Case) -> Turn | None:
        """Start a case and wait until it is warm; None if it is lost."""
        self._tell(f"{case.name}: launch {self._number + 1} warms up")
        launch, fresh_cache = self._start(case)
        self._alive[case.name] = launch
        said = self._ask(case, launch.ready)
        if said is None:
            return None
        steps = steps_of_block(said, self._plan.block_s)
        self._journal.write(
            "launch",
            case=case.name,
            round=self._number,
            mode=self._mode,
            fresh_cache=fresh_cache,
            steps=steps,
            **said,
        )
        return Turn(case, launch, steps)

    def _time(self, turn: Turn, block: int, position: int) -> None:
        """Let a launch time a block, unless it has been lost."""
        if turn.case.name not in self._alive:
            return
        said = self._ask(turn.case, lambda limit: turn.launch.block(turn.steps, limit))
        if said is not None:
            self._journal.write(
                "block",
                case=turn.case.name,
                round=self._number,
                block=block,
                position=position,
                at=time.time(),
                **said,
            )

    def _ask(self, case: Case, ask: Callable[[float], dict[str, Any]]) -> dict[str, Any] | None:
        """What a launch says, and where memory is short let it park; None if it is lost."""
        try:
            said = ask(self._plan.limit_s)
            if self._mode == "parked":
                self._alive[case.name].park(self._plan.limit_s)
        except Lost as lost:
            del self._alive[case.name]
            self._lose(case, lost)
            return None
        return said

    def _lose(self, case: Case, lost: Lost) -> None:
        """Note a loss, unless memory was short beside others: then it comes again."""
        if lost.status == "oom" and self._alive and self._mode != "alone":
            self.was_short = True
            return
        self._tell(f"{case.name}: {lost.status}: {lost.reason}")
        what = {"case": case.name, "status": lost.status, "reason": lost.reason}
        self._journal.write("lost", round=self._number, **what)
        rounds = [event["round"] for event in self._journal.find("lost", case=case.name)]
        if rounds[0] == 0 or rounds[-2:] == [self._number - 1, self._number]:
            self._journal.write("given_up", **what)  # another launch will not do better


def steps_of_block(ready: dict[str, Any], seconds: float) -> int:
    """Steps that take about so many seconds, and make whole turns over the batches."""
    turn: int = ready["cycle"]
    turns: float = seconds / ready["step_s"] / turn
    return turn * max(1, round(turns))
