import errno
import io
import math
import os
import random
import resource
import subprocess
import sys
import warnings
import zipfile
from collections import Counter, OrderedDict
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import checkpoints
from shared.checkpoints import Checkpoints, load
from shared.errors import UserError


def same(left, right) -> bool:
    """Equality of plain data in which types count, and tensors are compared bit by bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(as_bytes(left), as_bytes(right))
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return left == right


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def small_state(step: int = 0) -> dict:
    return {
        "step": step,
        "model": {"weight": torch.arange(6.0).reshape(2, 3) + step, "steps": torch.tensor(step)},
        "optimizer": {"state": {0: {"momentum": torch.ones(3, dtype=torch.bfloat16)}}},
        "best": None,
        "betas": (0.9, 0.999),
        "milestones": Counter({3: 1}),
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def one_line(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


# What goes in comes out


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=5),
    st.builds(
        lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
        st.sampled_from([(), (0,), (3,), (2, 1, 2)]),
    ),
)
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inner, max_size=4),
    ),
    max_leaves=8,
)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(state=st.dictionaries(st.text(max_size=4), plain, max_size=4))
def test_any_plain_data_comes_back_as_it_was(tmp_path, state):
    path = Checkpoints(tmp_path).save(1, state)
    assert same(load(path), state)


def test_the_states_of_model_optimizer_and_scheduler_come_back(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]).state_dict(),
    }
    loaded = load(Checkpoints(tmp_path).save(0, state))
    assert isinstance(loaded["model"], OrderedDict)
    assert same(loaded, state)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {"b": [0, Path("x")]}}, "state['a']['b'][1] is not plain data: PosixPath"),
        ({"lr": np.float64(0.1)}, "state['lr'] is not plain data: float64"),
        ({"shape": torch.Size([1])}, "state['shape'] is not plain data: Size"),
        ({"a": {(1, 2): 0}}, "state['a'] has a key that is no str or int: (1, 2)"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, state, place):
    with pytest.raises(TypeError) as caught:
        Checkpoints(tmp_path).save(1, state)
    assert str(caught.value) == place
    assert names(tmp_path) == []


def test_a_checkpoint_is_still_an_ordinary_torch_file_with_true_checksums(tmp_path):
    path = Checkpoints(tmp_path).save(1, small_state())
    assert same(torch.load(path, weights_only=True), small_state())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(entry.CRC for entry in archive.infolist() if entry.file_size)


# Which files there are, and which of them is read


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    store.save_best(small_state(1))
    paths = [store.save(step, small_state(step)) for step in (1, 2, 3, 4)]
    assert names(tmp_path) == ["best.pt", "step-00000003.pt", "step-00000004.pt"]
    assert paths[3] == tmp_path / "step-00000004.pt"
    newest = store.newest()
    assert newest is not None
    assert newest[0] == paths[3]
    assert same(newest[1], small_state(4))
    assert same(load(tmp_path / "best.pt"), small_state(1))


def test_steps_are_ordered_as_numbers(tmp_path):
    store = Checkpoints(tmp_path, keep=2)
    for step in (9, 10, 99_999_999, 100_000_000):
        path = store.save(step, small_state(step))
        assert store.newest()[0] == path
    assert names(tmp_path) == ["step-100000000.pt", "step-99999999.pt"]


def test_without_a_checkpoint_there_is_no_newest(tmp_path):
    store = Checkpoints(tmp_path / "run" / "checkpoints")
    assert store.newest() is None
    store.save_best(small_state())
    assert store.newest() is None


def test_files_that_are_not_ours_are_left_alone(tmp_path):
    for name in ("step-x.pt", "step-1.pt.bak", "notes.partial"):
        (tmp_path / name).write_text("mine")
    store = Checkpoints(tmp_path, keep=1)
    store.save(1, small_state())
    store.save(2, small_state())
    assert names(tmp_path) == ["notes.partial", "step-00000002.pt", "step-1.pt.bak", "step-x.pt"]


def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path):
    told: list[str] = []
    store = Checkpoints(tmp_path, keep=3, on_damage=told.append)
    first, second, third = (store.save(step, small_state(step)) for step in (1, 2, 3))
    third.write_bytes(third.read_bytes()[:-40])
    second.write_bytes(b"")
    path, state = store.newest()
    assert path == first
    assert same(state, small_state(1))
    assert told == [f"{third} is truncated: its end is missing", f"{second} is empty"]


def test_damage_is_told_on_standard_error_unless_said_otherwise(tmp_path, capsys):
    store = Checkpoints(tmp_path)
    store.save(1, small_state())
    store.save(2, small_state()).write_bytes(b"")
    store.newest()
    assert capsys.readouterr().err == f"{tmp_path / 'step-00000002.pt'} is empty\n"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_nothing(tmp_path):
    told: list[str] = []
    store = Checkpoints(tmp_path, on_damage=told.append)
    for step in (1, 2):
        store.save(step, small_state()).write_bytes(b"x")
    with pytest.raises(UserError) as caught:
        store.newest()
    assert "step-00000002.pt, step-00000001.pt" in one_line(caught.value)
    assert len(told) == 2


def test_going_on_from_an_earlier_step_leaves_no_later_checkpoint_to_be_taken_for_the_newest(
    tmp_path,
):
    store = Checkpoints(tmp_path, keep=1)
    store.save(50, small_state())
    again = store.save(30, small_state(30))
    assert names(tmp_path) == [again.name]
    assert same(store.newest()[1], small_state(30))


def test_leftovers_of_a_killed_save_are_removed_and_never_loaded(tmp_path):
    store = Checkpoints(tmp_path)
    whole = store.save(1, small_state()).read_bytes()
    (tmp_path / "step-00000002.pt.partial").write_bytes(whole)
    (tmp_path / "best.pt.partial").write_bytes(whole[:10])
    assert store.newest()[0].name == "step-00000001.pt"
    Checkpoints(tmp_path)
    assert names(tmp_path) == ["step-00000001.pt"]


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"keep": -1}])
def test_keeping_nothing_is_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Checkpoints(tmp_path, **arguments)


def test_a_negative_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must not be negative"):
        Checkpoints(tmp_path).save(-1, {})


# Damage


@pytest.fixture(scope="module")
def checkpoint_bytes(tmp_path_factory) -> bytes:
    return Checkpoints(tmp_path_factory.mktemp("whole")).save(1, small_state()).read_bytes()


def refusal_of(folder: Path, data: bytes) -> str:
    """Load a damaged file; it must be refused in a line that names it, and that is returned."""
    path = folder / "damaged.pt"
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserError) as caught:
            load(path)
    assert str(path) in one_line(caught.value)
    return str(caught.value)


def test_a_flipped_bit_anywhere_is_found(tmp_path, checkpoint_bytes):
    for position in range(0, len(checkpoint_bytes), 3):
        damaged = bytearray(checkpoint_bytes)
        damaged[position] ^= 1 << (position % 8)
        assert refusal_of(tmp_path, damaged)


def test_a_truncation_anywhere_is_found(tmp_path, checkpoint_bytes):
    whole = len(checkpoint_bytes)
    for size in [*range(4, whole - 200, 9), *range(whole - 200, whole)]:
        said = refusal_of(tmp_path, checkpoint_bytes[:size])
        assert said.endswith("is truncated: its end is missing")


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_overwritten_removed_or_inserted_bytes_are_found(tmp_path, checkpoint_bytes, data):
    begin = data.draw(st.integers(0, len(checkpoint_bytes) - 1))
    end = data.draw(st.integers(begin, len(checkpoint_bytes)))
    other = data.draw(st.binary(max_size=32) | st.just(bytes(end - begin)))
    damaged = checkpoint_bytes[:begin] + other + checkpoint_bytes[end:]
    if damaged != checkpoint_bytes:
        assert refusal_of(tmp_path, damaged)


def test_a_flipped_bit_in_a_tensor_is_called_damage(tmp_path, checkpoint_bytes):
    damaged = bytearray(checkpoint_bytes)
    damaged[checkpoint_bytes.index(np.arange(6, dtype=np.float32).tobytes()) + 5] ^= 1
    assert "is damaged" in refusal_of(tmp_path, damaged)


def test_each_kind_of_wrong_file_is_told_apart(tmp_path):
    torch.save(small_state(), tmp_path / "plain.pt")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("not a checkpoint, but long enough to be looked at")
    (tmp_path / "folder.pt").mkdir()
    expected = {
        "missing.pt": "cannot read {}: No such file or directory",
        "folder.pt": "cannot read {}: Is a directory",
        "empty.pt": "{} is empty",
        "text.pt": "{} is not a checkpoint that this program wrote",
        "plain.pt": "{} is not a checkpoint that this program wrote",
    }
    for name, message in expected.items():
        with pytest.raises(UserError) as caught:
            load(tmp_path / name)
        assert one_line(caught.value) == message.format(tmp_path / name)


def test_a_file_of_ours_that_holds_no_dictionary_is_refused(tmp_path):
    path = tmp_path / "step-00000001.pt"
    checkpoints._write(path, [1, 2])
    with pytest.raises(UserError, match="is not a checkpoint: it holds a list"):
        load(path)


class Malicious:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("environment", ["0", "1"])
def test_pickled_code_is_refused_and_not_run(tmp_path, monkeypatch, sealed, environment):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", environment)
    trace = tmp_path / "ran"
    path = tmp_path / "step-00000001.pt"
    if sealed:  # someone who knows how we write
        monkeypatch.setattr(checkpoints, "_check_plain", lambda value, where: None)
        Checkpoints(tmp_path).save(1, {"a": Malicious(trace)})
    else:
        torch.save({"a": Malicious(trace)}, path)
    reason = "pickled code" if sealed else "not a checkpoint"
    with pytest.raises(UserError, match=reason) as caught:
        load(path)
    assert str(path) in one_line(caught.value)
    assert not trace.exists()
    torch.load(path, weights_only=False)  # the file does what the test believes it does
    assert trace.exists()


# Saves that fail


@pytest.fixture
def small_disk():
    """Files can't grow beyond 64 kB: what a full disk does, at the same place in the code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [1 << 14, 1 << 18], ids=["at the end", "in the middle"])
