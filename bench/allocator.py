"""What the allocator setting of Linux CPUs gains in a training step of the vision reference.

    python -m bench.allocator

Each launch is a process of its own, since identical processes differ; launches with and without
the setting take turns, so that a drift of the machine falls on both alike. The last line is JSON.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from shared import environment


@dataclass(frozen=True)
class Config:
    """What to measure, and how often."""

    launches: int = 6
    """Processes with the setting, and as many without."""
    steps: int = 20
    """Timed training steps of a process."""
    warmup: int = 5
    """Steps before these."""
    batch_size: int = 128
    """Images of 32x32 in a step."""


def measure(keep_freed_memory: bool, config: Config) -> float:
    """Samples per second of the reference's training step, in this process."""
    from refs import vision_resnet
    from shared.data import images
    from shared.data.sampling import SampleKey
    from shared.data.splits import spread
    from shared.runs import set_up_process
    from shared.training import make_optimizer

    settings = vision_resnet.Config(
        device="cpu", data="synthetic", stem="imagenet", keep_freed_memory=keep_freed_memory
    )
    device = set_up_process(settings)
    part = spread(images.load(settings).train, config.batch_size)
    about = vision_resnet.describe(part, settings)
    model = vision_resnet.build_model(about, settings, device)
    optimizer = make_optimizer(model, settings)
    prepare = vision_resnet.make_preparation(about, part, settings, device)
    batch = prepare(part.__getitems__([SampleKey(0, sample) for sample in range(len(part))]))
    for step in range(config.warmup + config.steps):
        if step == config.warmup:
            began = time.perf_counter()
        vision_resnet.train_step(model, optimizer, batch, settings, step)
    return config.steps * batch.samples / (time.perf_counter() - began)


def launch(keep_freed_memory: bool, config: Config) -> float:
    """Measure in a new process."""
    code = (
        "from bench.allocator import *; "
        f"print(measure({keep_freed_memory}, Config(**{asdict(config)})))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def summary(rates: list[float]) -> dict[str, Any]:
    """Samples per second of several launches: mean, and standard deviation between them."""
    return {
        "mean": statistics.mean(rates),
        "std": statistics.stdev(rates) if len(rates) > 1 else None,
        "launches": rates,
    }


def main(config: Config) -> dict[str, Any]:
    """Measure both, in turns, and print what came out."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(config.launches):
        for keep in (False, True) if turn % 2 == 0 else (True, False):
            rates[keep].append(launch(keep, config))
            print(f"keep_freed_memory={keep}: {rates[keep][-1]:,.0f} samples/s", flush=True)
    off, on = summary(rates[False]), summary(rates[True])
    print(f"gain: {on['mean'] / off['mean']:.2f} times")
    return {
        "off": off,
        "on": on,
        "ratio": on["mean"] / off["mean"],
        "config": asdict(config),
        "machine": environment.machine(),
        "subject": environment.subject(),
    }


if __name__ == "__main__":
    import tyro

    print(json.dumps(main(tyro.cli(Config, description=__doc__)), allow_nan=False))
