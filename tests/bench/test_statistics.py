"""Verdicts on simulated launches whose truth is known, and the parts that they are made of.

Simulations are also run with statistics that are wrong on purpose, to see that they find them out.
"""

import json
import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from bench import statistics
from bench.statistics import (
    DEFAULT_LAUNCHES,
    DEFAULT_RULES,
    FEWEST_LAUNCHES,
    NOTHING,
    Comparison,
    Control,
    Estimate,
    Report,
    Rules,
    Side,
    decide,
    judge,
    level,
    levels,
    paired,
    progress,
    unpaired,
)

FILES = 1000
COMPARISONS, VARIANTS = 4, 2  # 8 rows in a file
BOUND = DEFAULT_RULES.bound

File = dict[str, Comparison]


# Files with a known truth


class World(NamedTuple):
    """How simulated machines and processes behave; a pair is a range, drawn from for each file."""

    spread: tuple[float, float] = (0.01, 0.06)
    """Standard deviation between launches, on log time."""
    noise: tuple[float, float] = (0.01, 0.05)
    """Standard deviation between the blocks of a launch."""
    outliers: float = 0.03
    """Share of blocks that take 20 % to 170 % longer."""
    drift: float = 0.15
    """Change of log time over all rounds, evenly."""
    weather: float = 0.03
    """Standard deviation of what else the launches of one round share."""
    launches: int = DEFAULT_LAUNCHES
    blocks: int = 8


def simulate(seed: int, world: World, files: int = FILES, shifts: tuple = ()) -> Iterator[File]:
    """Files of `COMPARISONS` with `VARIANTS` each, all as fast as the baseline but for shifts.

    Args:
        shifts: (comparison, member, log of the ratio); members are baseline, control, variants.
    """
    rng = np.random.default_rng(seed)
    members = 2 + VARIANTS
    shape = (files, COMPARISONS, members, world.launches, world.blocks)
    spread = rng.uniform(*world.spread, (files, 1, 1, 1, 1))
    noise = rng.uniform(*world.noise, (files, 1, 1, 1, 1))
    logs = spread * rng.normal(size=(*shape[:-1], 1)) + noise * rng.normal(size=shape)
    logs += np.where(rng.random(shape) < world.outliers, rng.uniform(0.2, 1, shape), 0)
    time = np.linspace(0, 1, world.launches * world.blocks).reshape(shape[-2:])
    logs += world.drift * time
    logs += world.weather * rng.normal(size=(files, COMPARISONS, 1, world.launches, 1))
    for comparison, member, log_ratio in shifts:
        logs[:, comparison, member] -= log_ratio
    for file in np.exp(logs - 3).tolist():
        yield {
            f"c{number}": Comparison(
                baseline, control, {f"v{i}": launches for i, launches in enumerate(variants)}
            )
            for number, (baseline, control, *variants) in enumerate(file)
        }


def verdicts(report: Report) -> list[str]:
    """In the order of comparisons and variants."""
    return [row.verdict for result in report.results.values() for row in result.rows.values()]


def share(files: Iterator[File], wrong: Callable[[Report], bool]) -> float:
    """Of files whose report has a property."""
    return float(np.mean([wrong(judge(file)) for file in files]))


def any_difference(report: Report) -> bool:
    return not {"faster", "slower"}.isdisjoint(verdicts(report))


def blocks_as_launches(file: File) -> File:
    """The same file, read as though each block were a launch of its own."""

    def each(launches):
        return [[block] for block in chain.from_iterable(launches)]

    return {
        name: Comparison(
            each(c.baseline), each(c.control), {k: each(v) for k, v in c.variants.items()}
        )
        for name, c in file.items()
    }


def at_most(rate: float, trials: int) -> float:
    """A share that a true rate exceeds once in ten thousand times."""
    return float(stats.binom.isf(1e-4, trials, rate)) / trials


# Error rates


def test_equal_things_are_called_different_in_at_most_one_file_of_a_hundred():
    assert share(simulate(1, World()), any_difference) <= 0.01


def test_blocks_taken_for_launches_call_equal_things_different():
    """So the simulation finds wrong statistics out; the control alone saves many a file."""
    world = World(launches=3, blocks=20)
    assert share(simulate(1, world, 300), any_difference) <= at_most(0.01, 300)
    naive = map(blocks_as_launches, simulate(1, world, 300))
    assert share(naive, any_difference) > 0.15


