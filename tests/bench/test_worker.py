"""The measuring process from inside: what is built, how long it warms up, what a block says."""

import math
import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.measuring import clock, describe, numerics, subject, telemetry, worker
from bench.measuring.spec import Spec
from bench.switches import Switches
from bench.workloads import WORKLOADS
from refs import vision_resnet_distributed
from shared import nvml
from shared.runs import StepResult

CPU = torch.device("cpu")
PLAIN = Spec("measure", "cpu", threads=1, workload=WORKLOADS["encoder"], batch_size=4)


@pytest.fixture(autouse=True)
def _settings_of_the_process():
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


def of(workload: str, batch_size: int = 4, **switches) -> Spec:
    changed = Switches().but(switches)
    return replace(PLAIN, workload=WORKLOADS[workload], batch_size=batch_size, switches=changed)


# What is built


def compared_with_float64(spec: Spec, folder) -> dict:
    file = folder / "exact.safetensors"
    same = spec.switches.computing_the_same()
    exact = subject.make(replace(spec, kind="float64", switches=same))
    losses = [float(exact.step().loss)]
    gradients = numerics.gradients(exact.model)
    losses += [float(exact.step().loss) for _ in range(numerics.STEPS - 1)]
    numerics.save(losses, gradients, file)
    mine = subject.make(spec)
    own = [float(mine.step().loss)]
    error = numerics.gradient_error(mine.model, file)
    own += [float(mine.step().loss) for _ in range(numerics.STEPS - 1)]
    return numerics.judge(own, error, spec.switches.precision, file)


@pytest.mark.parametrize(
    "spec",
    [
        of("resnet18-32"),
        of("resnet18-32", channels_last=True),
        of("resnet18-32", changing_sizes=True),
        of("resnet18-32", checkpointing="selective"),
        of("resnet18-32-7x7", 8, source="loader", augmentation="device"),
        of("resnet18-32-7x7", 8, source="loader", augmentation="workers", workers=1),
        of("lstm"),
        of("lstm", varlen="packed", bucket=False),
        of("encoder", checkpointing="full"),
        of("encoder", checkpointing="selective"),
        of("resnet50-224", 2, checkpointing="full"),
    ],
    ids=lambda spec: f"{spec.workload.name}-{'-'.join(spec.switches.changed())}",
)
def test_first_steps_of_every_workload_are_those_of_float64(spec, tmp_path):
    found = compared_with_float64(spec, tmp_path)
    assert found["passed"], found
    assert found["gradient_error"] < found["gradient_tolerance"] / 4, "so there is room"


def test_another_computation_is_not_within_the_tolerances(tmp_path, monkeypatch):
    script = vision_resnet_distributed
    step = script.train_step

    def wrong(model, optimizer, scaler, batch, *rest):
        labels = batch.labels.clone()
        labels[0] = (labels[0] + 1) % 10
        return step(model, optimizer, scaler, batch._replace(labels=labels), *rest)

    spec = of("encoder", 32)
    right = compared_with_float64(spec, tmp_path)
    file = tmp_path / "exact.safetensors"
    monkeypatch.setattr(script, "train_step", wrong)
    mine = subject.make(spec)
    losses = [float(mine.step().loss) for _ in range(numerics.STEPS)]
    found = numerics.judge(losses, right["gradient_error"], "fp32", file)
    assert not found["passed"], "one label of 32"


def test_a_loss_that_is_no_number_does_not_pass(tmp_path):
    file = tmp_path / "exact.safetensors"
    numerics.save([1.0, 1.0, 1.0], {}, file)
    found = numerics.judge([1.0, math.nan, 1.0], 0.0, "fp32", file)
    assert not found["passed"]
    assert found["losses"] == [1.0, None, 1.0]
    assert found["loss_error"] is None


def test_data_parallel_is_what_the_reference_makes_of_it(monkeypatch):
    monkeypatch.setattr(vision_resnet_distributed, "_cuda_devices", lambda device: 2)
    wrapped = []
    data_parallel = nn.DataParallel

    def wrap(model):
        wrapped.append(model)
        return data_parallel(model)

    monkeypatch.setattr(vision_resnet_distributed, "DataParallel", wrap)
    mine = subject.make(of("resnet18-32", parallel="dp", devices=2))
    plain = subject.make(of("resnet18-32"))
    assert wrapped == [mine.model]
    assert float(mine.step().loss) == pytest.approx(float(plain.step().loss), rel=1e-5)


def test_cudnn_is_told(monkeypatch):
    for wanted in (True, False):
        subject.make(of("resnet18-32", cudnn_benchmark=wanted))
        assert torch.backends.cudnn.benchmark is wanted


def test_operations_are_those_of_the_model(tmp_path):
    """Forward 2 a parameter and frame for layers, and twice that backward; attention on top."""
    spec = replace(of("encoder"), kind="float64")
    encoder = subject.make(spec)
    layers = [m for m in encoder.model.modules() if isinstance(m, nn.Linear)]
    weights = sum(layer.weight.numel() for layer in layers if layer.out_features > 10)
    least = 6 * weights * 4 * 128
    assert least * 0.95 < worker.count_flop(encoder) < least * 1.5


# Warm-up and blocks


class Steps:
    """Steps of given lengths, the last of which goes on for ever."""

    samples, cycle, waited = 4, 1, 0.0

    def __init__(self, *seconds: float) -> None:
        self.model = nn.Linear(1, 1)
        self._seconds = list(seconds)
        self.made = 0

    def step(self) -> StepResult:
        self.made += 1
        time.sleep(self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0])
        return StepResult(torch.ones(()), torch.ones(()), torch.ones(()))