@pytest.mark.parametrize("best", [True, False])
def test_a_full_disk_is_one_line_and_leaves_the_old_files(tmp_path, small_disk, best, size):
    store = Checkpoints(tmp_path, keep=1)
    old = store.save(1, small_state())
    store.save_best(small_state(1))
    state = {"weight": torch.zeros(size)}  # 64 kB of the first only just do not fit
    with pytest.raises(UserError) as caught:
        store.save_best(state) if best else store.save(2, state)
    path = tmp_path / ("best.pt" if best else "step-00000002.pt")
    assert one_line(caught.value) == f"cannot write {path}: File too large"
    assert names(tmp_path) == ["best.pt", old.name]
    assert same(load(old), small_state())
    assert same(load(tmp_path / "best.pt"), small_state(1))


def test_a_write_that_fails_only_once_is_not_passed_over(tmp_path, monkeypatch):
    class FailsOnce(io.FileIO):
        calls = 0

        def write(self, data):
            self.calls += 1
            if self.calls == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    @contextmanager
    def write_through(path):
        with FailsOnce(path, "w") as file:
            yield file

    monkeypatch.setattr(checkpoints, "atomic_write", write_through)
    path = tmp_path / "best.pt"
    with pytest.raises(UserError) as caught:
        Checkpoints(tmp_path).save_best(small_state())
    assert one_line(caught.value) == f"cannot write {path}: No space left on device"


