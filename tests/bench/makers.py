"""Things to measure that are not training steps: of a known length, or with a planted fault.

A worker imports this by name. What a variant is shows in its switches, which mean nothing else.
"""

import math
import time

import torch
from torch import nn

from bench.measuring.spec import Spec
from shared.runs import StepResult

STEP = 0.004
"""Seconds of a plain step."""
BIG = 1 << 29
"""Bytes."""
FAULTS = {
    "slower": {"checkpointing": "full"},
    "raises": {"compile": "default"},
    "hangs": {"bucket": False},
    "nan": {"channels_last": True},
    "wrong": {"varlen": "packed"},
    "hog": {"source": "loader"},
    "unsynchronised": {"augmentation": "device"},
    "big": {"workers": 1},
}
"""Variants of an axis, by what is wrong with them."""


class Spin:
    """Steps that keep one core busy for a known time."""

    samples, cycle, waited = 8, 1, 0.0

    def __init__(self, spec: Spec) -> None:
        faults = {tuple(changes.items()): fault for fault, changes in FAULTS.items()}
        self._fault = faults.get(tuple(spec.switches.changed().items()))
        if spec.kind == "float64":
            self._fault = None
        torch.manual_seed(0)
        dtype = torch.float64 if spec.kind == "float64" else torch.float32
        self.model = nn.Linear(4, 4).to(dtype)
        self._inputs = torch.ones(8, 4, dtype=dtype)
        self._steps = 0
        self._busy_until = 0.0

    def step(self) -> StepResult:
        self._steps += 1
        self.model.zero_grad()
        loss = self.model(self._inputs).square().mean()
        loss.backward()
        match self._fault:
            case "raises" if self._steps > 8:
                raise ArithmeticError("planted")
            case "hangs" if self._steps > 8:
                time.sleep(1000)
            case "nan" if self._steps > 8:
                loss = loss * math.nan
            case "wrong":
                self.model.weight.grad *= 1.1
            case "hog":
                self._kept = torch.ones(1 << 33, dtype=torch.uint8)
            case "big":
                self._kept = torch.ones(BIG, dtype=torch.uint8)
        if self._fault == "unsynchronised":
            self._busy_until = max(self._busy_until, time.perf_counter()) + STEP
            return StepResult(Later(loss.detach(), self._busy_until), loss, loss)
        spin(STEP * (2 if self._fault == "slower" else 1))
        return StepResult(loss.detach(), loss, loss)


class Later:
    """A number that a device is still computing."""

    def __init__(self, value: torch.Tensor, ready: float) -> None:
        self._value, self._ready = value, ready

    def __float__(self) -> float:
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return float(self._value)


def spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def make(spec: Spec) -> Spin:
    return Spin(spec)


class Work:
    """Real work on one core, and for one variant a known share more of it, by CPU time."""

    samples, cycle, waited = 8, 1, 0.0

    def __init__(self, spec: Spec) -> None:
        self.model = nn.Linear(256, 256).double()
        self._inputs = torch.ones(256, 256, dtype=torch.float64)
        self._more = 0.05 if spec.switches.checkpointing == "selective" else 0.0

    def step(self) -> StepResult:
        began = time.thread_time()
        self.model.zero_grad()
        loss = self.model(self._inputs).square().mean()
        loss.backward()
        for _ in range(3):
            self._inputs @ self._inputs
        until = began + (1 + self._more) * (time.thread_time() - began)
        while time.thread_time() < until:
            pass
        return StepResult(loss.detach(), loss, loss)


def make_work(spec: Spec) -> Work:
    return Work(spec)