def measuring(monkeypatch, steps) -> worker.Measurement:
    monkeypatch.setattr(subject, "make", lambda spec: steps)
    return worker.Measurement(PLAIN)


def test_what_is_slow_at_first_is_not_in_a_block(monkeypatch):
    steps = Steps(*[0.05] * 7, 0.001)
    measurement = measuring(monkeypatch, steps)
    ready = measurement.ready()
    assert ready["steady"]
    assert ready["warm_up_steps"] > 6
    assert ready["first_step_s"] >= 0.05
    assert max(measurement.block(20)["steps_s"]) < 0.04


def test_a_block_counts_its_own_steps_and_one_before(monkeypatch):
    steps = Steps(0.001)
    measurement = measuring(monkeypatch, steps)
    block = measurement.block(5)
    assert steps.made == 6
    assert len(block["steps_s"]) == 5
    assert block["samples"] == 20
    assert block["step_s"] == pytest.approx(sum(block["steps_s"]) / 5)
    assert block["rank_spread"] is None


def test_waiting_for_data_is_a_share(monkeypatch):
    class Waiting(Steps):
        def step(self) -> StepResult:
            self.waited += 0.0005
            return super().step()

    assert measuring(monkeypatch, Waiting(0.002)).block(10)["data_wait"] < 0.3
    assert measuring(monkeypatch, Steps(0.002)).block(10)["data_wait"] == 0


def test_what_is_compiled_in_a_block_is_counted(monkeypatch):
    class Growing(Steps):
        def __init__(self) -> None:
            super().__init__(0.0)
            torch.compiler.reset()
            self._double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)

        def step(self) -> StepResult:
            self._double(torch.ones(self.made + 2))
            return super().step()

    assert measuring(monkeypatch, Growing()).block(3)["recompilations"] == 3
    assert measuring(monkeypatch, Steps(0.0)).block(3)["recompilations"] == 0


@pytest.mark.stress
def test_a_block_takes_as_long_as_a_loop_that_is_written_by_hand():
    """Within 1 %, as the median of pairs of blocks."""
    measurement = worker.Measurement(of("encoder", 8))
    measurement.ready()
    ratios = []
    for pair in range(30):
        seconds = {}
        for who in ("harness", "hand") if pair % 2 else ("hand", "harness"):
            if who == "harness":
                seconds[who] = measurement.block(5)["step_s"]
            else:
                measurement.subject.step()
                began = time.perf_counter()
                for _ in range(5):
                    measurement.subject.step()
                seconds[who] = (time.perf_counter() - began) / 5
        ratios.append(seconds["harness"] / seconds["hand"])
    ratios.sort()
    print(f"harness over hand-written loop: {ratios[15]:.4f} ({ratios[3]:.3f} to {ratios[26]:.3f})")
    assert 0.99 < ratios[15] < 1.01


# What is read around a block


def test_events_of_a_device_are_read_when_it_is_done(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0.0

        def record(self) -> None:
            self.at = 3.0 * len(log)
            log.append("record")

        def elapsed_time(self, other: "Event") -> float:
            assert log[-1] == "synchronize", "not read before the device is done"
            return other.at - self.at

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: log.append("synchronize"))
    found = clock.make_clock(torch.device("cuda"))
    for _ in range(3):
        found.mark()
    assert found.seconds() == pytest.approx([0.003, 0.003])


def test_what_other_processes_use_is_told_apart():
    with telemetry.Telemetry(CPU).watching() as seen:
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            pass
    assert 0.5 < seen["cpu_own_cores"] < 1.5
    assert seen["cpu_other_cores"] >= 0
    assert seen["power_w"] is seen["throttled"] is seen["energy_j"] is None


def test_cards_are_read_by_name_and_unit(monkeypatch):
    energies = iter([1_000_000, 1_500_000])
    library = SimpleNamespace(
        NVMLError=ValueError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetTotalEnergyConsumption=lambda card: next(energies),
        nvmlDeviceGetPowerUsage=lambda card: 250_000,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: 0x4 | 0x1,
        nvmlDeviceGetClockInfo=lambda card, kind: {1: 1980, 2: 2600}[kind],
        nvmlDeviceGetTemperature=lambda card, kind: 41,
    )  # fmt: skip

    @contextmanager
    def opened():
        yield library, None

    monkeypatch.setattr(nvml, "opened", opened)
    monkeypatch.setattr(nvml, "card_at", lambda *_: "card")
    with telemetry.Telemetry(CPU).watching() as seen:
        pass
    card = {name: seen[name] for name in ("sm_mhz", "memory_mhz", "power_w", "energy_j")}
    assert card == {"sm_mhz": 1980, "memory_mhz": 2600, "power_w": 250.0, "energy_j": 500.0}
    assert (seen["temperature_c"], seen["throttled"]) == (41, ["power"])


def test_a_cpu_is_described(monkeypatch):
    monkeypatch.setattr(describe, "SECONDS", 0.05)
    monkeypatch.setitem(describe.MATRIX, "cpu", 128)
    found = describe.describe(CPU)
    assert found["facts"]["device"] == "cpu"
    assert found["facts"]["memory_bytes"] > 1e8
    assert found["peak_flop_per_s"]["fp32"] > 1e8
    assert "tf32" not in found["peak_flop_per_s"]
