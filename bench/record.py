"""From a journal to what a file says: the rows of all cases, with verdicts.

The door between the wing that measures and the wing that reads: `record.schema.json` beside this
module describes what goes through it.
"""

import json
import math
import statistics as plain
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from bench import statistics
from bench.measuring.history import first_launches, launches_of
from bench.measuring.journal import Event, Journal
from bench.statistics import Comparison, Report, Row, Rules

SCHEMA_VERSION = 1

BUSY = 0.2
"""Cores that other processes may use during a block before it counts as disturbed."""

FLAGS = {
    "numerics": "its first steps are further from float64 than the tolerances of its precision",
    "unchecked": "there were no first steps in float64 to compare with",
    "recompiled": "something was compiled inside a timed block",
    "unsynchronised": "the device was still at work when the time was taken",
    "not_steady": "it was still getting faster when warm-up had to end",
    "busy": f"other processes used more than {BUSY} cores during more than a tenth of its blocks",
    "throttled": "the card held its clocks back",
    "alone": "there was no memory for its launches beside others, so they were not interleaved",
    "lost_launches": "some launches did not end well",
    "drift": "the machine became faster or slower while this comparison was measured",
    "noisy": "the control differs from the baseline by more than the margin",
}


def parts(journal: Journal, rules: Rules) -> dict[str, Any]:
    """What a file has beside pytest-benchmark's own: `refbench` and `cases`."""
    suite = next(journal.find("suite"))
    report = statistics.judge(comparisons(journal), rules)
    return {
        "refbench": {
            "schema_version": SCHEMA_VERSION,
            **{k: suite[k] for k in ("began", "plan", "facts", "machine", "subject")},
            "peak_flop_per_s": suite["peak_flop_per_s"],
            "rules": asdict(rules),
            "comparisons": summary(journal, report),
            "flags": FLAGS,
        },
        "cases": cases(journal, report),
    }


def cases(journal: Journal, report: Report) -> list[dict[str, Any]]:
    """A row for each case, whatever became of it."""
    rows = []
    for event in asked(journal):
        result = report.results.get(_comparison_of(event))
        rows.append(_row(journal, event, result))
    _give_ratios(rows, report)
    return rows


def asked(journal: Journal) -> list[Event]:
    """The newest that the journal says of each case."""
    return list({event["case"]: event for event in journal.find("case")}.values())


def comparisons(journal: Journal) -> dict[str, Comparison]:
    """Those of which something was measured, by name."""
    found: dict[str, list[str]] = {}
    measured = {event["case"] for event in journal.find("block")}
    for event in asked(journal):
        found.setdefault(_comparison_of(event), []).append(event["case"])
    kept = {}
    for name, members in found.items():
        baseline, control, *variants = members
        if measured & set(members):
            runnable = [name for name in variants if name in measured]
            kept[name] = launches_of(journal, [baseline, control, *runnable])
    return kept


def summary(journal: Journal, report: Report) -> list[dict[str, Any]]:
    """What is said of each comparison as a whole."""
    rows = []
    for name, result in report.results.items():
        ended = next(journal.find("ended", comparison=name), None)
        modes = [event["mode"] for event in journal.find("mode", comparison=name)]
        rows.append(
            {
                "comparison": name,
                "stop": ended["stop"] if ended else None,
                "mode": modes[-1] if modes else "together",
                "control": {
                    "verdict": result.control.verdict,
                    "ratio": result.control.estimate.ratio,
                    "interval": _listed(result.control.interval),
                    "spread": result.control.spread,
                },
                "drift": {
                    "over_rounds": result.drift.over_rounds,
                    "within_launches": result.drift.within_launches,
                    "flagged": result.drift.flagged,
                },
            }
        )
    return rows


