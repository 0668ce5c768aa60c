"""The fingerprint of a machine and a subject, with stand-ins for the devices that are not here."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pynvml
import pytest
import torch

from shared import environment
from shared import nvml as management
from shared.environment import machine, subject, why_no_accelerator

GIB = 2**30


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


# --- stand-ins ----------------------------------------------------------------------------------


class Card(SimpleNamespace):
    """An NVIDIA card: what torch reports as properties, and what NVML answers."""

    def __init__(self, bus, **values):
        defaults = {
            "name": "NVIDIA H200",
            "memory": 141 * GIB,
            "power_mw": 700_500,
            "requested_mhz": {pynvml.NVML_CLOCK_SM: 1830, pynvml.NVML_CLOCK_MEM: 3201},
            "max_mhz": {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201},
            "links": [1] * 18,
        }
        super().__init__(bus=bus, **(defaults | values))

    @property
    def properties(self):
        return SimpleNamespace(
            name=self.name,
            total_memory=self.memory,
            major=9,
            minor=0,
            pci_domain_id=0,
            pci_bus_id=self.bus,
            pci_device_id=0,
        )


def answer(value):
    if value is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


class FakeNvml:
    """Install a pynvml whose functions are checked against the signatures of the real one."""

    def __init__(self, monkeypatch, cards=(), **system):
        self.cards = {f"00000000:{card.bus:02X}:00.0": card for card in cards}
        self.system = {"driver": "580.95.05", "cuda": 13000, "init": None, "p2p": {}} | system
        self.opened = 0
        functions = {
            "nvmlInit": self.init,
            "nvmlShutdown": self.shutdown,
            "nvmlSystemGetDriverVersion": lambda: answer(self.system["driver"]),
            "nvmlSystemGetCudaDriverVersion": lambda: answer(self.system["cuda"]),
            "nvmlDeviceGetCount": lambda: len(cards),
            "nvmlDeviceGetHandleByPciBusId": self.handle,
            "nvmlDeviceGetEnforcedPowerLimit": lambda card: answer(card.power_mw),
            "nvmlDeviceGetApplicationsClock": lambda card, kind: answer(card.requested_mhz[kind]),
            "nvmlDeviceGetMaxClockInfo": lambda card, kind: answer(card.max_mhz[kind]),
            "nvmlDeviceGetNvLinkState": self.link,
            "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: pynvml.NVML_TOPOLOGY_SYSTEM,
            "nvmlDeviceGetP2PStatus": self.p2p,
        }
        module = ModuleType("pynvml")
        for name, value in vars(pynvml).items():
            if name.startswith("NVML"):  # constants and errors
                setattr(module, name, value)
        for name, function in functions.items():
            real = inspect.signature(inspect.unwrap(getattr(pynvml, name)))
            assert len(inspect.signature(function).parameters) == len(real.parameters), name
            setattr(module, name, function)
        monkeypatch.setitem(sys.modules, "pynvml", module)

    def init(self):
        if self.system["init"] is not None:
            raise pynvml.NVMLError(self.system["init"])
        self.opened += 1

    def shutdown(self):
        self.opened -= 1

    def handle(self, place):
        if place not in self.cards:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.cards[place]

    def link(self, card, number):
        if card.links is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if number >= len(card.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return card.links[number]

    def p2p(self, first, second, capability):
        assert isinstance(capability, int)  # ctypes takes nothing else
        return self.system["p2p"].get((first.bus, second.bus, capability), 0)


def use_accelerator(monkeypatch, kind, properties):
    """Let torch report the devices `properties` of type `kind`."""
    module = SimpleNamespace(get_device_properties=properties.__getitem__)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(properties))
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


def cuda_machine(monkeypatch, *cards, **system):
    nvml = FakeNvml(monkeypatch, cards, **system)
    use_accelerator(monkeypatch, "cuda", [card.properties for card in cards])
    return nvml


def no_accelerator(monkeypatch, cuda=None, hip=None, xpu=None, mps=False):
    """Let torch be a build for these platforms that finds no device."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "xpu", xpu)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: mps)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# --- what both parts promise --------------------------------------------------------------------


@pytest.mark.parametrize("describe", [machine, subject])
def test_a_description_survives_strict_json_and_does_not_change_between_calls(describe):
    first = describe()
    assert json.loads(json.dumps(first, allow_nan=False)) == first == describe()


@pytest.mark.parametrize("describe", [machine, subject])
def test_what_is_not_known_is_none_and_never_empty_or_zero(describe):
    for path, value in leaves(describe()):
        if not {"count", "topology"} & set(path):  # there 0 is a number, or the first device
            assert value not in ("", "unknown"), path
            assert value is None or isinstance(value, bool) or value != 0, path