@pytest.mark.parametrize("launches", [3, 6])
def test_few_launches_of_a_wild_machine_call_little_different(launches):
    wild = World(spread=(0.06, 0.06), launches=launches)
    assert share(simulate(2, wild), any_difference) <= at_most(0.01, FILES)


def test_without_the_rate_for_equal_things_more_would_be_called_different():
    wild = World(spread=(0.06, 0.06), launches=3)
    loose = Rules(equality_rate=0.05)
    found = [any_difference(judge(file, loose)) for file in simulate(2, wild)]
    assert np.mean(found) > 0.015


ON_THE_MARGIN = tuple((c, 2 + v, BOUND) for c in range(COMPARISONS) for v in range(VARIANTS))


def test_the_error_rate_holds_where_every_truth_lies_on_the_margin():
    """There `faster` and `same` are both wrong, and as likely as they can be."""
    steady = World(spread=(0.01, 0.03))
    wrong = share(
        simulate(3, steady, shifts=ON_THE_MARGIN),
        lambda report: not {"faster", "slower", "same"}.isdisjoint(verdicts(report)),
    )
    assert 0.01 < wrong <= 0.05


def test_a_rate_for_each_row_would_not_hold_for_the_file(monkeypatch):
    def each_alone(estimates, rules):
        return [decide([estimate], rules)[0] for estimate in estimates]

    monkeypatch.setattr(statistics, "decide", each_alone)
    steady = World(spread=(0.01, 0.03))
    wrong = share(
        simulate(3, steady, shifts=ON_THE_MARGIN),
        lambda report: not {"faster", "slower", "same"}.isdisjoint(verdicts(report)),
    )
    assert wrong > 0.1


def test_found_differences_leave_the_rate_to_the_rest():
    """Step-down, one tail for each; the last row is found only when three others are."""
    far, near = Estimate(1.0, 0.01, 15), Estimate(BOUND + 0.031, 0.01, 15)
    two = decide([far] * 2 + [near] + [NOTHING] * 5, DEFAULT_RULES)
    three = decide([far] * 3 + [near] + [NOTHING] * 4, DEFAULT_RULES)
    assert [d.verdict for d in two] == ["faster"] * 2 + ["ambiguous"] * 6
    assert [d.verdict for d in three] == ["faster"] * 4 + ["ambiguous"] * 4
    tails = [d.tail for d in decide([far] * 7 + [Estimate(BOUND, 0.01, 15)], DEFAULT_RULES)]
    assert tails == pytest.approx([0.05 / 9] * 8)
    tails = [d.tail for d in decide([NOTHING] * 8, DEFAULT_RULES)]
    assert tails == pytest.approx([0.05 / 16] * 8)


def test_rows_found_equal_leave_no_rate_to_the_rest():
    """They can still be wrong in two ways."""
    equal = Estimate(0.0, 0.001, 15)
    decisions = decide([equal] * 7 + [Estimate(BOUND, 0.01, 15)], DEFAULT_RULES)
    assert [d.verdict for d in decisions] == ["same"] * 7 + ["ambiguous"]
    assert decisions[7].tail == pytest.approx(0.05 / 16)


# Power


FASTER = math.log1p(0.05)


@pytest.mark.parametrize(("sign", "verdict"), [(1, "faster"), (-1, "slower")])
def test_a_planted_difference_of_five_percent_is_found(sign, verdict):
    world = World(spread=(0.015, 0.015), noise=(0.02, 0.02))
    planted = simulate(5, world, shifts=((0, 2, sign * FASTER),))
    found = [verdicts(judge(file))[0] for file in planted]
    assert found.count(verdict) >= 0.95 * FILES
    assert set(found) <= {verdict, "ambiguous", "withheld"}


def test_a_planted_difference_of_five_percent_is_never_called_same_or_the_other_way():
    planted = simulate(6, World(), shifts=((0, 2, FASTER), (1, 3, -FASTER)))
    found = [verdicts(judge(file)) for file in planted]
    assert {row[0] for row in found} == {"faster", "ambiguous", "withheld"}
    assert {row[3] for row in found} == {"slower", "ambiguous", "withheld"}