def problems(content: Any) -> list[str]:
    """What is wrong with a file by the schema, a line each, with the place."""
    import jsonschema

    schema = json.loads(files("bench").joinpath("record.schema.json").read_text("utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    errors = sorted(validator.iter_errors(content), key=lambda error: error.json_path)
    return [f"{error.json_path}: {error.message}" for error in errors]


def _comparison_of(event: Event) -> str:
    return f"{event['axis']}/{event['workload']}"


def _row(journal: Journal, event: Event, result: statistics.Result | None) -> dict[str, Any]:
    """Everything about one case but how it compares."""
    name = event["case"]
    launches = first_launches(journal, name)
    blocks = list(journal.find("block", case=name))
    lost = [
        {"round": e["round"], "status": e["status"], "reason": e["reason"]}
        for e in journal.find("lost", case=name)
    ]
    skipped = next(journal.find("skipped", case=name), None)
    row = {k: event[k] for k in ("case", "axis", "workload", "variant", "changes", "batch_size")}
    row["role"] = event["role"]
    given_up = next(journal.find("given_up", case=name), None)
    row["status"], row["reason"] = _status(blocks, skipped, given_up)
    ok = row["status"] == "ok"
    row["lost"] = lost
    row["step_s"] = plain.median(b["step_s"] for b in blocks) if ok else None
    row["samples_per_s"] = _throughput(blocks) if ok else None
    row["flop_per_s"], row["share_of_peak"] = _speed(journal, event, row)
    row["memory"] = _largest(b["memory"] for b in blocks) if ok else None
    row["cold"] = _cold(launches)
    row["compile"] = launches[0]["compile"] if launches else None
    row["numerics"] = launches[0]["numerics"] if launches else None
    row["rank_spread"] = _mean(b["rank_spread"] for b in blocks)
    row["data_wait"] = _mean(b["data_wait"] for b in blocks)
    row["telemetry"] = _telemetry(blocks)
    row["samples_per_joule"] = _per_joule(blocks)
    row["launches"] = [_launch(launch, blocks) for launch in launches]
    row["flags"] = _flags(row, launches, blocks, result) if ok else []
    return row


def _status(
    blocks: list[Event], skipped: Event | None, given_up: Event | None
) -> tuple[str, str | None]:
    if skipped is not None:
        return "skipped", skipped["reason"]
    if given_up is not None:
        return given_up["status"], given_up["reason"]
    if not blocks:
        return "pending", "the suite ended before it was measured"
    return "ok", None


def _throughput(blocks: Sequence[Event]) -> float:
    """All samples over all time."""
    seconds = sum(block["step_s"] * len(block["steps_s"]) for block in blocks)
    return float(sum(block["samples"] for block in blocks) / seconds)


def _speed(
    journal: Journal, event: Event, row: dict[str, Any]
) -> tuple[float | None, float | None]:
    """Operations a second that the model needs; and as a share of the peak of its precision."""
    exact = next(journal.find("exact", case=event["case"]), None)
    if exact is None or row["step_s"] is None:
        return None, None
    reached = exact["flop_per_step"] / row["step_s"]
    suite = next(journal.find("suite"))
    peak = suite["peak_flop_per_s"].get(event["changes"].get("precision", "fp32"))
    devices = event["changes"].get("devices", 1) if suite["facts"]["device"] != "cpu" else 1
    return reached, None if peak is None else reached / (peak * devices)


def _largest(readings: Iterable[dict[str, int | None]]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for reading in readings:
        for name, value in reading.items():
            before = found.get(name)
            found[name] = value if before is None or value is None else max(before, value)
    return found


def _cold(launches: list[Event]) -> dict[str, Any] | None:
    """The first step, of the launch whose cache of compiled code was empty, and of the others."""
    if not launches:
        return None
    again = [launch["first_step_s"] for launch in launches if not launch["fresh_cache"]]
    return {
        "first_step_s": launches[0]["first_step_s"],
        "first_step_again_s": plain.median(again) if again else None,
        "memory": launches[0]["cold_memory"],
    }


def _mean(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return plain.fmean(present) if present else None


def _telemetry(blocks: list[Event]) -> dict[str, Any] | None:
    """Means over blocks; of what throttled, in how large a share of them."""
    if not blocks:
        return None
    readings = [block["telemetry"] for block in blocks]
    names = [name for name in readings[0] if name not in ("throttled", "energy_j")]
    found: dict[str, Any] = {name: _mean(r[name] for r in readings) for name in names}
    known = [r["throttled"] for r in readings if r["throttled"] is not None]
    reasons = sorted({reason for reasons in known for reason in reasons})
    found["throttled"] = (
        {reason: plain.fmean(reason in r for r in known) for reason in reasons} if known else None
    )
    return found


def _per_joule(blocks: list[Event]) -> float | None:
    joules = [block["telemetry"]["energy_j"] for block in blocks]
    if not joules or None in joules or not sum(joules):
        return None
    return float(sum(block["samples"] for block in blocks) / sum(joules))


def _launch(launch: Event, blocks: list[Event]) -> dict[str, Any]:
    """What was timed in one launch, in the order of time."""
    own = [block for block in blocks if block["round"] == launch["round"]]
    kept = ("round", "mode", "fresh_cache", "steps", "first_step_s", "warm_up_steps", "steady")
    return {
        **{name: launch[name] for name in kept},
        "torch": launch["torch"],
        "block_step_s": [block["step_s"] for block in own],
        "positions": [block["position"] for block in own],
        "at": [block["at"] for block in own],
    }


def _flags(
    row: dict[str, Any],
    launches: list[Event],
    blocks: list[Event],
    result: statistics.Result | None,
) -> list[str]:
    busy = [b["telemetry"]["cpu_other_cores"] > BUSY for b in blocks]
    throttled = row["telemetry"]["throttled"] or {}
    found = {
        "numerics": row["numerics"] is not None and not row["numerics"]["passed"],
        "unchecked": row["numerics"] is None,
        "recompiled": any(block["recompilations"] for block in blocks),
        "unsynchronised": any(block["unsynchronised"] for block in blocks),
        "not_steady": not all(launch["steady"] for launch in launches),
        "busy": plain.fmean(busy) > 0.1,
        "throttled": any(share > 0.1 for share in throttled.values()),
        "alone": any(launch["mode"] == "alone" for launch in launches),
        "lost_launches": bool(row["lost"]),
        "drift": result is not None and result.drift.flagged,
        "noisy": result is not None and result.control.verdict == "different",
    }
    assert found.keys() == FLAGS.keys()
    return [name for name, holds in found.items() if holds]


def _give_ratios(rows: list[dict[str, Any]], report: Report) -> None:
    """Add to each row how it compares with its baseline."""
    for row in rows:
        result = report.results.get(f"{row['axis']}/{row['workload']}")
        row.update(ratio=None, interval=None, confidence=None, spread=None, verdict=None)
        if result is None or row["status"] != "ok":
            continue
        found = result.rows.get(row["case"])
        if found is not None:
            row.update(_compared(found))
        elif row["role"] == "control":
            row["ratio"] = result.control.estimate.ratio
            row["interval"] = _listed(result.control.interval)
            row["spread"] = result.control.spread


def _compared(found: Row) -> dict[str, Any]:
    return {
        "ratio": found.estimate.ratio,
        "interval": _listed(found.interval),
        "confidence": found.confidence,
        "spread": found.spread,
        "verdict": found.verdict,
    }


def _listed(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None or not all(map(math.isfinite, interval)) else list(interval)


def table(content: dict[str, Any]) -> Iterator[str]:
    """The rows of a file for people, a line each."""
    yield (
        f"{'case':<44} {'samples/s':>10} {'ratio':>6} {'interval':>14} {'verdict':<10} "
        f"{'memory':>8}  flags"
    )
    for row in content["cases"]:
        if row["status"] != "ok":
            yield f"{row['case']:<44} {row['status']}: {row['reason']}"
            continue
        verdict = row["verdict"] or ("" if row["role"] == "baseline" else row["role"])
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        interval = "" if row["interval"] is None else "{:.3f}-{:.3f}".format(*row["interval"])
        yield (
            f"{row['case']:<44} {row['samples_per_s']:>10,.1f} {ratio:>6} {interval:>14} "
            f"{verdict:<10} "
            f"{_gigabytes(row['memory']):>8}  {' '.join(row['flags'])}"
        ).rstrip()


def _gigabytes(memory: dict[str, int | None]) -> str:
    peak = memory["peak_allocated"] or memory["peak_rss"]
    return "" if peak is None else f"{peak / 1e9:.2f} GB"
