"""Short runs that show a fault before the long one is begun."""

import gc
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shared.data.sampling import smallest_micro_batch
from shared.data.splits import PartT, Splits, spread
from shared.distributed import world_size
from shared.errors import UserError
from shared.settings import ConfigT
from shared.training import TrainingConfig

DRY_RUN_SAMPLES = 48
"""Samples of each part that a dry run takes."""

OVERFIT_EPOCHS = 100
"""Steps, of one batch each, in which a batch has to be learnt by heart."""


def shorten(splits: Splits[PartT], config: TrainingConfig) -> Splits[PartT]:
    """What of the data a short run takes: some of each part, or one batch for all; else all.

    Raises:
        UserError: the training part does not fill a single batch, or the last batch has not a
            sample for each process.
    """
    size = len(splits.train)
    if config.batch_size > size:
        raise UserError(f"--batch-size {config.batch_size}: there are {size} training samples")
    if config.dry_run:
        splits = splits.spread(DRY_RUN_SAMPLES)
    if config.overfit_batch:
        splits = Splits(*[spread(splits.train, config.batch_size)] * 3)
    if not smallest_micro_batch(len(splits.train), config.batch_size, config.accumulate):
        raise UserError(
            f"--batch-size {config.batch_size}: the smallest batch of {len(splits.train)} samples "
            f"has less than one for each of {world_size()} processes; choose another"
        )
    return splits


def dry_run(train: Callable[[ConfigT], dict[str, Any]], config: ConfigT) -> dict[str, Any]:
    """Take a run's whole path on a few samples: two epochs, the second by continuing the first.

    Args:
        train: the function that trains; it takes `DRY_RUN_SAMPLES` of each part.
        config: the settings of the long run.
    """
    with tempfile.TemporaryDirectory(prefix="dry-run-") as folder:
        for epochs in (1, 2):
            result = train(replace(config, run_dir=Path(folder), epochs=epochs, resume="auto"))
            gc.collect()  # ends loaders' workers now: one forked later would trip over them
    print(
        "dry run passed: training, validation, checkpoint, resuming, export and test went through"
    )
    return {**result, "run_dir": None, "passed": True}


def overfit(train: Callable[[ConfigT], dict[str, Any]], config: ConfigT) -> dict[str, Any]:
    """Learn one batch by heart: a model that cannot has a fault that no data will mend.

    Args:
        train: the function that trains; it takes one batch for every part of the data.
        config: the settings, without what makes learning by heart harder.
    """
    result = train(replace(config, epochs=OVERFIT_EPOCHS, checkpoint_every=0))
    passed = result["test_accuracy"] == 1.0
    print(f"overfit-batch {'passed' if passed else 'FAILED'}: {result['test_accuracy']:.1%} learnt")
    return {**result, "passed": passed}