def test_an_error_within_torch_save_leaves_the_old_file(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path, keep=1)
    old = store.save(1, small_state())

    def half_a_save(state, file):
        file.write(old.read_bytes()[:100])
        raise MemoryError

    monkeypatch.setattr(torch, "save", half_a_save)
    with pytest.raises(MemoryError):
        store.save(1, small_state(2))
    assert names(tmp_path) == [old.name]
    assert same(load(old), small_state())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        Checkpoints(tmp_path / "file" / "checkpoints")
    assert one_line(caught.value).startswith(f"cannot write to {tmp_path / 'file'}")


def test_a_folder_that_has_gone_is_one_line(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints")
    store.folder.rmdir()
    with pytest.raises(UserError) as caught:
        store.save(1, small_state())
    path = store.folder / "step-00000001.pt"
    assert one_line(caught.value) == f"cannot write {path}: No such file or directory"


def test_an_old_checkpoint_that_cannot_be_deleted_is_one_line(tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    (tmp_path / "step-00000001.pt").mkdir()
    with pytest.raises(UserError, match=f"cannot delete from {tmp_path}: "):
        store.save(2, small_state())
    assert same(load(tmp_path / "step-00000002.pt"), small_state())


SAVE_UNTIL_KILLED = """
import itertools, os, shutil, signal, sys, time
from pathlib import Path
import torch
from shared.checkpoints import Checkpoints

torch.set_num_threads(1)
folder = Path(sys.argv[1])
for round, delay in enumerate(map(float, sys.argv[2:])):
    ready, writer_is_ready = os.pipe()
    writer = os.fork()
    if writer == 0:
        store = Checkpoints(folder / "checkpoints")
        found = store.newest()
        for step in itertools.count(found[1]["step"] + 1 if found else 1):
            store.save(step, {"step": step, "weight": torch.full((1 << 20,), float(step))})
            (folder / "saved").write_text(f"{step:9d}")
            os.write(writer_is_ready, b".")
    os.read(ready, 1)
    time.sleep(delay)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    shutil.copytree(folder, folder.with_name(f"after-{round}"))
"""


def test_a_process_killed_while_it_saves_leaves_a_whole_newest_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    delays = [str(random.uniform(0, 0.1)) for _ in range(8)]
    subprocess.run(
        [sys.executable, "-c", SAVE_UNTIL_KILLED, str(tmp_path / "run"), *delays], check=True
    )
    leftovers = 0
    for number in range(len(delays)):
        folder = tmp_path / f"after-{number}"
        leftovers += len([*(folder / "checkpoints").glob("*.partial")])
        # The writer may die between truncating and writing its note of what it has saved.
        saved = int((folder / "saved").read_text() or 0)
        told: list[str] = []
        path, state = Checkpoints(folder / "checkpoints", on_damage=told.append).newest()
        assert told == []
        assert state["step"] >= saved
        assert path.name == f"step-{state['step']:08d}.pt"
        assert torch.equal(state["weight"], torch.full((1 << 20,), float(state["step"])))
    assert leftovers > 0, "no kill came in the middle of a save"
