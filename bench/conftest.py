"""Options of `pytest bench`, and the file that it leaves: pytest-benchmark's, and our part."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from bench.record import table
from bench.suite import Options, Suite, write
from shared.errors import UserError

SUITE = pytest.StashKey[Suite]()
DEST = "refbench_"
"""What the attribute in which pytest keeps a field of `Options` begins with."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what a suite can be told."""
    group = parser.getgroup("refbench", "what to measure, and how well")

    def add(flag: str, field: str, **options: Any) -> None:
        group.addoption(flag, dest=DEST + field, **options)

    add("--results", "results", type=Path, help="file to write; default: a new one in results/")
    add("--resume", "resume", action="store_true", help="go on with the journal beside --results")
    quick = "one workload for an axis, one launch of two short blocks: minutes, and no verdicts"
    add("--quick", "quick", action="store_true", help=quick)
    add("--axis", "axis", action="append", help="an axis to measure, as often as wanted")
    add("--workload", "workload", action="append", help="likewise a workload")
    add("--bench-device", "device", default="auto", help="auto, cpu, cuda, cuda:1")
    add("--threads", "threads", type=int, help="of each process; default: torch's own choice")
    add("--launches", "launches", type=int, help="of each variant, at most (16)")
    add("--blocks", "blocks", type=int, help="of each launch (8)")
    add("--block-seconds", "block_s", type=float, help="of a block, at least a step (0.5)")
    budget = "for each comparison; begun rounds are finished (no end)"
    add("--budget-minutes", "budget_minutes", type=float, help=budget)
    add("--margin", "margin", type=float, help="differences up to this count as none (0.02)")
    add("--batch-size", "batch_size", help="for all workloads, or auto: the largest that fits")
    limit = "of silence, after which a launch is lost (900)"
    add("--limit-seconds", "limit_s", type=float, help=limit)
    against = "compare with another interpreter, interleaved: another torch, say"
    add("--against", "against", metavar="PYTHON", help=against)
    commit = "compare with another commit, interleaved"
    add("--against-commit", "against_commit", metavar="REV", help=commit)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Check all that was asked for before anything is started.

    pytest-benchmark's own file becomes a part of ours, which takes its place when it is whole.
    """
    option = config.option
    if option.collectonly:
        return
    if getattr(option, "numprocesses", None):
        raise pytest.UsageError("-n: measurements take turns, and cannot run side by side")
    chosen = {field.name: getattr(option, DEST + field.name) for field in fields(Options)}
    if option.benchmark_json:
        chosen["results"] = chosen["results"] or Path(option.benchmark_json)
    try:
        suite = Suite(Options(**chosen), _teller(config))
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[SUITE] = suite
    signal.signal(signal.SIGTERM, _interrupt)
    option.benchmark_json = str(suite.part_file)


def _interrupt(signum: int, frame: object) -> None:
    """End as Ctrl-C does: workers are ended, and what was measured is written."""
    raise KeyboardInterrupt


def _teller(config: pytest.Config) -> Callable[[str], None]:
    """Write a line for people, past pytest's capture; on a terminal each overwrites the last."""
    began = time.monotonic()

    def tell(line: str) -> None:
        manager = config.pluginmanager.getplugin("capturemanager")
        with manager.global_and_fixture_disabled():
            text = f"[{time.monotonic() - began:5.0f} s] {line}"
            if sys.stderr.isatty():
                columns = shutil.get_terminal_size().columns
                print(
                    f"\r{text[: columns - 1]:<{columns - 1}}", end="", file=sys.stderr, flush=True
                )
            else:
                print(text, file=sys.stderr, flush=True)

    return tell


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An item for each case."""
    if "case" not in metafunc.fixturenames:
        return
    suite = metafunc.config.stash.get(SUITE, None)
    options = suite.options if suite else Options()
    metafunc.parametrize("case", [case.name for case in options.cases()])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A comparison may take hours; a launch has a limit of its own."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of a comparison, measure the variants that were selected, with their baseline and control."""
    suite = session.config.stash.get(SUITE, None)
    if suite is not None:
        chosen = [*map(_case_of, session.items)]
        suite.select(chosen)


def _case_of(item: pytest.Item) -> str | None:
    """The case that an item is about."""
    call = getattr(item, "callspec", None)
    return None if call is None else call.params.get("case")


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Suite:
    """The suite of this session."""
    return request.config.stash[SUITE]


def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    """Say what stays the same: a momentary clock would make another machine of the same one."""
    suite = config.stash.get(SUITE, None)
    if suite is not None:
        machine_info.clear()
        machine_info.update(suite.parts()["refbench"]["machine"])


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add our part: all cases, and to each row of pytest-benchmark what we know of it."""
    suite = config.stash.get(SUITE, None)
    if suite is None:
        return
    output_json.update(suite.parts())
    rows = {row["case"]: row for row in output_json["cases"]}
    for benchmark in output_json["benchmarks"]:
        row = rows[benchmark["params"]["case"]]
        benchmark["extra_info"] = {k: v for k, v in row.items() if k != "launches"}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Put the file in its place, when pytest-benchmark has written its part."""
    suite = session.config.stash.get(SUITE, None)
    if suite is None or suite.journal is None:
        return
    if suite.part_file.exists():
        content = json.loads(suite.part_file.read_text())
        suite.part_file.unlink()
    else:  # not one case was well
        hook = session.config.hook
        content = hook.pytest_benchmark_generate_json(
            config=session.config,
            benchmarks=[],
            include_data=True,
            machine_info=suite.parts()["refbench"]["machine"],
            commit_info=hook.pytest_benchmark_generate_commit_info(config=session.config),
        )
        pytest_benchmark_update_json(session.config, content)
    write(suite.results, content)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show our table, and say where everything is."""
    suite = config.stash.get(SUITE, None)
    if suite is None or suite.journal is None or not suite.results.exists():
        return
    terminalreporter.section("results")
    for line in table(suite.parts()):
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"{suite.results}; journal: {suite.journal_file}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what is still running."""
    suite = config.stash.get(SUITE, None)
    if suite is not None:
        suite.close()
