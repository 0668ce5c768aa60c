"""Axes, workloads and switches: tables that fit together."""

from dataclasses import fields

import pytest

from bench.axes import AXES, CONTROL, Axis, cases_of
from bench.switches import Facts, Switches
from bench.workloads import WORKLOADS
from refs import sequence_lstm, vision_resnet_distributed

CPU = Facts("cpu", 1, 16 << 30, tf32=False, bf16=True, fp16=False, cores=2)
GPU = Facts("cuda", 8, 140 << 30, tf32=True, bf16=True, fp16=True, cores=16)


def test_every_axis_of_the_method_is_there():
    assert set(AXES) >= {
        "parallel", "precision", "memory_format", "cudnn_benchmark", "compile", "checkpointing",
        "varlen", "loader", "stack",
    }  # fmt: skip


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_cases_of_an_axis_have_names_of_their_own(axis):
    for name in axis.workloads:
        cases = list(cases_of(axis, WORKLOADS[name]))
        assert [case.role for case in cases[:2]] == ["baseline", "control"]
        assert cases[0].switches == cases[1].switches
        assert len({case.name for case in cases}) == len(axis.variants) + 1
        others = [case.switches for case in cases[2:]]
        assert cases[0].switches not in others
        assert len(set(others)) == len(others)


@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_a_large_gpu_box_can_run_all_but_what_is_for_cpus(axis):
    for name in axis.workloads:
        for case in cases_of(axis, WORKLOADS[name]):
            reason = case.why_not(GPU, WORKLOADS[name].batch_large)
            assert reason is None or axis.name == "allocator" or "loss" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "tf32"}, "compute capability 8.0"),
        ({"precision": "fp16"}, "no float16 arithmetic here"),
        ({"cudnn_benchmark": True}, "cuDNN is for NVIDIA GPUs"),
        ({"parallel": "dp", "devices": 2}, "DataParallel needs two CUDA devices"),
        ({"parallel": "ddp", "devices": 4}, "needs 4 cores, and there is 2"),
        ({"compile": "max-autotune"}, "kernels of GPUs"),
        ({"pinned": False}, "memory is pinned for copies to a GPU"),
        ({"precision": "bf16"}, None),
        ({"parallel": "ddp", "devices": 2}, None),
    ],
)
def test_what_a_cpu_cannot_run_has_a_reason(changes, reason):
    found = Switches().but(changes).why_not(CPU)
    assert found is None if reason is None else reason in found


def test_a_gpu_that_lacks_something_is_told_apart():
    old = GPU._replace(devices=1, tf32=False, bf16=False)
    assert "no bfloat16" in Switches(precision="bf16").why_not(old)
    assert "TF32 needs" in Switches(precision="tf32").why_not(old)
    assert "needs 2 devices, and there is 1" in Switches(parallel="ddp", devices=2).why_not(old)
    assert "two CUDA devices" in Switches(parallel="dp", devices=2).why_not(old)
    assert "CPU" in Switches(keep_freed_memory=False).why_not(GPU)


def test_wrong_tables_are_refused():
    with pytest.raises(ValueError, match="no such switch: presicion"):
        Axis("a", "?", {"b": {}, "c": {"presicion": "bf16"}}, ("lstm",))
    with pytest.raises(ValueError, match="no such workload: lstn"):
        Axis("a", "?", {"b": {}}, ("lstn",))


def test_settings_of_workloads_are_those_of_their_references():
    configs = {
        "vision": vision_resnet_distributed.Config, "sequences": sequence_lstm.Config,
    }  # fmt: skip
    for workload in WORKLOADS.values():
        known = {field.name for field in fields(configs[workload.recipe])}
        assert workload.settings.keys() <= known
        assert list(configs[workload.recipe](**workload.settings).problems()) == [] or (
            workload.recipe == "sequences"  # whose lengths are for synthetic data
        )


def test_the_control_is_no_name_of_a_variant():
    assert all(CONTROL not in axis.variants for axis in AXES.values())
