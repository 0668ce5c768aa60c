"""Settings: one dataclass for a script, read from flags, a TOML file, or an earlier run.

What is nearer to the user wins: flags, then `--config FILE`, then what a run that is continued was
started with, then the defaults in the dataclass.
"""

import contextlib
import difflib
import io
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from shared.errors import UserError
from shared.files import atomic_write
from shared.precision import Precision

MODES = ("dry_run", "overfit_batch", "evaluate")
"""Settings that ask for something else than training."""

LARGEST = 2**31 - 1
"""What any number that is a size may be: beyond it integers of the libraries overflow."""

CONFIG_FILE = "config.toml"
"""Name of the file in a run folder that holds the settings of the run."""


@dataclass(frozen=True)
class RunConfig:
    """What every run has, whatever it learns."""

    config: Path | None = None
    """TOML file of settings; flags override it."""
    run_dir: Path | None = None
    """Folder of the run, or a new one under runs/. One that holds a run is continued."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: continue what --run-dir holds. never: refuse to. Or a checkpoint file to start from."""
    epochs: int = 20
    """Times that every training sample is used."""
    seed: int = 0
    """All random choices are a function of it."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps, xpu."""
    precision: Precision = "fp32"
    """fp32 is IEEE float32, also in convolutions; tf32 needs an NVIDIA GPU; bf16 and fp16 are
    autocast, fp16 with a scaled loss."""
    compile: bool = False
    """Compile the model with torch.compile, for static shapes."""
    deterministic: bool = False
    """Only operators that repeat bitwise. A CPU run repeats anyway; a GPU run gets slower."""
    threads: int | None = None
    """CPU threads of PyTorch, or its own choice. Another number rounds differently."""
    workers: int | Literal["auto"] = "auto"
    """Processes that prepare batches; 0: the main process does. auto: one for each core where
    files are decoded or cropped, else 0. Results do not depend on it."""
    keep_freed_memory: bool = True
    """Linux CPUs: keep freed memory for the next step; faster, and takes somewhat more of it."""
    checkpoint_every: int = 200
    """Steps between checkpoints. 0: only at the end or when interrupted, and no best.pt."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep, apart from the best."""
    log_every: int = 10
    """Steps between lines in the log."""
    evaluate: Path | None = None
    """Train nothing: measure these weights (.pt or .safetensors) on the test part."""
    dry_run: bool = False
    """Take a few dozen samples through everything that a run does, in seconds; keep nothing."""
    overfit_batch: bool = False
    """Learn one batch by heart: fails if the model cannot."""
    profile: bool = False
    """Write a torch.profiler trace of a few steps into the run folder."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, a line each. A script's own class adds to it."""
        yield from self.outside(0, math.inf, "seed")
        yield from self.outside(0, LARGEST, "checkpoint_every")
        yield from self.outside(1, LARGEST, "epochs", "keep_checkpoints", "log_every")
        yield from self.outside(0, LARGEST, "workers")
        yield from self.outside(1, 1024, "threads")
        modes = [flag(mode) for mode in MODES if getattr(self, mode)]
        if len(modes) > 1:
            yield f"{' and '.join(modes)} exclude each other"

    def outside(self, low: float, high: float, *names: str) -> Iterator[str]:
        """A line for each of these settings that is set and not between `low` and `high`."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, str):  # a word, such as auto
                continue
            if value is not None and not (low <= value <= high and value < math.inf):  # nor NaN
                no_end = high == math.inf or (high == LARGEST and value < low)
                bounds = f"≥ {low}" if no_end else f"between {low} and {high}"
                bounds += " and finite" if value == math.inf else ""
                yield f"{flag(name)} must be {bounds}, got {value}"

    def ignored(self, why: str, *names: str) -> Iterator[str]:
        """A line for each of these settings that is not at its default: it would do nothing."""
        for name in names:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                yield f"{flag(name)} {value}: {why}"


ConfigT = TypeVar("ConfigT", bound=RunConfig)


def parse(cls: type[ConfigT], argv: Sequence[str], prog: str, description: str) -> ConfigT:
    """Read settings from a command line and from the files that it leads to.

    `--help`, and a flag that does not exist or does not parse, end the program as argparse does.

    Raises:
        UserError: a file cannot be read or has an unknown key or a bad value, or values do not
            go together; all that is wrong is named at once.
    """
    import tyro

    def read(default: ConfigT) -> ConfigT:
        return tyro.cli(cls, args=argv, default=default, prog=prog, description=description)

    config = read(cls())
    of_file = read_file(config.config) if config.config else {}
    config = read(_apply(cls(), of_file, config.config))
    changes: list[str] = []
    if config.run_dir and config.resume == "auto":
        file = config.run_dir / CONFIG_FILE
        of_run = read_file(file, missing_ok=True)
        of_run.pop("resume", None)  # where that run came from; it goes on from its own folder
        before = _apply(cls(), of_run, file)
        default = _apply(before, of_file, config.config)
        config = read(default)
        changes = list(_changes(before, default, config)) if of_run else []
    if problems := list(config.problems()):
        raise UserError("; ".join(problems))
    for change in changes:
        print(change)
    return config


def _changes(before: RunConfig, default: RunConfig, now: RunConfig) -> Iterator[str]:
    """A line for each setting of a continued run that is not what it was: old, new, and source.

    Args:
        before: settings that the run had.
        default: the same with those of a file on top.
        now: the same with the flags on top.
    """
    had, with_file, has = as_dict(before), as_dict(default), as_dict(now)
    for name in sorted(had.keys() | has.keys()):
        if has.get(name) != had.get(name):
            by_file = has.get(name) == with_file.get(name)
            source = now.config if by_file else "the command line"
            yield f"{flag(name)} is {has.get(name)} from {source}; the run had {had.get(name)}"


def flag(name: str) -> str:
    """The name of a setting as it is written on a command line."""
    return "--" + name.replace("_", "-")


def as_dict(config: RunConfig) -> dict[str, Any]:
    """Settings as plain values, to make a run like this one.

    Left out are where this run's settings and files are, and what was to be done instead of
    training. None, which TOML has not, is left out where it is the default, and else a word.
    """
    values: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in ("config", "run_dir", *MODES) or value is field.default is None:
            continue
        values[field.name] = str(value) if value is None or isinstance(value, Path) else value
    return values


def write_file(path: Path, config: RunConfig) -> None:
    """Write settings as TOML; `--config` reads them back."""
    import tomli_w

    with atomic_write(path) as file:
        tomli_w.dump(as_dict(config), file)


def read_file(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Read a TOML file; one that may be missing and is counts as empty.

    Raises:
        UserError: it is not there, cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing_ok:
            return {}
        raise UserError(f"{path}: {error.strerror}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not TOML: {error}") from None


def _apply(config: ConfigT, values: Mapping[str, Any], source: Path | None) -> ConfigT:
    """Replace settings by the values of a file, which are read as the flags would be."""
    hints = {f.name: f.type for f in fields(config) if f.name != "config"}
    changes: dict[str, Any] = {}
    problems = []
    for name, value in values.items():
        if name not in hints:
            near = difflib.get_close_matches(name.replace("-", "_"), hints, n=1)
            problems.append(f"unknown key {name}" + (f"; did you mean {near[0]}?" if near else ""))
            continue
        hint = hints[name]
        try:
            changes[name] = _read_value(name, value, hint, getattr(config, name))
        except SystemExit:  # tyro's way to say no
            expected = hint.__name__ if isinstance(hint, type) else str(hint)
            expected = expected.replace("typing.", "")
            problems.append(f"{name} = {value!r} is not a value of {expected}")
    if problems:
        raise UserError(f"{source}: {'; '.join(problems)}")
    return replace(config, **changes)


def _read_value(name: str, value: Any, hint: Any, default: Any) -> Any:
    """Read one setting as tyro reads it from a command line that has only this flag."""
    import tyro

    one_setting = make_dataclass("Setting", [(name, hint, default)])
    complaint = io.StringIO()
    with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(complaint):
        return getattr(tyro.cli(one_setting, args=_as_flags(name, value)), name)


def _as_flags(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{flag(name)[2:]}"]
    if isinstance(value, list | dict):  # no setting is one, and as text some would take it
        return [flag(name), "--"]
    return [f"{flag(name)}={value}"]
