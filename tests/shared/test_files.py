"""Files that are there whole or not at all."""

import os
from pathlib import Path

import pytest

from shared.files import PARTIAL, atomic_write


class Stop(BaseException):
    """As SystemExit and KeyboardInterrupt are."""


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "a.pt"
    with atomic_write(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_until_then_the_old_one_is_read(tmp_path):
    path = tmp_path / "a.pt"
    path.write_bytes(b"old, and longer")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old, and longer"
        assert (tmp_path / f"a.pt{PARTIAL}").read_bytes() == b"new"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Stop])
def test_a_failure_leaves_the_old_one_and_nothing_else(tmp_path, error):
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")

    def write():
        with atomic_write(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_one(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)

    def write():
        with atomic_write(path) as file:
            file.write(b"new")

    with pytest.raises(OSError, match="No space"):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_leftover_of_a_crash_is_overwritten(tmp_path):
    (tmp_path / f"a.pt{PARTIAL}").write_bytes(b"a long leftover of a crash")
    with atomic_write(tmp_path / "a.pt") as file:
        file.write(b"new")
    assert (tmp_path / "a.pt").read_bytes() == b"new"


def test_bytes_are_on_the_disk_before_the_name_and_the_name_at_the_end(tmp_path, monkeypatch):
    happened = []
    fsync, replace = os.fsync, Path.replace

    def record_fsync(descriptor):
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        happened.append(("fsync", target.name, target.stat().st_size if target.is_file() else None))
        fsync(descriptor)

    def record_replace(path, target):
        happened.append(("rename", path.name, target.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    with atomic_write(tmp_path / "a.pt") as file:
        file.write(b"new")
    assert happened == [
        ("fsync", f"a.pt{PARTIAL}", 3),
        ("rename", f"a.pt{PARTIAL}", "a.pt"),
        ("fsync", tmp_path.name, None),
    ]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "none" / "a.pt"):
        raise AssertionError("the body must not run")