def test_equal_things_are_called_same_where_launches_agree():
    calm = World(spread=(0.005, 0.005), noise=(0.01, 0.01))
    found = [verdict for file in simulate(7, calm, 200) for verdict in verdicts(judge(file))]
    assert found.count("same") > 0.97 * len(found)
    assert set(found) <= {"same", "ambiguous", "withheld"}


# Intervals


def covered(report: Report, tail: float) -> list[bool]:
    """Whether the interval of each row, equal in truth, holds no difference."""
    rows = [row for result in report.results.values() for row in result.rows.values()]
    intervals = [row.estimate.log_interval(tail) for row in rows]
    return [low <= 0 <= high for low, high in intervals]


@pytest.mark.parametrize("launches", [3, DEFAULT_LAUNCHES])
def test_intervals_cover_the_truth_as_often_as_they_say(launches):
    """The first variant of each comparison, since two of one share a baseline."""
    reports = map(judge, simulate(8, World(launches=launches), 500))
    hits = np.concatenate([covered(report, 0.025)[::VARIANTS] for report in reports])
    low, high = stats.binom.interval(0.9999, hits.size, 0.95)
    assert low <= hits.sum() <= high


def test_blocks_taken_for_launches_give_intervals_that_miss_the_truth():
    reports = (judge(blocks_as_launches(file)) for file in simulate(8, World(), 50))
    assert np.mean([covered(report, 0.025) for report in reports]) < 0.9


def test_intervals_shown_cover_all_truths_together_and_agree_with_verdicts():
    missed = 0
    for file in simulate(9, World(spread=(0.005, 0.06)), shifts=((0, 2, 0.1), (1, 2, -0.03))):
        report = judge(file)
        rows = [row for result in report.results.values() for row in result.rows.values()]
        truths = [0.1, 0, -0.03, 0, 0, 0, 0, 0]
        missed += any(
            not low <= math.exp(truth) <= high
            for truth, (low, high) in zip(truths, (row.interval for row in rows), strict=True)
        )
        for row in rows:
            low, high = (math.log(end) for end in row.interval)
            assert (low > BOUND) == (row.verdict == "faster") or row.verdict == "withheld"
            assert (high < -BOUND) == (row.verdict == "slower") or row.verdict == "withheld"
            within = low > -BOUND and high < BOUND
            assert within == (row.verdict == "same") or row.verdict == "withheld"
    assert missed <= at_most(0.05, FILES) * FILES


def test_the_interval_of_welch_covers_the_truth_with_unequal_sides():
    rng = np.random.default_rng(10)
    new, old = rng.normal(0, 0.01, (4000, 12)), rng.normal(0, 0.06, (4000, 5))
    intervals = [unpaired(*sides).log_interval(0.025) for sides in zip(new, old, strict=True)]
    hits = sum(low <= 0 <= high for low, high in intervals)
    low, high = stats.binom.interval(0.9999, len(intervals), 0.95)
    assert low <= hits <= high


# Drift and the control


def test_drift_shared_by_all_changes_no_verdict_and_is_flagged():
    steady = World(spread=(0.01, 0.03), drift=0, weather=0)
    shifts = ((0, 2, 0.1), (1, 3, -0.1))
    still = [judge(file) for file in simulate(11, steady, 300, shifts)]
    moved = [judge(file) for file in simulate(11, steady._replace(drift=0.15), 300, shifts)]
    assert {"faster", "slower", "same", "ambiguous"} <= set(chain(*map(verdicts, still)))
    pairs = list(zip(*(chain.from_iterable(map(verdicts, r)) for r in (still, moved)), strict=True))
    changed = [pair for pair in pairs if pair[0] != pair[1]]
    # Drift inside a launch makes another block its median, which moves an interval's end a little.
    assert len(changed) < 0.03 * len(pairs)
    assert all("ambiguous" in pair or "withheld" in pair for pair in changed)

    def flags(reports):
        return [[result.drift.flagged for result in r.results.values()] for r in reports]

    assert np.all(flags(moved))
    assert np.mean(np.any(flags(still), axis=1)) <= 0.01
    drifts = [r.drift.over_rounds for report in moved for r in report.results.values()]
    assert np.mean(drifts) == pytest.approx(math.expm1(0.15 * 15 / 16), abs=0.003)


