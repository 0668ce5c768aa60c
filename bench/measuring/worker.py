"""The measuring process: builds one case, warms it up, and times blocks of steps on request.

    python -m bench.measuring.worker SPEC.json

`bench.measuring.spec` says what it reads and writes. Under torchrun all ranks run it: rank 0 speaks
with the conductor, and the others follow.
"""

import gc
import importlib
import json
import math
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measuring import numerics
from bench.measuring.clock import make_clock
from bench.measuring.describe import describe
from bench.measuring.spec import PROTOCOL, Spec
from bench.measuring.subject import Subject
from bench.measuring.telemetry import Telemetry
from shared import distributed, memory
from shared.devices import choose_device
from shared.interruption import end_with_parent
from shared.program import is_out_of_memory
from shared.settings import RunConfig

WINDOW = 5
"""Steps that are looked at together in warm-up; two, if they take longer than `LONG_STEP`."""
LONG_STEP = 0.25
"""Seconds."""
STEADY = 0.02
"""Warm-up is over when the last window is not this much faster than the one before it."""
LONGEST_WARM_UP = 60.0
"""Seconds."""
SHORTEST_WARM_UP = 0.5
"""Seconds."""
DRAINED = 0.05
"""Share of a block that the device may still be at work after its time was taken."""


class Channel:
    """Lines of JSON to and from the conductor; everything else that is printed is an error's."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, event: str, **values: Any) -> None:
        """Tell the conductor; on rank 0 alone."""
        if distributed.is_main():
            self._out.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")
            self._out.flush()

    def send_failure(self, status: str, reason: str) -> None:
        """Tell the conductor why this process ends, whichever rank it is."""
        self._out.write(json.dumps({"event": "failed", "status": status, "reason": reason}) + "\n")
        self._out.flush()

    def commands(self) -> Iterator[dict[str, Any]]:
        """What the conductor asks for, until it has gone; the same in all ranks."""
        while True:
            line = distributed.on_main(sys.stdin.readline)
            if not line:
                return
            yield json.loads(line)


class Measurement:
    """One case in this process, or in this rank of a group."""

    def __init__(self, spec: Spec) -> None:
        began = time.perf_counter()
        self.device = choose_device(spec.device)
        self._spec = spec
        module, _, function = spec.maker.partition(":")
        make: Callable[[Spec], Subject] = getattr(importlib.import_module(module), function)
        self.subject = make(spec)
        self.build_seconds = time.perf_counter() - began
        self._telemetry = Telemetry(self.device)

    def ready(self) -> dict[str, Any]:
        """Make the first steps, compare them with float64, and warm up."""
        memory.reset_peak(self.device)
        began = time.perf_counter()
        losses = [self._step()]
        seconds, cold = time.perf_counter() - began, self._peaks()
        compared = None
        if self._spec.numerics is not None:
            exact = Path(self._spec.numerics)
            error = numerics.gradient_error(self.subject.model, exact)
            losses += [self._step() for _ in range(numerics.STEPS - 1)]
            compared = numerics.judge(losses, error, self._spec.switches.precision, exact)
        return {
            "build_s": self.build_seconds,
            "first_step_s": seconds,
            "cold_memory": cold,
            "numerics": compared,
            **self._warm_up(),
            "compile": _compilations(),
        }

    def _step(self) -> float:
        """Make a step and wait for it; its loss.

        Raises:
            ValueError: the loss is not finite.
        """
        return checked(float(self.subject.step().loss))

    def _warm_up(self) -> dict[str, Any]:
        """Make steps until they do not get faster any more."""
        began = time.perf_counter()
        seconds = [self._timed_step()]
        # All ranks make the same number of steps.
        window = distributed.on_main(lambda: 2 if seconds[0] > LONG_STEP else WINDOW)
        window = max(window, self.subject.cycle)
        while True:
            seconds += [self._timed_step() for _ in range(window)]
            spent = time.perf_counter() - began
            steady = _is_steady(seconds, window)
            enough = spent >= LONGEST_WARM_UP or (steady and spent >= SHORTEST_WARM_UP)
            if distributed.on_main(lambda over=enough: over):  # type: ignore[misc]
                return {
                    "warm_up_steps": len(seconds),
                    "warm_up_s": spent,
                    "steady": steady,
                    "step_s": statistics.median(seconds[-window:]),
                }

    def _timed_step(self) -> float:
        began = time.perf_counter()
        self._step()
        return time.perf_counter() - began

    def block(self, steps: int) -> dict[str, Any]:
        """Time some steps, after one that is not timed.

        Returns:
            `step_s`: mean seconds of a step, of the slowest rank, from the first to the end of the
            last; `steps_s`: of each; and what else was seen.
        """
        gc.collect()
        gc.disable()  # a collection now and then is the same work in all variants, and noise
        self._step()
        memory.reset_peak(self.device)
        compiled, waited = _compilations(), self.subject.waited
        clock = make_clock(self.device)
        distributed.largest(0)  # ranks begin together
        with self._telemetry.watching() as seen:
            clock.mark()
            for _ in range(steps):
                result = self.subject.step()
                clock.mark()
            each = clock.seconds()
            ended = time.perf_counter()
            checked(float(result.loss))
            drain = time.perf_counter() - ended
        gc.enable()
        slowest, rank_spread = _over_ranks(each)
        total = sum(slowest)
        return {
            "step_s": total / steps,
            "steps_s": slowest,
            "rank_spread": rank_spread,
            "samples": steps * self.subject.samples,
            "memory": self._peaks(),
            "recompilations": _compilations()["graphs"] - compiled["graphs"],
            "data_wait": (self.subject.waited - waited) / total,
            "unsynchronised": drain > DRAINED * total,
            "telemetry": seen,
        }

    def park(self) -> dict[str, Any]:
        """Give back what is cached; weights stay."""
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        return self._peaks()

    def _peaks(self) -> dict[str, int | None]:
        """Peaks of memory in bytes, of the largest rank."""
        found = {**memory.peak_memory(self.device), "driver_used": _driver_used(self.device)}
        return {k: None if v is None else distributed.largest(v) for k, v in found.items()}


def checked(loss: float) -> float:
    """A loss that is a number.

    Raises:
        ValueError: it is not.
    """
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss}")
    return loss


def _driver_used(device: torch.device) -> int | None:
    """Bytes of a card that are in use, by whomever."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _is_steady(seconds: list[float], window: int) -> bool:
    if len(seconds) < 2 * window:
        return False
    last, before = seconds[-window:], seconds[-2 * window : -window]
    return statistics.median(last) >= (1 - STEADY) * statistics.median(before)


