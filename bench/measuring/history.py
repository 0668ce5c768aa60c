"""What a journal says of cases so far. Whoever goes on asks here what is left to do."""

from collections.abc import Sequence

from bench.axes import Case
from bench.measuring.journal import Event, Journal
from bench.measuring.plan import Mode
from bench.statistics import Comparison


def launches_of(journal: Journal, names: Sequence[str]) -> Comparison:
    """The rounds so far of a comparison.

    Args:
        journal: that has them.
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


def first_launches(journal: Journal, case: str) -> list[Event]:
    """One launch of each round: a suite that was ended in the midst of one launches it again."""
    newest_first = reversed(list(journal.find("launch", case=case)))
    by_round = {event["round"]: event for event in newest_first}
    return [by_round[number] for number in sorted(by_round)]


def rounds_begun(journal: Journal, cases: Sequence[Case]) -> int:
    """How many rounds have left something."""
    names = {case.name for case in cases}
    began = [
        event["round"]
        for kind in ("block", "lost")
        for event in journal.find(kind)
        if event["case"] in names
    ]
    return max(began, default=-1) + 1


def blocks_timed(journal: Journal, case: Case, number: int) -> int:
    """Blocks that a case has in a round."""
    return sum(1 for _ in journal.find("block", case=case.name, round=number))


def is_given_up(journal: Journal, case: Case) -> bool:
    """Whether a case is launched no more."""
    return any(journal.find("given_up", case=case.name))


def unfinished(journal: Journal, cases: Sequence[Case], number: int, blocks: int) -> list[Case]:
    """Those of which a round has neither all blocks nor a loss."""
    return [
        case
        for case in cases
        if not is_given_up(journal, case)
        and not any(journal.find("lost", case=case.name, round=number))
        and blocks_timed(journal, case, number) < blocks
    ]


def mode_of(journal: Journal, comparison: str) -> Mode:
    """How the launches of a comparison share memory, by what was found so far."""
    modes: list[Mode] = [event["mode"] for event in journal.find("mode", comparison=comparison)]
    return modes[-1] if modes else "together"