def test_drift_between_rounds_alone_changes_no_verdict_at_all():
    """All of it cancels: a factor for each round leaves ratios as they are."""
    (file,) = simulate(12, World(spread=(0.01, 0.01), drift=0), 1, ((0, 2, 0.1),))
    before, after = judge(file), judge({name: slowing(c) for name, c in file.items()})
    assert verdicts(before) == verdicts(after)
    assert "faster" in verdicts(before)
    for name, result in after.results.items():
        assert result.drift.flagged
        for variant, row in result.rows.items():
            assert row.interval == pytest.approx(before.results[name].rows[variant].interval)


def slowing(comparison: Comparison) -> Comparison:
    def slow(launches):
        return [[s * (1 + 0.15 * r / 15) for s in blocks] for r, blocks in enumerate(launches)]

    variants = {name: slow(launches) for name, launches in comparison.variants.items()}
    return Comparison(slow(comparison.baseline), slow(comparison.control), variants)


def test_a_drift_inside_launches_is_flagged_with_few_of_them():
    """Where launches spread too widely to show it from one to the next."""
    world = World(spread=(0.06, 0.06), noise=(0.01, 0.02), drift=0.15, launches=3)
    flagged = [
        [result.drift.flagged for result in judge(file).results.values()]
        for file in simulate(13, world._replace(outliers=0), 100)
    ]
    assert np.mean(flagged) > 0.95


@pytest.mark.parametrize("launches", [3, 6, DEFAULT_LAUNCHES])
def test_sound_machines_are_seldom_refused(launches):
    files = simulate(14, World(launches=launches))
    assert share(files, lambda report: bool(report.too_noisy)) <= at_most(0.01, FILES)


def test_a_baseline_that_differs_from_itself_withholds_verdicts_of_its_comparison():
    world = World(spread=(0.01, 0.015), noise=(0.01, 0.02))
    shifts = ((0, 1, FASTER), (0, 2, 0.2), (1, 2, 0.2))
    reports = [judge(file) for file in simulate(15, world, 50, shifts)]
    for report in reports:
        assert "c0" in report.too_noisy
        assert verdicts(report)[:2] == ["withheld", "withheld"]
        assert report.results["c0"].rows["v0"].interval[0] > 1.1
    assert [verdicts(report)[2] for report in reports].count("faster") >= 48


def test_a_control_within_the_margin_withholds_nothing():
    """However surely it differs from the baseline."""
    world = World(spread=(0.001, 0.001), noise=(0.001, 0.001), drift=0)
    (file,) = simulate(16, world, 1, ((0, 1, 0.01), (0, 2, 0.2)))
    control = judge(file).results["c0"].control
    assert control.verdict == "same"
    assert control.interval[0] > 1
    assert verdicts(judge(file))[0] == "faster"


def test_a_wide_control_is_ambiguous_and_leaves_plain_differences():
    (file,) = simulate(17, World(spread=(0.06, 0.06)), 1, ((0, 2, 1.0),))
    report = judge(file)
    assert report.results["c0"].control.verdict == "ambiguous"
    assert verdicts(report)[0] == "faster"


# Stopping


def run_until(stop: Callable[[Comparison], bool], file: File, most: int) -> Comparison:
    """The launches of a file's first comparison up to the round in which measuring stops."""
    whole = file["c0"]
    for rounds in range(2, most + 1):
        some = Comparison(
            whole.baseline[:rounds],
            whole.control[:rounds],
            {name: launches[:rounds] for name, launches in whole.variants.items()},
        )
        if rounds == most or stop(some):
            return some
    raise AssertionError


def off_the_margin(comparison: Comparison) -> bool:
    """Whether a row has a verdict, where its truth lies on the margin and any is wrong."""
    return set(verdicts(judge({"c0": comparison}))) != {"ambiguous"}


