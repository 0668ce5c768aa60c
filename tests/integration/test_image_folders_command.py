"""The vision reference on folders of images, as a person uses it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SCRIPT = "vision_resnet.py"
FOLDER = ("--data=imagefolder", "--data-dir=pictures", "--batch-size=16")


def fill(folder: Path, per_class: int = 30, size=(20, 24), different: bool = False) -> Path:
    """Two classes, bright above and bright below, with noise."""
    noise = np.random.default_rng(0)
    for label, name in enumerate(("above", "below")):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            width, height = (size[0] + 7 * (number % 3), size[1]) if different else size
            pixels = noise.integers(0, 120, (height, width, 3), np.uint8)
            half = slice(0, height // 2) if label == 0 else slice(height // 2, None)
            pixels[half] += 120
            Image.fromarray(pixels).save(folder / name / f"{number:03}.png")
    return folder


def last_line(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def complaint(done) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_small_images_of_one_size_are_learnt_as_they_are(run, tmp_path):
    fill(tmp_path / "pictures")
    result = last_line(run(SCRIPT, *FOLDER, "--run-dir=mine", "--epochs=6"))
    assert result["test_accuracy"] == 1.0
    assert "test_top5" not in result, "there are but two classes"
    assert (tmp_path / "mine" / "confusion.png").stat().st_size > 5_000
    events = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").open()]
    (test,) = [event for event in events if event["event"] == "test"]
    assert test["classes"] == ["above", "below"]
    assert test["class_accuracy"] == [1.0, 1.0]
    assert test["confusion"] == [[3, 0], [0, 3]]


@pytest.mark.slow
def test_processes_may_be_started_anew_instead_of_forked(run, tmp_path):
    """As on macOS and Windows, and by Python 3.14: whatever a worker needs can be sent to it."""
    fill(tmp_path / "pictures", different=True)
    flags = (*FOLDER, "--image-size=32", "--epochs=1", "--run-dir=mine", "--workers=1")
    expected = last_line(run(SCRIPT, *flags))
    program = (
        "import multiprocessing, sys\n"
        "from refs.vision_resnet import Config, main\n"
        "from shared.program import run_program\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.set_start_method('spawn')\n"
        "    sys.exit(run_program(main, Config, '', sys.argv[1:]))\n"
    )
    (tmp_path / "spawning.py").write_text(program)
    tiny = ("--width=8", "--device=cpu", "--threads=1")
    command = [sys.executable, "spawning.py", *tiny, *flags, "--run-dir=spawned"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert last_line(done)["test_loss"] == expected["test_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [("--cache-gb=4",), ("--cache-gb=0", "--workers=1")])
def test_images_of_any_size_are_cropped_to_one(run, tmp_path, kept):
    fill(tmp_path / "pictures", different=True)
    flags = (*FOLDER, "--image-size=32", "--epochs=8", "--no-flip")
    done = run(SCRIPT, *flags, *kept, "--run-dir=mine")
    assert last_line(done)["test_accuracy"] >= 0.5
    assert ("decoded each time" in done.stdout) == (kept[0] == "--cache-gb=0")
    weights = (tmp_path / "mine" / "model.safetensors").read_bytes()
    last_line(run(SCRIPT, *flags, "--workers=0", "--run-dir=again"))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_classes_are_balanced_when_asked_for(run, tmp_path):
    fill(tmp_path / "pictures")
    for path in sorted((tmp_path / "pictures" / "below").iterdir())[10:]:
        path.unlink()
    done = run(SCRIPT, *FOLDER, "--balance", "--epochs=1")
    last_line(done)
    assert "distinct samples" in done.stdout


def test_every_broken_file_is_named_at_once(run, tmp_path):
    fill(tmp_path / "pictures")
    bad = [tmp_path / "pictures" / "above" / name for name in ("000.png", "007.png")]
    bad[0].write_bytes(b"")
    bad[1].write_text("no image")
    line = complaint(run(SCRIPT, *FOLDER))
    done = run(SCRIPT, *FOLDER, "--check-data")
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "images": 60, "broken": 2, "passed": False,
    }  # fmt: skip
    for path in bad:
        name = str(path.relative_to(tmp_path))
        assert name in line
        assert f"{name}: not an image" in done.stdout


@pytest.mark.slow
def test_a_file_that_goes_during_the_run_is_named(run, start, tmp_path):
    fill(tmp_path / "pictures", per_class=200)
    flags = ("--cache-gb=0", "--image-size=32", "--workers=1", "--epochs=99", "--run-dir=mine")
    process = start(SCRIPT, *FOLDER, *flags)
    for line in process.stdout:
        if line.startswith("epoch 1/"):
            break
    for path in (tmp_path / "pictures" / "above").iterdir():
        path.unlink()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = stderr.strip().splitlines()
    assert line.startswith("vision_resnet.py: error: pictures/above/")
    assert line.endswith(": no such file")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--data=imagefolder", "--data-dir=absent"), "absent: no such folder"),
        (("--data=imagefolder",), "--data imagefolder needs --data-dir"),
        (("--data-dir=pictures",), "--data-dir pictures: --data digits has no folder"),
        (
            ("--data=cifar10", "--data-dir=pictures"),
            "CIFAR-10 is not there, or not all of it; --download",
        ),
        ((*FOLDER, "--batch-size=5000"), "--batch-size 5000: there are 48 training samples"),
        (("--check-data",), "--check-data: --data digits"),
    ],
)
def test_what_is_wrong_with_the_data_is_one_line(run, tmp_path, flags, expected):
    fill(tmp_path / "pictures")
    assert expected in complaint(run(SCRIPT, *flags))


@pytest.mark.slow
def test_weights_of_other_classes_are_refused(run, tmp_path):
    fill(tmp_path / "pictures")
    last_line(run(SCRIPT, *FOLDER, "--run-dir=mine", "--epochs=1"))
    (tmp_path / "pictures" / "below").rename(tmp_path / "pictures" / "beneath")
    line = complaint(run(SCRIPT, *FOLDER, "--evaluate=mine/model.safetensors"))
    assert "mine/model.safetensors: its classes are" in line


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=False)
    if mounted.returncode != 0:
        pytest.skip("only root may mount a tmpfs")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(run, tmp_path, tiny_disk):
    flags = ("--checkpoint-every=5", f"--run-dir={tiny_disk}/mine", "--width=8")
    line = complaint(run(SCRIPT, *flags))
    assert "No space left on device" in line
    subprocess.run(["mount", "-o", "remount,size=30m", tiny_disk], check=True)
    assert last_line(run(SCRIPT, *flags))["steps"] == 40


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_folder_that_may_not_be_written_is_one_line(run, tmp_path, tiny_disk):
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    assert str(tiny_disk) in complaint(run(SCRIPT, f"--run-dir={tiny_disk}/mine"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_too_little_memory_is_one_line_that_says_what_to_try(tmp_path):
    root = Path(__file__).parents[2]
    command = f"ulimit -v 6000000; exec {sys.executable} {root}/refs/{SCRIPT} "
    flags = "--data synthetic --device cpu --threads 1 --batch-size 2048 --run-dir mine"
    done = subprocess.run(
        ["bash", "-c", command + flags], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(root)}, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("vision_resnet.py: out of memory: try")
    assert "Traceback" not in done.stderr
