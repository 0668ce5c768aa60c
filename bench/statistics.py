"""What the launches of a file say: ratios with intervals, verdicts, and when to stop measuring.

The unit of replication is the launch, a process. Identical processes differ for as long as they
live, so the blocks of a launch are one observation of how fast such a process is, and not many. In
round r one launch of the baseline, of the control and of each variant run interleaved; ratios are
taken within rounds, so that a drift of the machine falls on both sides alike and cancels.

Everything is computed on the logarithm of seconds, where a ratio is a difference and 2 % faster is
as far from equal as 2 % slower. Nothing here knows torch, processes or files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Literal, NamedTuple

from scipy.special import stdtrit

Launches = Sequence[Sequence[float]]
"""Seconds a step, for each block of each launch, by round; a launch that was lost has no blocks."""

Verdict = Literal["faster", "slower", "same", "ambiguous", "withheld"]
"""What is said of a variant; `withheld` where the control has shown that nothing can be said."""

ControlVerdict = Literal["same", "different", "ambiguous"]
"""What is said of the control, which is the baseline; `different` is a fault of the machine."""

Stop = Literal["narrow", "limit"]
"""Why measuring ends: intervals are as narrow as asked, or all the launches allowed are spent."""

DEFAULT_LAUNCHES = 16
"""Finds 5 % in more than 95 % of files of 8 variants where launches spread by 1.5 %, at a margin
of 2 %; seen by simulation."""

FEWEST_LAUNCHES = 6
"""Before these, no interval is narrow enough to stop: with fewer, the spread itself is a guess, and
stopping where it happens to look small would make intervals too short."""


@dataclass(frozen=True)
class Rules:
    """What verdicts promise.

    Raises:
        ValueError: a number is out of range.
    """

    margin: float = 0.02
    """Differences up to this count as none: 0.02 is a ratio between 1 / 1.02 and 1.02."""
    error_rate: float = 0.05
    """Share of files with one wrong verdict or more, at most, wherever the truth lies; it comes
    near this where true ratios lie on the margin."""
    equality_rate: float = 0.01
    """Share of files with `faster` or `slower` for one thing or more that is equal, at most."""
    control_rate: float = 0.01
    """Share of files from sound machines in which a control withholds verdicts, at most; and share
    of those without drift that are flagged for it."""

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise ValueError(f"a margin of {self.margin}: it lies between 0 and 1")
        for rate in (self.error_rate, self.equality_rate, self.control_rate):
            if not 0 < rate < 0.5:
                raise ValueError(f"an error rate of {rate}: it lies between 0 and 0.5")

    @property
    def bound(self) -> float:
        """The margin as a difference of logarithms."""
        return math.log1p(self.margin)


DEFAULT_RULES = Rules()


# From blocks to launches


def level(blocks: Sequence[float]) -> float:
    """Log seconds of a launch: the median of its blocks.

    Up to half of them may have been disturbed. On sound blocks the median of 8 is as uncertain as
    the mean of 6, which costs little, since what differs between launches is there as well; one
    disturbed block in thirty makes the mean three times as uncertain as the median.

    Args:
        blocks: seconds a step, each positive; one or more.
    """
    return median(map(math.log, blocks))


def levels(name: str, launches: Launches) -> list[float]:
    """`level` of each launch; NaN for one that was lost.

    Raises:
        ValueError: a block is not a positive, finite number; names the launch, counted from 1.
    """
    for number, blocks in enumerate(launches, 1):
        for seconds in blocks:
            if not 0 < seconds < math.inf:
                raise ValueError(f"{name}, launch {number}: a block of {seconds} seconds a step")
    return [level(blocks) if blocks else math.nan for blocks in launches]


def present(values: Sequence[float]) -> list[float]:
    """Those that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation of two values or more, without the fractions of `stdev`."""
    center = fmean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1))


def spread(launch_levels: Sequence[float]) -> float | None:
    """Standard deviation between launches on log time, drift included; None below two launches."""
    seen = present(launch_levels)
    return deviation(seen) if len(seen) > 1 else None


# From launches to ratios


class Estimate(NamedTuple):
    """Log of a ratio of throughput, and how well it is known."""

    log_ratio: float | None
    """None where no launch is left."""
    error: float | None
    """Standard error over launches; None below two."""
    df: float
    """Degrees of freedom of the error."""

    @property
    def ratio(self) -> float | None:
        """Throughput of the variant over that of the baseline: above 1 is faster."""
        return None if self.log_ratio is None else math.exp(self.log_ratio)

    def log_interval(self, tail: float) -> tuple[float, float] | None:
        """Student's interval that misses the truth with probability `tail` on each side."""
        if self.log_ratio is None or self.error is None:
            return None
        half = self.error * quantile(self.df, tail)
        return self.log_ratio - half, self.log_ratio + half

    def interval(self, tail: float) -> tuple[float, float] | None:
        """The same as a ratio; None where it is too wide for numbers."""
        logs = self.log_interval(tail)
        if logs is None or max(map(abs, logs)) > 700:
            return None
        return math.exp(logs[0]), math.exp(logs[1])