def test_a_machine_is_the_same_under_another_load_and_without_a_host_name(monkeypatch):
    import psutil

    before = machine()
    memory = psutil.virtual_memory()._replace(available=1, free=1, used=1, percent=99.0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "cpu_freq", lambda *_: pytest.fail("read the momentary clock"))
    monkeypatch.setattr(os, "getloadavg", lambda: pytest.fail("read the load"))
    assert machine() == before
    assert os.uname().nodename not in [value for _, value in leaves(before)]


# --- the machine --------------------------------------------------------------------------------


def test_usable_cores_are_those_of_the_affinity():
    allowed = os.sched_getaffinity(0)
    assert machine()["cpu"]["usable_cores"] == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine()["cpu"]["usable_cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_threads_are_those_of_torch():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert machine()["threads"]["intra_op"] == before + 1
    finally:
        torch.set_num_threads(before)


def test_only_variables_that_steer_an_allocator_are_recorded(monkeypatch):
    for name in list(os.environ):
        if name.startswith("MALLOC_") or name in environment._ALLOCATOR_VARIABLES:
            monkeypatch.delenv(name)
    assert machine()["allocator"]["environment"] == {}
    steering = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "LD_PRELOAD": "",  # empty is as good as unset
        "MALLOC_ARENA_MAX": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    for name, value in (steering | {"SECRET_TOKEN": "x", "MAIL": "x"}).items():
        monkeypatch.setenv(name, value)
    del steering["LD_PRELOAD"]
    assert machine()["allocator"]["environment"] == steering


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("", None),
        (None, None),
    ],
)
def test_mode_of_transparent_huge_pages(text, mode):
    assert environment._huge_pages(text) == mode


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [
        ("processor\t: 0\nmodel\t\t: 143\nmodel name\t: Xeon(R) 8480: x\n\n", "Xeon(R) 8480: x"),
        (
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
            "implementer 0x41 part 0xd4f",
        ),
        ("processor\t: 0\nmodel\t\t: 143\nmodel name\t:\nflags\t\t: fpu\n", None),
        ("", None),
    ],
)
def test_cpu_model_is_read_on_x86_and_arm(cpuinfo, model):
    assert environment._model_in_cpuinfo(cpuinfo) == model


def test_a_text_file_that_is_not_there_is_none(tmp_path):
    assert environment._text(tmp_path / "enabled") is None


def test_without_an_accelerator_there_are_no_devices(monkeypatch):
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: None if check_available else torch.device("cuda"),
    )
    none = {"type": None, "count": 0, "devices": [], "topology": None}
    assert machine()["accelerator"] == none


def test_one_cuda_device_is_described_whole_and_has_no_topology(monkeypatch):
    nvml = cuda_machine(monkeypatch, Card(0x1B))
    assert machine()["accelerator"] == {
        "type": "cuda",
        "count": 1,
        "devices": [
            {
                "name": "NVIDIA H200",
                "memory_bytes": 141 * GIB,
                "compute_capability": "9.0",
                "power_cap_w": 700.5,
                "sm_mhz": {"requested": 1830, "max": 1980},
                "memory_mhz": {"requested": 3201, "max": 3201},
                "nvlinks": 18,
            }
        ],
        "topology": None,
    }
    assert nvml.opened == 0


def test_the_stand_in_has_only_properties_that_torch_has():
    real = dir(torch._C._CudaDeviceProperties)
    assert set(vars(Card(1).properties)) <= set(real)


def test_topology_names_path_nvlink_and_direct_access_for_every_pair(monkeypatch):
    cards = [Card(0x1B), Card(0x43), Card(0x9D)]
    refused = {(0x1B, 0x9D, 0): 1, (0x43, 0x9D, pynvml.NVML_P2P_CAPS_INDEX_NVLINK): 1}
    cuda_machine(monkeypatch, *cards, p2p=refused)
    assert machine()["accelerator"]["topology"] == [
        {"devices": [0, 1], "path": "SYS", "nvlink": True, "p2p": True},
        {"devices": [0, 2], "path": "SYS", "nvlink": True, "p2p": False},
        {"devices": [1, 2], "path": "SYS", "nvlink": False, "p2p": True},
    ]


def test_levels_of_topology_are_those_of_nvml():
    names = ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    levels = [getattr(pynvml, f"NVML_TOPOLOGY_{name}") for name in names]
    assert list(management._TOPOLOGY_LEVELS) == levels


