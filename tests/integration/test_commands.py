"""The references as a person uses them: the real commands, on tiny work."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shared import runlog

SCRIPT = "vision_resnet.py"
SEQUENCES = "sequence_lstm.py"
both = pytest.mark.parametrize("script", [SCRIPT, SEQUENCES])
ALL_OF_IT = ("--ema=0.9", "--accumulate=2", "--clip-norm=1", "--checkpoint-every=3")


def last_line(done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(folder: Path) -> list[dict[str, Any]]:
    """The log without what differs between two runs that do the same."""
    timed = ("samples_per_s", "data_wait", "peak_rss", "result")
    return [{k: v for k, v in event.items() if k not in timed} for event in events(folder)]


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def wait_for(condition, process, seconds: float = 200) -> None:
    """Poll until the condition holds; the process must not end before that."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def has_logged_a_step(folder: Path) -> bool:
    log = folder / "metrics.jsonl"
    return log.exists() and '"step"' in log.read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Path]:
    """Run folders of runs that nobody interrupted, by their name, filled by `undisturbed_run`."""
    return {"": tmp_path_factory.mktemp("undisturbed")}


def undisturbed_run(undisturbed, run, name: str, *flags: str, script: str = SCRIPT) -> Path:
    name = f"{name} {script}"
    if name not in undisturbed:
        folder = undisturbed[""] / name
        assert run(script, *flags, f"--run-dir={folder}").returncode == 0
        undisturbed[name] = folder
    return undisturbed[name]


def assert_same_run(one: Path, other: Path) -> None:
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name
    assert without_times(one) == without_times(other)
    assert files(one / "checkpoints") == files(other / "checkpoints")


@both
def test_a_run_leaves_exactly_these_files_and_ends_with_one_line_of_json(run, tmp_path, script):
    done = run(script, "--run-dir=mine", "--checkpoint-every=10")
    result = last_line(done)
    folder = tmp_path / "mine"
    board = [name for name in files(folder) if name.startswith("tensorboard/events")]
    assert len(board) == 1
    assert files(folder) - set(board) == {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "confusion.png",
        "curves.png",
        "model.safetensors",
        "checkpoints/best.pt",
        "checkpoints/step-00000030.pt",
        f"checkpoints/step-{40 if script == SCRIPT else 38:08}.pt",
    }
    assert {"test_accuracy", "test_loss", "seconds", "setup_s", "data_wait"} < result.keys()
    assert result["run_dir"] == "mine"
    assert result["samples_per_s"] > 0
    assert 0 <= result["data_wait"] < 1
    assert result["peak_memory_bytes"] > 100e6
    last = {SCRIPT: 40, SEQUENCES: 38}[script]
    assert result["steps"] == last
    steps = [event for event in events(folder) if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(5, last + 1, 5))
    assert {"loss", "lr", "grad_norm", "samples_per_s", "data_wait", "peak_rss"} < steps[0].keys()
    assert json.loads((folder / "environment.json").read_text()).keys() == {"machine", "subject"}
    scalars = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [point.step for point in scalars.Scalars("epoch/val_loss")] == [last // 2, last]

    again = run(script, "--run-dir=mine")
    assert last_line(again) == result, "a finished run prints its result again"
    assert "mine is finished" in again.stdout
    assert "epoch 1/" not in again.stdout, "and trains nothing"

    for weights in ("model.safetensors", f"checkpoints/step-{last:08}.pt"):
        evaluated = last_line(run(script, f"--evaluate=mine/{weights}"))
        assert evaluated["test_accuracy"] == result["test_accuracy"]
        assert evaluated["test_loss"] == pytest.approx(result["test_loss"], rel=1e-6)


@pytest.mark.slow
def test_the_saved_settings_fed_back_give_the_same_weights(run, tmp_path, undisturbed):
    whole = undisturbed_run(undisturbed, run, "all", *ALL_OF_IT)
    last_line(run(SCRIPT, f"--config={whole}/config.toml", "--run-dir=again"))
    assert_same_run(whole, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "script"),
    [
        pytest.param("all", ALL_OF_IT, SCRIPT, marks=pytest.mark.stress),
        ("all", (*ALL_OF_IT, "--workers=2"), SCRIPT),
        pytest.param(
            "plateau",
            ("--schedule=plateau", "--optimizer=adamw", "--checkpoint-every=3"),
            SCRIPT,
            marks=pytest.mark.stress,
        ),
        ("masks", (*ALL_OF_IT, "--time-masks=2", "--workers=2"), SEQUENCES),
    ],
    ids=["no workers", "two workers", "plateau and adamw", "sequences"],
)
def test_a_run_killed_at_random_moments_ends_with_the_same_weights(
    run, start, tmp_path, undisturbed, name, flags, script
):
    whole = undisturbed_run(undisturbed, run, name, *flags, script=script)
    moments = random.Random(f"{flags}")
    for _ in range(2):
        process = start(script, *flags, "--run-dir=killed")
        wait_for(lambda: has_logged_a_step(tmp_path / "killed"), process)
        time.sleep(moments.uniform(0, 1.5))
        process.kill()
        process.communicate()
    last_line(run(script, *flags, "--run-dir=killed"))
    assert_same_run(whole, tmp_path / "killed")