NOTHING = Estimate(None, None, 0)


def quantile(df: float, tail: float) -> float:
    """The value that Student's t exceeds with probability `tail`."""
    return -float(stdtrit(df, tail))


def paired(variant: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Ratio from differences within rounds, of the rounds that both have.

    Args:
        variant: level of its launch in each round.
        baseline: the same of what it is compared with.
    """
    differences = present([b - v for v, b in zip(variant, baseline, strict=True)])
    if not differences:
        return NOTHING
    if len(differences) == 1:
        return Estimate(differences[0], None, 0)
    n = len(differences)
    return Estimate(fmean(differences), deviation(differences) / math.sqrt(n), n - 1)


def unpaired(new: Sequence[float], old: Sequence[float]) -> Estimate:
    """Ratio between launches that share no rounds, with Welch's degrees of freedom.

    Args:
        new: levels of the launches whose throughput is on top.
        old: levels of the others.
    """
    sides = [present(new), present(old)]
    if not all(sides):
        return NOTHING
    log_ratio = fmean(sides[1]) - fmean(sides[0])
    if min(map(len, sides)) == 1:
        return Estimate(log_ratio, None, 0)
    parts = [deviation(side) ** 2 / len(side) for side in sides]
    variance = sum(parts)
    if variance == 0:
        return Estimate(log_ratio, 0.0, min(map(len, sides)) - 1)
    shares = [part / variance for part in parts]
    df = 1 / sum(share**2 / (len(side) - 1) for share, side in zip(shares, sides, strict=True))
    return Estimate(log_ratio, math.sqrt(variance), df)


# From ratios to verdicts


def read(interval: tuple[float, float] | None, inner: float, outer: float) -> Verdict:
    """What a log interval says: within ±inner, wholly beyond ±outer on one side, or neither."""
    if interval is None:
        return "ambiguous"
    low, high = interval
    if low > outer:
        return "faster"
    if high < -outer:
        return "slower"
    if -inner < low and high < inner:
        return "same"
    return "ambiguous"


def excludes_equal(interval: tuple[float, float] | None) -> bool:
    """Whether a log interval leaves no room for no difference at all."""
    return interval is not None and (interval[0] > 0 or interval[1] < 0)


class Decision(NamedTuple):
    """A verdict, and the tail of the interval that shows it."""

    verdict: Verdict
    tail: float


def decide(
    estimates: Sequence[Estimate], rules: Rules, outer: Sequence[float] | None = None
) -> list[Decision]:
    """Verdicts on a whole file, of which one or more are wrong at no more than the error rate.

    Holm's step-down over all one-sided tests, those for a difference and those for equivalence,
    with Shaffer's counting of how many of their hypotheses can be true together. A row within the
    margin can be misread in two ways, as faster or as slower; a row beyond it in one way, by an
    interval that ends before it. So the rate is first shared by two tails a row. Each row found
    faster or slower then leaves one tail less to go wrong; the others get its share, until nothing
    new is found. A second family, with the equality rate, asks for each row that looks different
    whether it is different from equal at all; a row found there leaves two tails less. No step asks
    for independence, so rows may share a baseline.

    The interval of each row with the tail returned for it agrees with its verdict.

    Args:
        estimates: one for each row that was asked for, those without an interval too.
        rules: margin and rates.
        outer: where a difference begins for each row, in logs, if that is beyond the margin.
    """
    inner = rules.bound
    beyond = [inner] * len(estimates) if outer is None else [max(inner, o) for o in outer]
    found = 0
    while True:
        # the last row may be found too, and then shares a tail with nobody
        tail = rules.error_rate / max(1, 2 * len(estimates) - found)
        strict = rules.equality_rate / max(2, 2 * (len(estimates) - found))
        decisions = [
            decide_one(estimate, (inner, bound), tail, min(tail, strict))
            for estimate, bound in zip(estimates, beyond, strict=True)
        ]
        differing = sum(decision.verdict in ("faster", "slower") for decision in decisions)
        if differing == found:
            return decisions
        found = differing


def decide_one(
    estimate: Estimate, bounds: tuple[float, float], tail: float, strict: float
) -> Decision:
    """The verdict of one row, at the tails of this step."""
    verdict = read(estimate.log_interval(tail), *bounds)
    if verdict in ("faster", "slower") and not excludes_equal(estimate.log_interval(strict)):
        return Decision("ambiguous", strict)
    return Decision(verdict, tail)


def read_control(estimate: Estimate, tail: float, bound: float) -> ControlVerdict:
    """Whether the baseline was as fast as itself.

    `different` needs an interval that excludes equality and is not within the margin. One that is
    merely wide is ambiguous and withholds nothing: it says that little is known, which the
    intervals of the variants say too, and a difference that is plain in spite of it is plain.
    """
    logs = estimate.log_interval(tail)
    if read(logs, bound, bound) == "same":
        return "same"
    return "different" if excludes_equal(logs) else "ambiguous"


# Drift


class Drift(NamedTuple):
    """How much slower the machine became, as a share: 0.15 is 15 % more time a step."""

    over_rounds: float | None
    """From the first round to the last; None below three rounds."""
    within_launches: float | None
    """From the first block of a launch to its last, on average; None below two such launches."""
    flagged: bool
    """One of them is beyond the margin, and beyond chance."""


def drift_over_rounds(members: Sequence[Sequence[float]]) -> Estimate:
    """Change of log time from the first round to the last: one slope, each member its own level.

    Args:
        members: levels by round, of baseline, control and each variant.
    """
    rounds = max(map(len, members), default=0)
    pairs: list[tuple[float, float]] = []  # round and level, each from the mean of its member
    centred = 0
    for member in members:
        seen = [(r, value) for r, value in enumerate(member) if not math.isnan(value)]
        if seen:
            x, y = (fmean(column) for column in zip(*seen, strict=True))
            pairs += [(r - x, value - y) for r, value in seen]
            centred += 1
    squares = sum(x * x for x, _ in pairs)
    df = len(pairs) - centred - 1
    if df < 1 or squares == 0 or rounds < 3:
        return NOTHING
    slope = sum(x * y for x, y in pairs) / squares
    residual = sum((y - slope * x) ** 2 for x, y in pairs)
    return Estimate(slope * (rounds - 1), math.sqrt(residual / df / squares) * (rounds - 1), df)


def drift_within_launches(launches: Sequence[Sequence[float]]) -> Estimate:
    """Change of log time from the start of a launch to its end, with launches as replicates.

    Twice the difference between its two halves, which is the whole of a steady change.
    """
    changes = []
    for blocks in launches:
        half = len(blocks) // 2
        if half:
            changes.append(2 * (level(blocks[-half:]) - level(blocks[:half])))
    return paired([0.0] * len(changes), changes) if len(changes) > 1 else NOTHING


# A file


@dataclass(frozen=True)
class Comparison:
    """One axis on one workload: launches by round, in the same rounds for all.

    Raises:
        ValueError: numbers of rounds differ, or a time is not positive and finite; names the
            variant and the launch.
    """

    baseline: Launches
    control: Launches
    """The baseline, launched again as if it were a variant."""
    variants: Mapping[str, Launches]

    def __post_init__(self) -> None:
        for name, launches in self.members():
            if len(launches) != len(self.baseline):
                raise ValueError(
                    f"{name}: {len(launches)} rounds, and {len(self.baseline)} of the baseline"
                )
        _ = self.levels  # refuses wrong times here and now

    def members(self) -> Iterator[tuple[str, Launches]]:
        """Each series of launches with its name: baseline, control, variants."""
        yield "baseline", self.baseline
        yield "control", self.control
        yield from self.variants.items()

    @cached_property
    def levels(self) -> list[list[float]]:
        """Level of each launch of each member."""
        return [levels(*member) for member in self.members()]

    def reference(self) -> list[float]:
        """What variants are compared with: the baseline's level, averaged with the control's.

        The control is more launches of the same thing, so they are not wasted: a ratio becomes as
        sure as it would be with a third more launches of everything.
        """
        both = zip(*self.levels[:2], strict=True)
        return [fmean(present(pair) or [math.nan]) for pair in both]

    def estimates(self) -> list[Estimate]:
        """Ratio of each variant."""
        reference = self.reference()
        return [paired(variant, reference) for variant in self.levels[2:]]

    def control_estimate(self) -> Estimate:
        """Ratio of the control to the baseline, which is 1 on a sound machine."""
        baseline, control, *_ = self.levels
        return paired(control, baseline)


class Row(NamedTuple):
    """What is said of one variant."""

    verdict: Verdict
    estimate: Estimate
    interval: tuple[float, float] | None
    """Of the ratio; agrees with the verdict. None below two launches."""
    confidence: float
    """Of this interval: what a row among so many needs."""
    spread: float | None
    """Standard deviation between launches, on log time."""


class Control(NamedTuple):
    """What is said of the control."""

    verdict: ControlVerdict
    estimate: Estimate
    interval: tuple[float, float] | None
    """Of the ratio, at the control's own confidence."""
    spread: float | None
    """Standard deviation between launches of the same thing, without drift: the machine's noise."""


class Result(NamedTuple):
    """What is said of one comparison."""

    rows: dict[str, Row]
    control: Control
    drift: Drift


class Report(NamedTuple):
    """What is said of a file."""

    results: dict[str, Result]
    too_noisy: list[str]
    """Comparisons whose control came out different: their verdicts are withheld."""


def judge(comparisons: Mapping[str, Comparison], rules: Rules = DEFAULT_RULES) -> Report:
    """Verdicts on a whole file.

    Args:
        comparisons: all that were asked for, by name.
        rules: margin and rates.
    """
    estimates = [e for comparison in comparisons.values() for e in comparison.estimates()]
    decided = zip(estimates, decide(estimates, rules), strict=True)
    tail = rules.control_rate / (2 * max(1, len(comparisons)))
    results = {}
    for name, comparison in comparisons.items():
        control = judge_control(comparison, rules, tail)
        rows = {
            variant: make_row(*next(decided), control.verdict == "different", spread(own_levels))
            for variant, own_levels in zip(comparison.variants, comparison.levels[2:], strict=True)
        }
        # the two kinds of drift share the rate
        results[name] = Result(rows, control, find_drift(comparison, rules, tail / 2))
    noisy = [name for name, result in results.items() if result.control.verdict == "different"]
    return Report(results, noisy)


def make_row(
    estimate: Estimate, decision: Decision, noisy: bool, between_launches: float | None
) -> Row:
    """A row; its verdict is withheld where a control came out different."""
    return Row(
        "withheld" if noisy else decision.verdict,
        estimate,
        estimate.interval(decision.tail),
        1 - 2 * decision.tail,
        between_launches,
    )


def judge_control(comparison: Comparison, rules: Rules, tail: float) -> Control:
    """The control against the baseline."""
    estimate = comparison.control_estimate()
    noise = None
    if estimate.error is not None:
        noise = estimate.error * math.sqrt((estimate.df + 1) / 2)
    return Control(
        read_control(estimate, tail, rules.bound), estimate, estimate.interval(tail), noise
    )


def find_drift(comparison: Comparison, rules: Rules, tail: float) -> Drift:
    """Both kinds of drift of one comparison, shared by all its members; changes no verdict.

    Args:
        comparison: the launches, each with its blocks in the order in which they were timed.
        rules: margin.
        tail: each kind is flagged by chance with at most twice this probability.
    """
    launches = [blocks for _, member in comparison.members() for blocks in member]
    kinds = drift_over_rounds(comparison.levels), drift_within_launches(launches)
    flagged = any(
        kind.log_ratio is not None
        and abs(kind.log_ratio) > rules.bound
        and excludes_equal(kind.log_interval(tail))
        for kind in kinds
    )
    over, within = (
        None if kind.log_ratio is None else math.expm1(kind.log_ratio) for kind in kinds
    )
    return Drift(over, within, flagged)


# When to stop


class Progress(NamedTuple):
    """How far a comparison is."""

    half_width: float | None
    """Of the widest interval of a variant, in logs; None while one has none."""
    needed: int | None
    """Launches of each that would make it as narrow as asked, by the spread seen; None: unknown."""
    stop: Stop | None
    """None: go on."""


def launches_needed(estimate: Estimate, tail: float, width: float) -> int | None:
    """Launches for a half width in logs, if the spread between rounds stays what it was.

    None where the spread is unknown, and beyond a thousand launches, which is no plan.
    """
    if estimate.error is None:
        return None
    between = estimate.error * math.sqrt(estimate.df + 1)
    for n in range(FEWEST_LAUNCHES, 1001):
        if between * quantile(n - 1, tail) <= width * math.sqrt(n):
            return n
    return None


def progress(
    comparison: Comparison,
    rows: int,
    rules: Rules = DEFAULT_RULES,
    width: float | None = None,
    most: int = DEFAULT_LAUNCHES,
) -> Progress:
    """Whether to launch another round.

    Looks at widths alone, never at ratios or verdicts: whoever stops as soon as something looks
    different finds differences everywhere. The widths are those of the first step of `decide`,
    which do not depend on what was found.

    Args:
        comparison: the launches so far.
        rows: variants of the whole file, which share the error rate.
        rules: margin and error rate.
        width: half width to reach for each variant, in logs; by default the margin's.
        most: rounds at most.
    """
    width = rules.bound if width is None else width
    tail = rules.error_rate / (2 * rows)
    estimates = comparison.estimates()
    halves = [e.error * quantile(e.df, tail) for e in estimates if e.error is not None]
    needs = [n for e in estimates if (n := launches_needed(e, tail, width)) is not None]
    half_width = max(halves) if halves and len(halves) == len(estimates) else None
    needed = max(needs) if needs and len(needs) == len(estimates) else None

    rounds = len(comparison.baseline)
    stop: Stop | None = "limit" if rounds >= most else None
    if half_width is not None and half_width <= width and rounds >= FEWEST_LAUNCHES:
        stop = "narrow"
    return Progress(half_width, needed, stop)


# Two files


class Side(NamedTuple):
    """One row of one file."""

    launches: Launches
    control: Control
    """That of its comparison."""


def compare(rows: Mapping[str, tuple[Side, Side]], rules: Rules = DEFAULT_RULES) -> dict[str, Row]:
    """Rows of a new file against the same rows of an old one, which share no rounds.

    The interval covers launches, and not what changed between two days. What shows of that within
    a file is heeded: a difference begins where the control of neither file reaches, and a control
    that came out different withholds.

    Args:
        rows: old and new side by name.
        rules: margin and rates, for all rows together.

    Returns:
        a row for each, with the ratio new over old and the larger spread of the two sides.
    """
    sides = {
        name: (levels(f"{name} (old)", old.launches), levels(f"{name} (new)", new.launches))
        for name, (old, new) in rows.items()
    }
    estimates = {name: unpaired(new, old) for name, (old, new) in sides.items()}
    reach = [
        max(abs(side.control.estimate.log_ratio or 0.0) for side in pair) for pair in rows.values()
    ]
    decisions = decide(list(estimates.values()), rules, reach)
    found = {}
    for (name, pair), decision in zip(rows.items(), decisions, strict=True):
        noisy = any(side.control.verdict == "different" for side in pair)
        spreads = [s for s in map(spread, sides[name]) if s is not None]
        found[name] = make_row(estimates[name], decision, noisy, max(spreads, default=None))
    return found