def test_a_value_that_the_card_does_not_support_is_none_and_the_others_stay(monkeypatch):
    clocks = {pynvml.NVML_CLOCK_SM: None, pynvml.NVML_CLOCK_MEM: None}
    cuda_machine(monkeypatch, Card(1, power_mw=None, requested_mhz=clocks, links=None))
    [device] = machine()["accelerator"]["devices"]
    assert device["power_cap_w"] is None
    assert device["sm_mhz"] == {"requested": None, "max": 1980}
    assert device["nvlinks"] is None
    assert device["memory_bytes"] == 141 * GIB


def test_links_that_are_down_are_not_counted(monkeypatch):
    cuda_machine(monkeypatch, Card(1, links=[1, 0, 1, 1]), Card(2, links=[0, 0]))
    assert [device["nvlinks"] for device in machine()["accelerator"]["devices"]] == [3, 0]


def test_limits_belong_to_the_card_also_when_cuda_numbers_them_otherwise(monkeypatch):
    small, large = Card(0x07, power_mw=300_000), Card(0x0F, power_mw=700_000)
    FakeNvml(monkeypatch, [small, large])
    use_accelerator(monkeypatch, "cuda", [large.properties, small.properties])
    devices = machine()["accelerator"]["devices"]
    assert [device["power_cap_w"] for device in devices] == [700.0, 300.0]


@pytest.mark.parametrize("cards", [[], [Card(1)]], ids=["all", "one of two"])
def test_cards_that_nvml_does_not_know_keep_what_torch_knows(monkeypatch, cards):
    nvml = FakeNvml(monkeypatch, cards)
    use_accelerator(monkeypatch, "cuda", [Card(1).properties, Card(2).properties])
    accelerator = machine()["accelerator"]
    assert [device["name"] for device in accelerator["devices"]] == ["NVIDIA H200"] * 2
    assert accelerator["devices"][1]["power_cap_w"] is None
    assert accelerator["topology"] == [
        {"devices": [0, 1], "path": None, "nvlink": None, "p2p": None}
    ]
    assert nvml.opened == 0