def test_stopping_on_width_keeps_the_error_rate():
    """Stops between six rounds and fourteen, with the truth on the margin."""
    world = World(spread=(0.008, 0.015), noise=(0.01, 0.02), outliers=0.01, drift=0)
    ended, wrong = [], 0
    for file in simulate(18, world, FILES, ON_THE_MARGIN):
        final = run_until(lambda some: progress(some, VARIANTS).stop is not None, file, 15)
        ended.append(len(final.baseline))
        wrong += off_the_margin(final)
    assert min(ended) == FEWEST_LAUNCHES
    assert np.std(ended) > 1
    assert wrong <= at_most(0.05, FILES) * FILES


def test_stopping_on_a_verdict_would_not_keep_it():
    world = World(spread=(0.008, 0.015), noise=(0.01, 0.02), outliers=0.01, drift=0)
    files = simulate(18, world, 300, ON_THE_MARGIN)
    wrong = sum(off_the_margin(run_until(off_the_margin, file, 15)) for file in files)
    assert wrong > at_most(0.05, 300) * 300


def test_progress_tells_how_far_it_is():
    (file,) = simulate(19, World(spread=(0.02, 0.02), launches=30), 1)
    whole = file["c0"]

    def after(rounds: int, **options):
        some = {name: launches[:rounds] for name, launches in whole.variants.items()}
        cut = Comparison(whole.baseline[:rounds], whole.control[:rounds], some)
        return progress(cut, 8, **options)

    assert after(1) == (None, None, None)
    assert after(1, most=1).stop == "limit"
    assert after(5, width=1.0).stop is None  # narrow, and too early to know
    assert after(6, width=1.0).stop == "narrow"
    assert after(6, width=1e-6) == (after(6).half_width, None, None)
    needed = after(30).needed
    assert 10 < needed < 60
    assert after(30, width=after(30).half_width * 1.0001, most=99).needed == 30


# Two files


def aside(launches, log_ratio=0.0, verdict="same") -> Side:
    return Side(launches, Control(verdict, Estimate(log_ratio, 0.001, 9), None, None))


def steady(seconds: float, seed: int, launches: int = 12) -> list[list[float]]:
    logs = np.random.default_rng(seed).normal(math.log(seconds), 0.005, (launches, 1))
    return np.exp(logs).tolist()


def test_two_files_are_compared_without_shared_rounds():
    old, new = aside(steady(1.0, 0)), aside(steady(0.9, 1, launches=7))
    rows = statistics.compare({"a": (old, new), "b": (new, old), "c": (old, aside(steady(1, 2)))})
    assert [row.verdict for row in rows.values()] == ["faster", "slower", "same"]
    assert rows["a"].estimate.ratio == pytest.approx(1 / 0.9, rel=0.01)
    assert rows["a"].interval[0] < 1 / 0.9 < rows["a"].interval[1]
    assert rows["a"].spread == pytest.approx(0.005, rel=0.5)


def test_a_difference_that_controls_show_too_is_none():
    old, new = steady(1.0, 0), steady(0.95, 1)
    compare = statistics.compare
    assert compare({"a": (aside(old), aside(new))})["a"].verdict == "faster"
    assert compare({"a": (aside(old, -0.06), aside(new))})["a"].verdict == "ambiguous"
    assert compare({"a": (aside(old), aside(new, 0.0, "different"))})["a"].verdict == "withheld"


def test_different_days_with_equal_truth_are_seldom_called_different():
    files = simulate(20, World(drift=0, weather=0), 500)
    wrong = 0
    for file in files:
        sides = [
            aside(launches)
            for c in file.values()
            for launches in (c.baseline, *c.variants.values())
        ]
        rows = statistics.compare(
            {str(i): pair for i, pair in enumerate(zip(sides[::2], sides[1::2], strict=True))}
        )
        wrong += any(row.verdict in ("faster", "slower") for row in rows.values())
    assert wrong <= at_most(0.01, 500) * 500


# The parts


def test_disturbed_blocks_do_not_count():
    assert level([1.0, 50.0, 2.0, 3.0, 60.0]) == pytest.approx(math.log(3))
    assert level([1.0, 4.0]) == pytest.approx(math.log(2))
    assert level([math.e]) == pytest.approx(1)