def test_a_run_killed_in_the_middle_of_a_save_ends_with_the_same_weights(
    run, start, tmp_path, undisturbed
):
    whole = undisturbed_run(undisturbed, run, "all", *ALL_OF_IT)
    folder = tmp_path / "killed" / "checkpoints"
    for _ in range(5):
        process = start(SCRIPT, *ALL_OF_IT, "--run-dir=killed")
        wait_for(lambda: any(folder.glob("*.partial")), process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if any(folder.glob("*.partial")):
            break
    assert any(folder.glob("*.partial")), "no save was hit in 5 attempts"
    last_line(run(SCRIPT, *ALL_OF_IT, "--run-dir=killed"))
    assert_same_run(whole, tmp_path / "killed")


def test_a_torn_log_and_a_damaged_checkpoint_are_mended(run, start, tmp_path, undisturbed):
    whole = undisturbed_run(undisturbed, run, "all", *ALL_OF_IT)
    process = start(SCRIPT, *ALL_OF_IT, "--run-dir=torn")
    checkpoints = tmp_path / "torn" / "checkpoints"
    wait_for(lambda: len(list(checkpoints.glob("step-*.pt"))) == 2, process)
    process.kill()
    process.communicate()
    with (tmp_path / "torn" / "metrics.jsonl").open("a") as log:
        log.write('{"event": "step", "st')
    newest = max(checkpoints.glob("step-*.pt"))
    newest.write_bytes(newest.read_bytes()[:-1000])
    done = run(SCRIPT, *ALL_OF_IT, "--run-dir=torn")
    last_line(done)
    assert newest.name in done.stdout + done.stderr
    assert_same_run(whole, tmp_path / "torn")


@pytest.mark.parametrize(
    ("signum", "script"),
    [(signal.SIGTERM, SCRIPT), (signal.SIGINT, SCRIPT), (signal.SIGTERM, SEQUENCES)],
)
def test_a_signal_ends_after_the_step_with_a_checkpoint(
    run, start, tmp_path, undisturbed, signum, script
):
    flags = ("--ema=0.9", "--accumulate=2", "--clip-norm=1", "--checkpoint-every=0", "--workers=2")
    process = start(script, *flags, "--run-dir=stopped")
    wait_for(lambda: has_logged_a_step(tmp_path / "stopped"), process)
    os.kill(process.pid, signum)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert "to continue: the same command with --run-dir stopped" in stderr
    assert "Traceback" not in stderr
    assert len(list((tmp_path / "stopped" / "checkpoints").glob("step-*.pt"))) == 1
    last_line(run(script, *flags, "--run-dir=stopped"))
    whole = undisturbed_run(undisturbed, run, "all", *ALL_OF_IT, script=script)
    weights, others = (load_file(f / "model.safetensors") for f in (whole, tmp_path / "stopped"))
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_what_the_user_says_on_resuming_wins_and_is_said(run, tmp_path):
    last_line(run(SCRIPT, "--run-dir=mine", "--epochs=1", "--schedule=plateau"))
    (tmp_path / "more.toml").write_text("epochs = 2")
    done = run(SCRIPT, "--run-dir=mine", "--lr=0.001", "--config=more.toml")
    last_line(done)
    assert "--lr is 0.001 from the command line; the run had 0.05" in done.stdout
    lrs = {event["lr"] for event in events(tmp_path / "mine") if event["event"] == "step"}
    assert lrs == {0.05, 0.001}


@pytest.mark.slow
def test_a_run_from_a_checkpoint_of_another_goes_on_when_it_is_started_again(run, tmp_path):
    first = last_line(run(SCRIPT, "--run-dir=first", "--epochs=1"))
    resume = f"--resume={first['run_dir']}/checkpoints/step-00000020.pt"
    second = last_line(run(SCRIPT, "--run-dir=second", resume))
    assert second["steps"] == 40
    assert [e["step"] for e in events(tmp_path / "second")][:2] == [25, 30]
    again = run(SCRIPT, "--run-dir=second", resume)
    assert last_line(again) == second
    assert "second is finished" in again.stdout
    refused = run(SCRIPT, "--run-dir=first", resume.replace("first", "second").replace("20", "40"))
    assert refused.returncode == 2
    assert "first holds another run already" in refused.stderr


@pytest.mark.slow
def test_two_processes_cannot_train_in_one_folder(run, start, tmp_path):
    first = start(SCRIPT, "--run-dir=mine", "--epochs=30")
    wait_for(lambda: has_logged_a_step(tmp_path / "mine"), first)
    second = run(SCRIPT, "--run-dir=mine", "--epochs=30")
    assert second.returncode == 2
    assert "--run-dir mine: another process is training in it" in second.stderr
    first.kill()
    first.communicate()
    with runlog.claimed(tmp_path / "mine"):  # the lock has gone with the process
        pass


@pytest.mark.slow
def test_a_damaged_log_does_not_stop_a_run_from_going_on(run, tmp_path):
    last_line(run(SCRIPT, "--run-dir=mine", "--epochs=1"))
    with (tmp_path / "mine" / "metrics.jsonl").open("r+b") as log:
        log.write(b"\xff\xfe no json\n[]\n{}\n\n")
    assert last_line(run(SCRIPT, "--run-dir=mine"))["steps"] == 40


@pytest.mark.slow
def test_overfitting_does_not_touch_a_run(run, tmp_path):
    last_line(run(SCRIPT, "--run-dir=mine", "--epochs=1"))
    done = run(SCRIPT, "--run-dir=mine", "--overfit-batch")
    assert done.returncode == 2
    assert "--overfit-batch: mine holds a run already" in done.stderr
    assert "overfit" not in (tmp_path / "mine" / "config.toml").read_text()


@pytest.mark.slow
def test_a_reader_that_goes_away_leaves_no_traceback(start):
    process = start(SCRIPT, "--run-dir=mine")
    process.stdout.readline()
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(timeout=100) == 1
    assert "Traceback" not in stderr


@both
def test_dry_run_goes_all_the_way_and_keeps_nothing(run, tmp_path, script):
    done = run(script, "--dry-run", "--run-dir=long", "--epochs=500", "--ema=0.9")
    assert last_line(done)["passed"] is True
    assert list(tmp_path.iterdir()) == []


@both
def test_overfit_batch_passes_with_a_picture(run, tmp_path, script):
    done = run(script, "--overfit-batch", "--run-dir=learnt", "--batch-size=16", "--lr=0.05")
    assert last_line(done)["passed"] is True
    assert (tmp_path / "learnt" / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_loss_that_is_not_finite_says_where_and_keeps_the_last_good_checkpoint(run, tmp_path):
    last_line(run(SCRIPT, "--run-dir=mine", "--epochs=1"))
    before = files(tmp_path / "mine" / "checkpoints")
    done = run(SCRIPT, "--run-dir=mine", "--epochs=3", "--lr=1e30", "--checkpoint-every=1")
    assert done.returncode == 1
    assert "at step 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert before <= files(tmp_path / "mine" / "checkpoints")
    saved = torch.load(tmp_path / "mine" / "checkpoints" / "step-00000020.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in saved["model"].values())


@pytest.mark.slow
def test_profile_writes_a_trace(run, tmp_path):
    done = run(SCRIPT, "--profile", "--run-dir=mine", "--epochs=1")
    last_line(done)
    trace = json.loads((tmp_path / "mine" / "profile.json").read_text())
    assert any("convolution" in event.get("name", "") for event in trace["traceEvents"])
    assert "aten::" in done.stdout


def test_a_bad_setting_is_one_line_and_exit_code_2(run, tmp_path):
    done = run(SCRIPT, "--lr=-1", "--seed=-2", "--run-dir=mine")
    assert done.returncode == 2
    complaint = "--seed must be ≥ 0, got -2; --lr must be ≥ 0, got -1.0"
    assert done.stderr == f"vision_resnet.py: error: {complaint}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_flag_gets_a_suggestion(run):
    done = run(SCRIPT, "--batchsize=3")
    assert done.returncode == 2
    assert "--batch-size" in done.stderr


@both
def test_help_explains_every_setting(run, script):
    done = run(script, "--help")
    assert done.returncode == 0
    for text in ("--accumulate", "Micro-batches that an optimizer", "--run-dir", "--no-compile"):
        assert text in done.stdout


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten(run, tmp_path):
    last_line(run(SCRIPT, "--run-dir=mine", "--epochs=1"))
    before = (tmp_path / "mine" / "metrics.jsonl").read_text()
    done = run(SCRIPT, "--run-dir=mine", "--resume=never", "--epochs=3")
    assert done.returncode == 2
    assert "--resume never: mine holds a run already" in done.stderr
    config = (tmp_path / "mine" / "config.toml").rename(tmp_path / "config.toml")
    done = run(SCRIPT, "--run-dir=mine", "--resume=never", "--epochs=3")
    assert done.returncode == 2
    assert "--resume never: mine/checkpoints/step-00000020.pt" in done.stderr
    config.rename(tmp_path / "mine" / "config.toml")
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == before

    other = run(SCRIPT, "--run-dir=mine", "--epochs=3", "--width=16")
    assert other.returncode == 2
    assert "its model is" in other.stderr
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == before


@pytest.mark.stress
@pytest.mark.parametrize(
    ("chain", "script"),
    [*((chain, SCRIPT) for chain in range(20)), *((chain, SEQUENCES) for chain in range(6))],
)
def test_five_kills_at_any_moment_change_no_weight(
    run, start, tmp_path, undisturbed, chain, script
):
    flags = (*ALL_OF_IT, f"--workers={2 * (chain % 2)}", "--epochs=4")
    whole = undisturbed_run(undisturbed, run, f"stress {chain % 2}", *flags, script=script)
    moments = random.Random(chain)
    for _ in range(5):
        process = start(script, *flags, "--run-dir=killed")
        if moments.random() < 0.5:
            wait_for(lambda: any((tmp_path / "killed").rglob("*.pt*")), process)
        time.sleep(moments.uniform(0, 4))
        process.kill()
        process.communicate()
    last_line(run(script, *flags, "--run-dir=killed"))
    assert_same_run(whole, tmp_path / "killed")