def _over_ranks(seconds: list[float]) -> tuple[list[float], float | None]:
    """The slowest rank of each step; and how much faster the fastest is, as a share, on average."""
    if distributed.world_size() == 1:
        return seconds, None
    of_all: list[Any] = [None] * distributed.world_size()
    dist.all_gather_object(of_all, seconds)
    steps = list(zip(*of_all, strict=True))
    slowest = [max(step) for step in steps]
    spreads = [(max(step) - min(step)) / max(step) for step in steps]
    return slowest, statistics.mean(spreads)


def _compilations() -> dict[str, int]:
    """What torch.compile has done so far, without loading the compiler where nobody has."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return {"graphs": 0, "breaks": 0}
    counters = dynamo.counters
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def measure(spec: Spec, channel: Channel) -> None:
    """Get ready, then do what the conductor asks for."""
    measurement = Measurement(spec)
    subject = measurement.subject
    channel.send(
        "ready",
        protocol=PROTOCOL,
        parameters=sum(parameter.numel() for parameter in subject.model.parameters()),
        samples=subject.samples,
        cycle=subject.cycle,
        torch=str(torch.__version__),
        **measurement.ready(),
    )
    for command in channel.commands():
        match command["command"]:
            case "block":
                channel.send("block", **measurement.block(command["steps"]))
            case "park":
                channel.send("parked", memory=measurement.park())
            case other:
                raise ValueError(f"no such command: {other}")


def compute_exactly(spec: Spec, channel: Channel) -> None:
    """Make the first steps in float64, keep them, and count the operations of one."""
    assert spec.numerics is not None
    subject = Measurement(spec).subject
    losses = [float(subject.step().loss)]
    first = numerics.gradients(subject.model)
    losses += [float(subject.step().loss) for _ in range(numerics.STEPS - 1)]
    numerics.save(losses, first, Path(spec.numerics))
    channel.send("exact", losses=losses, flop_per_step=count_flop(subject))


def count_flop(subject: Subject) -> float:
    """Operations of a step, forward and backward, mean over a cycle of batches.

    Those of matrix products and convolutions, a multiplication and an addition being two; what a
    model needs, whatever a variant makes of it.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        for _ in range(subject.cycle):
            subject.step()
    return counter.get_total_flops() / subject.cycle


def run(spec: Spec, channel: Channel) -> None:
    """Do what a spec asks for."""
    if spec.memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (spec.memory_limit, spec.memory_limit))
    match spec.kind:
        case "measure":
            measure(spec, channel)
        case "float64":
            compute_exactly(spec, channel)
        case "describe":
            if spec.threads is not None:
                torch.set_num_threads(spec.threads)
            channel.send("described", **describe(choose_device(spec.device)))


def main(path: Path) -> int:
    """Work through a spec, and tell the conductor how it ended."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        end_with_parent(signal.SIGKILL)  # of a group torchrun takes care
    channel = Channel()
    spec = Spec.read(path)
    frame = RunConfig(device=spec.device)
    try:
        distributed.together(lambda _: run(spec, channel))(frame)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the end of one row
        traceback.print_exc()
        status = "oom" if is_out_of_memory(error) else "failed"
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        channel.send_failure(status, reason)
        return 1
    return 0


if __name__ == "__main__":
    distributed.leave(main(Path(sys.argv[1])))
