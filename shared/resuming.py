"""What a run goes on from: its folder, the checkpoint in it; or weights that others have left."""

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared import settings
from shared.checkpoints import Checkpoints, load
from shared.distributed import on_main, run_name, world_size
from shared.errors import UserError
from shared.settings import RunConfig
from shared.state_dicts import read_weights


class Found(NamedTuple):
    """What the folder of a run holds at the start."""

    folder: Path
    saved: dict[str, Any] | None
    """The checkpoint that the run continues from."""
    source: Path
    """The file that it was read from."""
    result: dict[str, Any] | None
    """What the run ended with, if it has nothing left to do."""


def open_folder(config: RunConfig, name: str) -> Path:
    """Make the folder of a run, or find it.

    Args:
        config: the settings.
        name: of the script, for a folder that has no name yet.

    Raises:
        UserError: it cannot be made, or holds a run that the settings do not want continued.
    """
    started = run_name(os.environ) or f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = config.run_dir or Path("runs") / f"{name}-{started}"
    of_run = settings.read_file(folder / settings.CONFIG_FILE, missing_ok=True)
    if of_run and config.resume == "never":
        raise UserError(f"--resume never: {folder} holds a run already; name another --run-dir")
    if of_run and config.overfit_batch:
        raise UserError(f"--overfit-batch: {folder} holds a run already; name another --run-dir")
    if of_run and isinstance(config.resume, Path):
        is_again = of_run.get("resume") == str(config.resume)
        if not is_again and not _is_in(config.resume, folder):
            raise UserError(f"--resume {config.resume}: {folder} holds another run already")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {folder}: {error.strerror}") from None
    return folder


def _is_in(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def find(
    config: RunConfig, folder: Path, checkpoints: Checkpoints, last: Mapping[str, Any]
) -> Found:
    """See what the folder of a run holds, and say so.

    Args:
        config: the settings.
        folder: of the run.
        checkpoints: in it.
        last: the last event in its log.

    Raises:
        UserError: a run cannot continue from it with these settings.
    """
    found = _find_checkpoint(config, folder, checkpoints)
    if found is None:
        if last:
            print(f"{folder} has no checkpoint yet: from the beginning")
        return Found(folder, None, Path(), None)
    source, saved = found
    is_done = saved["progress"]["epoch"] >= config.epochs
    if is_done and saved["progress"]["samples"]:
        raise UserError(
            f"--epochs {config.epochs}: the run is already in the midst of "
            f"epoch {saved['progress']['epoch'] + 1}"
        )
    if is_done and last.get("event") == "result":
        print(f"{folder} is finished, and this was its result; more --epochs go on")
        return Found(folder, saved, source, last["result"])
    print(f"continuing from {source}")
    _tell_another_stream(config, saved)
    return Found(folder, saved, source, None)


def _find_checkpoint(
    config: RunConfig, folder: Path, checkpoints: Checkpoints
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to continue from, as the settings say, after its file."""
    found = checkpoints.newest()
    resume = config.resume
    # The same command again finds what the run has saved since it was started from a file.
    if isinstance(resume, Path) and (found is None or _is_in(resume, folder)):
        found = resume, load(resume)
    if found is None:
        return None
    source, saved = found
    if resume == "never":
        raise UserError(f"--resume never: {source} is of a run that was begun before")
    if not {"progress", "log_position", "config", "threads", "about"} <= saved.keys():
        raise UserError(f"{source}: holds weights alone, so no run can continue from it")
    _check_position(config, saved, source)
    return source, saved


def _check_position(config: RunConfig, saved: Mapping[str, Any], source: Path) -> None:
    """Refuse another order in the midst of an epoch, where a position would mean other samples.

    Raises:
        UserError: batches are buckets of another size, or have become or ceased to be buckets.
    """
    now, then = settings.as_dict(config), saved["config"]
    has_buckets = now.get("bucket", False) or then.get("bucket", False)
    if not has_buckets or not saved["progress"]["samples"]:
        return
    for name in ("bucket", "batch_size"):
        if now.get(name) != then.get(name):
            raise UserError(
                f"{settings.flag(name)} {now.get(name)}: {source} is from the midst of an "
                f"epoch in the order of {then.get(name)}; it can change where one ends"
            )


def _tell_another_stream(config: RunConfig, saved: Mapping[str, Any]) -> None:
    """Warn of settings with which what comes now is not what would have come."""
    now_and_then = {
        "seed": (config.seed, saved["config"].get("seed")),
        "batch_size": (
            settings.as_dict(config).get("batch_size"), saved["config"].get("batch_size")
        ),
        "threads": (torch.get_num_threads(), saved["threads"]),
        "processes": (world_size(), saved.get("processes", 1)),
    }  # fmt: skip
    for name, (now, then) in now_and_then.items():
        changed = "another stream" if name in ("seed", "batch_size") else "other roundings"
        if then != now:
            print(f"warning: {name} was {then} and is {now}: from here on {changed}")


def read_trained(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights, and what is known about them, from a checkpoint or an exported file.

    Raises:
        UserError: the file is not there, is damaged, or was not written by a reference.
    """
    weights, about = on_main(lambda: _read_file(path))
    if not weights or not isinstance(about, dict) or not {"model", "classes"} <= about.keys():
        raise UserError(f"{path}: not written by a reference: it says nothing about its weights")
    return weights, about


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if path.suffix == ".safetensors":
        return read_weights(path)
    saved = load(path)
    return (saved.get("ema") or saved).get("model", {}), saved.get("about", {})


def check_about(now: Mapping[str, Any], then: Mapping[str, Any], source: Path | str) -> None:
    """Compare what is needed now with what a file says about its weights.

    Raises:
        UserError: they differ, in the network or in the data.
    """
    for name in now:
        if now[name] != then.get(name):
            if name == "normalization":  # long lists
                raise UserError(f"{source}: its training data had other statistics: other data")
            if name == "classes":
                raise UserError(
                    f"{source}: its classes are {then.get(name)}, here they are {now[name]}; "
                    "--data and --data-dir choose the data"
                )
            raise UserError(f"{source}: its {name} is {then.get(name)}, here it is {now[name]}")