def test_estimates_are_students():
    rng = np.random.default_rng(21)
    v, b = rng.normal(size=(2, 7))
    low, high = stats.ttest_rel(b, v).confidence_interval(0.9)
    assert paired(v, b).log_interval(0.05) == pytest.approx((low, high))
    b = np.append(b, [3.0, math.nan])
    low, high = stats.ttest_ind(b[:-1], v, equal_var=False).confidence_interval(0.9)
    assert unpaired(v, b).log_interval(0.05) == pytest.approx((low, high))


def test_the_control_counts_as_baseline():
    launches = [[1.0], [2.0]]
    comparison = Comparison(launches, [[math.e], [2.0]], {"v": launches})
    assert comparison.reference() == pytest.approx([0.5, math.log(2)])
    assert comparison.estimates()[0].log_ratio == pytest.approx(0.25)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("member", ["baseline", "control", "compiled"])
def test_impossible_times_are_refused_by_name(member, seconds):
    series = {name: [[1.0, 1.0], [1.0]] for name in ("baseline", "control", "compiled")}
    series[member] = [[1.0, 1.0], [1.0, seconds]]
    compiled = {"compiled": series.pop("compiled")}
    with pytest.raises(ValueError, match=rf"{member}, launch 2: a block of {seconds} seconds"):
        Comparison(**series, variants=compiled)


def test_unequal_numbers_of_rounds_are_refused():
    with pytest.raises(ValueError, match="compiled: 1 rounds, and 2 of the baseline"):
        Comparison([[1.0]] * 2, [[1.0]] * 2, {"compiled": [[1.0]]})


@pytest.mark.parametrize(
    "options", [{"margin": 0.0}, {"margin": 1.0}, {"error_rate": 0.5}, {"equality_rate": 0.0}]
)
def test_rules_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="it lies between 0 and"):
        Rules(**options)


def test_one_launch_gives_no_verdict():
    report = judge({"c": Comparison([[1.0, 1.1]], [[1.0]], {"v": [[0.5, 0.5, 0.5]]})})
    row, control = report.results["c"].rows["v"], report.results["c"].control
    assert row.verdict == control.verdict == "ambiguous"
    assert row.interval is row.spread is control.interval is control.spread is None
    assert row.estimate.ratio == pytest.approx(1.0488 * 2, rel=0.03)
    assert report.too_noisy == []


def test_lost_launches_leave_the_rounds_that_both_have():
    variant = [[2.0], [], [2.2], [2.1]]
    control = [[], [1.0], [], [1.0]]
    comparison = Comparison([[1.0], [1.0], [1.0], []], control, {"v": variant, "gone": [[]] * 4})
    estimate, gone = comparison.estimates()
    assert estimate.df == 2
    assert estimate.log_ratio == pytest.approx(-np.log([2.0, 2.2, 2.1]).mean())
    assert gone == NOTHING
    assert gone.ratio is None
    report = judge({"c": comparison})
    assert verdicts(report)[1] == "ambiguous"
    assert report.results["c"].control.estimate.df == 0


def test_launches_of_unequal_numbers_of_blocks_count_alike():
    assert levels("v", [[1.0] * 9, [2.0]]) == pytest.approx([0, math.log(2)])


def test_launches_that_agree_to_the_last_bit_are_a_verdict():
    report = judge(
        {"c": Comparison([[1.0]] * 3, [[1.0]] * 3, {"v": [[0.5]] * 3, "w": [[1.0]] * 3})}
    )
    assert verdicts(report) == ["faster", "same"]


def test_rows_that_only_look_different_are_shown_with_the_interval_that_says_so():
    """Beyond the margin at 5 % and not beyond equal at 1 %: the wider interval and no verdict."""
    estimate = Estimate(0.18, 0.03, 5)
    (decision,) = decide([estimate], Rules(error_rate=0.05, equality_rate=0.001))
    assert estimate.log_interval(0.025)[0] > BOUND
    assert decision == ("ambiguous", 0.0005)
    assert decide([estimate], DEFAULT_RULES)[0] == ("faster", 0.05)


def test_a_report_holds_nothing_that_json_does_not_know():
    (file,) = simulate(22, World(launches=2), 1)
    report = judge(file)
    rows = [
        [tuple(row) for row in r.rows.values()] + [r.control, r.drift]
        for r in report.results.values()
    ]
    text = json.dumps([rows, report.too_noisy], allow_nan=False)
    assert len(json.loads(text)[0]) == COMPARISONS