def test_cuda_devices_without_nvml_have_no_limits_and_no_topology(monkeypatch):
    cuda_machine(monkeypatch, Card(1), Card(2), init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    accelerator = machine()["accelerator"]
    limits = {"requested": None, "max": None}
    for device in accelerator["devices"]:
        assert (device["power_cap_w"], device["nvlinks"]) == (None, None)
        assert device["sm_mhz"] == device["memory_mhz"] == limits
    assert accelerator["topology"] is None


def test_nvml_is_closed_when_reading_fails(monkeypatch):
    nvml = cuda_machine(monkeypatch, Card(1))
    monkeypatch.setattr(management, "limits", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        machine()
    assert nvml.opened == 0


def test_an_intel_gpu_has_a_name_and_memory(monkeypatch):
    FakeNvml(monkeypatch, [Card(1)])
    card = SimpleNamespace(name="Intel Arc B580", total_memory=12 * GIB)
    use_accelerator(monkeypatch, "xpu", [card, card])
    accelerator = machine()["accelerator"]
    assert (accelerator["type"], accelerator["topology"]) == ("xpu", None)
    assert accelerator["devices"][1] | {"memory_mhz": 0, "sm_mhz": 0} == {
        "name": "Intel Arc B580",
        "memory_bytes": 12 * GIB,
        "compute_capability": None,
        "power_cap_w": None,
        "sm_mhz": 0,
        "memory_mhz": 0,
        "nvlinks": None,
    }


def test_an_apple_gpu_shares_the_memory_of_the_computer(monkeypatch):
    use_accelerator(monkeypatch, "mps", [None])
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4")
    [device] = machine()["accelerator"]["devices"]
    assert (device["name"], device["memory_bytes"]) == ("Apple M4", None)


# --- the subject --------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A git repository with one commit of one file."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("lr = 0.1\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    git(folder, *who, "commit", "--quiet", "--message=First")
    return folder


def git(folder, *arguments):
    run = ["git", "-C", str(folder), *arguments]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


def test_a_clean_checkout_has_its_commit(checkout):
    assert environment._checkout(checkout) == (git(checkout, "rev-parse", "HEAD"), False)


@pytest.mark.parametrize("name", ["train.py", "new.py"], ids=["changed", "unknown to git"])
def test_a_file_that_differs_from_the_commit_makes_the_checkout_dirty(checkout, name):
    (checkout / name).write_text("lr = 0.2\n")
    assert environment._checkout(checkout) == (git(checkout, "rev-parse", "HEAD"), True)


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path):
    assert environment._checkout(tmp_path) == (None, None)


def test_a_folder_inside_another_checkout_does_not_borrow_its_commit(checkout):
    installed = checkout / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    assert environment._checkout(installed) == (None, None)


def test_without_git_there_is_no_commit(checkout, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment._checkout(checkout) == (None, None)


def test_a_git_hook_does_not_redirect_the_question(checkout, monkeypatch, tmp_path):
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert environment._checkout(checkout) == (commit, False)


def test_a_checkout_that_belongs_to_another_user_has_its_commit(checkout, monkeypatch):
    commit = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own switch for tests
    with pytest.raises(subprocess.CalledProcessError):
        git(checkout, "rev-parse", "HEAD")
    assert environment._checkout(checkout) == (commit, False)


def test_versions_are_those_that_run():
    import numpy

    versions = subject()["versions"]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == numpy.__version__
    assert None not in (versions[name] for name in ("refbench", "torchvision", "torchaudio"))


def test_a_distribution_that_is_not_installed_has_no_version():
    assert environment._installed("no-such-distribution-as-this") is None


def test_versions_of_the_libraries_are_read_from_the_build(monkeypatch):
    build = (
        "PyTorch built with:\n"
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa)\n"
    )
    monkeypatch.setattr(torch.__config__, "show", lambda: build)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    FakeNvml(monkeypatch, driver="580.95.05")
    libraries = subject()["libraries"]
    assert (libraries["onednn"], libraries["mkl"]) == ("3.12.0", "2024.2")
    assert (libraries["nccl"], libraries["nvidia_driver"]) == ("2.27.5", "580.95.05")
    assert libraries["cuda"] == torch.version.cuda


def test_libraries_that_are_absent_are_none(monkeypatch):
    monkeypatch.setattr(torch.__config__, "show", lambda: "PyTorch built with:\n")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    FakeNvml(monkeypatch, init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    libraries = subject()["libraries"]
    absent = ("onednn", "mkl", "nccl", "nvidia_driver")
    assert [libraries[name] for name in absent] == [None] * 4


def test_numeric_flags_follow_torch(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        numerics = subject()["numerics"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert numerics | {"fp32_precision": 0} == {
        "fp32_precision": 0,
        "deterministic_algorithms": True,
        "deterministic_warn_only": True,
        "cublas_workspace": ":4096:8",
        "cudnn_deterministic": True,
        "cudnn_benchmark": True,
    }


IN_A_FRESH_PROCESS = """
import sys, torch
from shared.environment import machine, subject

machine()
torch.set_num_interop_threads(3)  # raises once the pool has started
inter_op = machine()["threads"]["inter_op"]
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.conv.fp32_precision = "ieee"
torch.backends.cudnn.rnn.fp32_precision = "tf32"
try:
    torch.backends.cudnn.allow_tf32
except RuntimeError:
    refused = True
precision = subject()["numerics"]["fp32_precision"]
chosen = [precision[name] for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")]
print(inter_op, refused, chosen, sorted({"torchvision", "torchaudio"} & set(sys.modules)))
"""


def test_describing_starts_no_thread_pool_imports_no_torchvision_and_reads_mixed_precision():
    run = [sys.executable, "-c", IN_A_FRESH_PROCESS]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    assert done.stdout == "3 True ['tf32', 'ieee', 'tf32'] []\n"


# --- why there is no accelerator ----------------------------------------------------------------


def test_an_accelerator_that_is_there_needs_no_reason(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert why_no_accelerator() is None


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ({"hip": "6.4.1"}, "ROCm 6.4.1"),
        ({"xpu": "20250101"}, "Intel"),
        ({"mps": True}, "MPS"),
    ],
)
def test_a_build_for_other_hardware_is_named(monkeypatch, build, words):
    no_accelerator(monkeypatch, **build)
    assert words in why_no_accelerator()


def test_a_build_without_cuda_is_named_and_a_driver_beside_it_too(monkeypatch):
    no_accelerator(monkeypatch)
    FakeNvml(monkeypatch, init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    reason = why_no_accelerator()
    assert "built without CUDA" in reason
    assert "driver" not in reason
    FakeNvml(monkeypatch)
    assert why_no_accelerator() == f"{reason}; this computer has an NVIDIA driver"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver found"),
        (
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
            "the NVIDIA driver does not work: Driver Not Loaded",
        ),
    ],
)
def test_a_driver_that_is_missing_or_broken(monkeypatch, error, reason):
    no_accelerator(monkeypatch, cuda="13.0")
    FakeNvml(monkeypatch, init=error)
    assert why_no_accelerator() == reason


def starts_with(monkeypatch, message):
    def init():
        if message is not None:
            raise RuntimeError(message)

    monkeypatch.setattr(torch.cuda, "init", init)


@pytest.mark.parametrize(
    ("driver_cuda", "built_for", "too_old"),
    [(12080, "13.0", True), (12020, "12.8", False), (13000, "13.0", False), (13000, "12.8", False)],
)
def test_a_driver_is_too_old_when_its_major_version_of_cuda_is(
    monkeypatch, driver_cuda, built_for, too_old
):
    no_accelerator(monkeypatch, cuda=built_for)
    FakeNvml(monkeypatch, [Card(1)], driver="570.1", cuda=driver_cuda)
    starts_with(monkeypatch, "something else")
    reason = why_no_accelerator()
    assert ("too old" in reason) is too_old
    if too_old:
        assert "570.1" in reason
        assert "up to 12.8" in reason
        assert reason.endswith("built for 13.0")


def test_a_driver_without_a_gpu(monkeypatch):
    no_accelerator(monkeypatch, cuda="13.0")
    FakeNvml(monkeypatch)
    assert why_no_accelerator() == "the NVIDIA driver 580.95.05 works but sees no GPU"


@pytest.mark.parametrize("visible", ["", " ", "-1", "2", "7,0"])
def test_hidden_devices_are_the_reason_when_the_first_entry_is_none(monkeypatch, visible):
    no_accelerator(monkeypatch, cuda="13.0")
    FakeNvml(monkeypatch, [Card(1), Card(2)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reason = why_no_accelerator()
    assert reason.startswith(f"CUDA_VISIBLE_DEVICES={visible!r} hides all")
    assert "sees 2" in reason


@pytest.mark.parametrize("visible", ["0", "1,9", "GPU-5fe3", None])
def test_devices_that_are_visible_but_do_not_start_give_torchs_words(monkeypatch, visible):
    no_accelerator(monkeypatch, cuda="13.0")
    FakeNvml(monkeypatch, [Card(1), Card(2)], cuda=None)  # a driver that does not say
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    starts_with(monkeypatch, "Error 802: system not yet initialized\nmore lines\n")
    assert why_no_accelerator() == (
        "the NVIDIA driver 580.95.05 sees 2 GPU(s), but CUDA does not start: "
        "Error 802: system not yet initialized"
    )
    starts_with(monkeypatch, None)
    assert why_no_accelerator().endswith("torch gives no reason")


# --- the command --------------------------------------------------------------------------------


def test_the_command_prints_strict_json_and_no_warning_without_a_device():
    def refuse(constant):
        raise AssertionError(constant)

    done = subprocess.run(
        [sys.executable, "-W", "always", "-m", "shared.environment", "--json"],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(environment.__file__).parents[1],
    )
    assert done.stderr == ""
    printed = json.loads(done.stdout, parse_constant=refuse)
    assert list(printed) == ["machine", "subject", "why_no_accelerator"]
    assert printed["machine"]["accelerator"]["count"] == 0
    assert printed["why_no_accelerator"]


def test_the_command_prints_an_aligned_table_for_people(monkeypatch, capsys):
    cuda_machine(monkeypatch, Card(0x1B), Card(0x43))
    environment.main([])
    printed = capsys.readouterr().out
    assert "No accelerator" not in printed
    lines = [line for line in printed.splitlines() if "  " in line.strip()]
    labels = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines}
    assert labels["memory_bytes"].endswith(" GiB")
    assert labels["power_cap_w"] == "700.5"
    assert labels["devices"] == "0, 1"  # of the pair in the topology
    assert labels["nvlink"] == "yes"
    assert labels["rocm"] == "-"
    assert len({line.index(line.split(maxsplit=1)[1]) for line in lines}) == 1


def test_the_table_ends_with_the_reason_where_there_is_no_accelerator(monkeypatch, capsys):
    no_accelerator(monkeypatch, cuda="13.0")
    FakeNvml(monkeypatch, init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    environment.main([])
    assert capsys.readouterr().out.endswith("\n\nNo accelerator: no NVIDIA driver found.\n")


def test_a_number_that_json_does_not_have_is_refused(monkeypatch):
    monkeypatch.setattr(environment, "machine", lambda: {"power_cap_w": float("nan")})
    with pytest.raises(ValueError, match="JSON compliant"):
        environment.main(["--json"])


def test_a_warning_about_the_driver_is_said_in_words_only(monkeypatch, recwarn):
    import warnings

    no_accelerator(monkeypatch, cuda="13.0")
    FakeNvml(monkeypatch, [Card(1)], driver="570.1", cuda=12080)

    def warn():
        warnings.warn("CUDA initialization: The NVIDIA driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.accelerator, "is_available", warn)
    environment.main(["--json"])
    assert list(recwarn) == []
