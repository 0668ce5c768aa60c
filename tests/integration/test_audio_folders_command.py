"""The sequence reference on folders of recordings, as a person uses it."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

SCRIPT = "sequence_lstm.py"
FOLDER = ("--data=audiofolder", "--data-dir=recordings", "--batch-size=16", "--lr=0.02")


def fill(folder: Path, per_class: int = 30) -> Path:
    """Two classes, a low and a high tone, of many lengths, rates and depths."""
    noise = np.random.default_rng(0)
    for name, hertz in (("high", 1500), ("low", 300)):
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            rate = (8000, 8000, 11025)[number % 3]
            samples = int(rate * noise.uniform(0.05, 0.4))
            tone = np.sin(2 * np.pi * hertz * np.arange(samples) / rate)
            channels = np.stack([tone, tone], 1) if number % 2 else tone
            kind = ("wav", "flac")[number % 2]
            soundfile.write(folder / name / f"{number:03}.{kind}", 0.3 * channels, rate)
    return folder


def last_line(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def complaint(done) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_recordings_are_learnt_and_weights_bring_their_features(run, tmp_path):
    fill(tmp_path / "recordings")
    flags = ("--features=mfcc", "--hop-ms=15", "--mels=24", "--max-frames=20", "--epochs=6")
    result = last_line(run(SCRIPT, *FOLDER, *flags, "--run-dir=mine"))
    assert result["test_accuracy"] == 1.0
    events = [json.loads(line) for line in (tmp_path / "mine" / "metrics.jsonl").open()]
    (told,) = [event for event in events if event["event"] == "sequences"]
    assert 0 <= told["padding"] < 1
    assert (told["how"], told["dtype"]) == ("masked", "float32")
    (test,) = [event for event in events if event["event"] == "test"]
    assert test["classes"] == ["high", "low"]

    evaluated = last_line(run(SCRIPT, *FOLDER, "--evaluate=mine/model.safetensors"))
    assert evaluated["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)
    continued = run(SCRIPT, *FOLDER, *flags, "--run-dir=mine", "--epochs=7", "--mels=20")
    assert "its model is" in complaint(continued) or "its features" in complaint(continued)


@pytest.mark.slow
def test_streamed_recordings_give_the_same_weights(run, tmp_path):
    fill(tmp_path / "recordings", per_class=20)
    kept = last_line(run(SCRIPT, *FOLDER, "--run-dir=kept"))
    flags = ("--cache-gb=0", "--workers=1", "--run-dir=streamed")
    streamed = last_line(run(SCRIPT, *FOLDER, *flags))
    assert streamed["test_loss"] == kept["test_loss"]


def test_all_broken_recordings_are_learnt_of_at_once(run, tmp_path):
    fill(tmp_path / "recordings", per_class=20)
    folder = tmp_path / "recordings" / "low"
    (folder / "000.wav").write_bytes(b"")
    whole = (folder / "002.wav").read_bytes()
    (folder / "002.wav").write_bytes(whole[: len(whole) // 2])
    soundfile.write(folder / "nan.wav", np.full(900, np.nan), 8000, subtype="FLOAT")
    done = run(SCRIPT, *FOLDER, "--check-data")
    assert done.returncode == 1
    *lines, last = done.stdout.splitlines()
    assert json.loads(last) == {"recordings": 41, "broken": 3, "passed": False}
    named = [line.partition(": ")[0] for line in lines]
    assert named == [f"recordings/low/{name}.wav" for name in ("000", "002", "nan")]
    line = complaint(run(SCRIPT, *FOLDER))
    assert "recordings/low/000.wav: is empty" in line


@pytest.mark.slow
def test_weights_of_the_other_script_are_refused(run, tmp_path):
    last_line(run("vision_resnet.py", "--epochs=1", "--run-dir=images"))
    last_line(run(SCRIPT, "--epochs=1", "--run-dir=vowels"))
    fill(tmp_path / "recordings", per_class=20)
    images, vowels = (f"--evaluate={name}/model.safetensors" for name in ("images", "vowels"))
    for done in (run(SCRIPT, images), run(SCRIPT, *FOLDER, images), run(SCRIPT, *FOLDER, vowels)):
        assert "model.safetensors: its" in complaint(done)
    assert "model.safetensors: its" in complaint(run("vision_resnet.py", vowels))
    resumed = run(SCRIPT, "--resume=images/checkpoints/step-00000020.pt", "--run-dir=new")
    assert "step-00000020.pt: its" in complaint(resumed)


@pytest.mark.slow
def test_a_position_in_buckets_holds_for_their_size_alone(run, start, tmp_path):
    flags = ("--run-dir=mine", "--checkpoint-every=4", "--epochs=1")
    last_line(run(SCRIPT, *flags))
    newest = sorted((tmp_path / "mine" / "checkpoints").glob("step-*.pt"))
    assert [path.name for path in newest] == ["step-00000016.pt", "step-00000019.pt"]
    newest[-1].unlink()  # what is left was written in the midst of the epoch
    assert "--batch-size 30: mine/checkpoints/step-00000016.pt" in complaint(
        run(SCRIPT, *flags, "--batch-size=30")
    )
    assert "--bucket False" in complaint(run(SCRIPT, *flags, "--no-bucket"))
    assert last_line(run(SCRIPT, *flags))["steps"] == 19
