"""Settings from flags, files and earlier runs: which wins, and what is said about bad ones."""

import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shared.errors import UserError
from shared.settings import CONFIG_FILE, RunConfig, as_dict, parse, write_file


@dataclass(frozen=True)
class Config(RunConfig):
    """Settings of a script."""

    lr: float = 0.05
    """Highest learning rate."""
    ema: float | None = None
    """Decay of the average."""
    schedule: Literal["cosine", "step"] = "cosine"
    """How the rate falls."""
    batch_size: int = 64
    """Samples in a step."""
    flip: bool = False
    """Mirror half."""
    note: str = ""
    """Whatever."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.outside(0, float("inf"), "lr")
        yield from self.outside(0, 1, "ema")


def read(*argv: object) -> Config:
    return parse(Config, [str(arg) for arg in argv], "train.py", "Trains something.")


def read_toml(folder: Path, text: str, *argv: object) -> Config:
    file = folder / "my settings.toml"
    file.write_text(text, encoding="utf-8")
    return read("--config", file, *argv)


def complaint(*argv: object) -> str:
    with pytest.raises(UserError) as caught:
        read(*argv)
    line = str(caught.value)
    assert "\n" not in line
    return line


def complaint_about(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        read_toml(folder, text)
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix(f"{folder / 'my settings.toml'}: ")


# ------------------------------------------------------------------------------------- layers


def test_what_is_nearer_to_the_user_wins(tmp_path, capsys):
    run = tmp_path / "a run"
    run.mkdir()
    (run / CONFIG_FILE).write_text("seed = 1\nepochs = 1\nworkers = 1\nema = 0.1\nlr = 0.1")
    file = "seed = 2\nepochs = 2\nema = 0.2"
    config = read_toml(tmp_path, file, "--run-dir", run, "--seed", 3, "--ema=0.3")
    assert (config.seed, config.ema) == (3, 0.3), "flags"
    assert config.epochs == 2, "the file"
    assert (config.workers, config.lr) == (1, 0.1), "the run"
    assert config.batch_size == 64, "the default"
    assert config.run_dir == run
    assert capsys.readouterr().out.splitlines() == [
        "--ema is 0.3 from the command line; the run had 0.1",
        f"--epochs is 2 from {tmp_path / 'my settings.toml'}; the run had 1",
        "--seed is 3 from the command line; the run had 1",
    ]


def test_a_flag_that_says_what_is_the_default_wins_too(tmp_path):
    text = "seed = 2\nflip = true\nthreads = 3\nschedule = 'step'"
    flags = ("--seed", 0, "--no-flip", "--threads", "None", "--schedule", "cosine")
    assert as_dict(read_toml(tmp_path, text, *flags)) == as_dict(Config())


def test_the_run_dir_may_stand_in_a_file(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("seed = 5")
    assert read_toml(tmp_path, f"run_dir = {str(tmp_path)!r}").seed == 5


def test_a_run_continued_as_it_was_is_not_commented_on(tmp_path, capsys):
    write_file(tmp_path / CONFIG_FILE, Config(run_dir=Path("elsewhere"), lr=1.0, threads=2))
    config = read("--run-dir", tmp_path)
    assert (config.lr, config.threads, config.run_dir) == (1.0, 2, tmp_path)
    assert capsys.readouterr().out == ""


def test_a_setting_that_is_written_in_another_way_has_not_changed(tmp_path, capsys):
    (tmp_path / CONFIG_FILE).write_text("lr = 1\nseed = '3'\n")
    config = read("--run-dir", tmp_path, "--lr", "1e0")
    assert (config.lr, config.seed) == (1.0, 3)
    assert capsys.readouterr().out == ""


def test_a_setting_taken_back_to_none_is_told_with_its_source(tmp_path, capsys):
    (tmp_path / CONFIG_FILE).write_text("threads = 2")
    assert read("--run-dir", tmp_path, "--threads", "None").threads is None
    out = capsys.readouterr().out
    assert out == "--threads is None from the command line; the run had 2\n"


def test_a_run_that_started_from_a_checkpoint_goes_on_from_its_own(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("resume = 'other/step-1.pt'\nseed = 4")
    config = read("--run-dir", tmp_path)
    assert (config.resume, config.seed) == ("auto", 4)


@pytest.mark.parametrize("resume", ["never", "other.pt"])
def test_a_run_that_is_not_continued_gives_no_settings(tmp_path, resume):
    (tmp_path / CONFIG_FILE).write_text("seed = 4")
    assert read("--run-dir", tmp_path, "--resume", resume).seed == 0


def test_a_new_run_dir_gives_no_settings(tmp_path):
    assert read("--run-dir", tmp_path / "new").seed == 0


# ----------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sede = 1", "unknown key sede; did you mean seed?"),
        ("batch-size = 1", "unknown key batch-size; did you mean batch_size?"),
        ("zzz = 1", "unknown key zzz"),
        ("config = 'other.toml'", "unknown key config"),
        ("[model]\nlr = 1", "unknown key model"),
        ("epochs = 1.5", "epochs = 1.5 is not a value of int"),
        ("epochs = true", "epochs = True is not a value of int"),
        ("epochs = false", "epochs = False is not a value of int"),
        ("epochs = ''", "epochs = '' is not a value of int"),
        ("epochs = [1]", "epochs = [1] is not a value of int"),
        ("[epochs]\nfirst = 1", "epochs = {'first': 1} is not a value of int"),
        ("seed = 2020-01-31", "seed = datetime.date(2020, 1, 31) is not a value of int"),
        ("lr = 'high'", "lr = 'high' is not a value of float"),
        ("lr = true", "lr = True is not a value of float"),
        ("ema = 'x'", "ema = 'x' is not a value of float | None"),
        ("flip = 1", "flip = 1 is not a value of bool"),
        ("flip = 'true'", "flip = 'true' is not a value of bool"),
        ("device = ['cpu']", "device = ['cpu'] is not a value of str"),
        ("device = true", "device = True is not a value of str"),
        ("run_dir = ['a']", "run_dir = ['a'] is not a value of pathlib.Path | None"),
        ("schedule = 'Step'", "schedule = 'Step' is not a value of Literal['cosine', 'step']"),
        ("lr = -1e-3", "--lr must be ≥ 0, got -0.001"),
        ("lr = nan", "--lr must be ≥ 0, got nan"),
        ("lr = inf", "--lr must be ≥ 0 and finite, got inf"),
        ("ema = 1.5", "--ema must be between 0 and 1, got 1.5"),
        ("ema = nan", "--ema must be between 0 and 1, got nan"),
        ("threads = 0", "--threads must be between 1 and 1024, got 0"),
        ("seed = -1", "--seed must be ≥ 0, got -1"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path, capsys, text, said):
    assert complaint_about(tmp_path, text) == said
    assert capsys.readouterr() == ("", "")


def test_all_bad_lines_of_a_file_are_named_at_once(tmp_path):
    said = complaint_about(tmp_path, "sede = 1\nepochs = 'x'\nlr = 0.5\nflip = 3")
    assert said == (
        "unknown key sede; did you mean seed?; epochs = 'x' is not a value of int; "
        "flip = 3 is not a value of bool"
    )


def test_all_values_that_cannot_be_are_named_at_once():
    said = complaint("--epochs", 0, "--lr=-1", "--ema", 2, "--dry-run", "--overfit-batch")
    assert said == (
        "--epochs must be ≥ 1, got 0; --dry-run and --overfit-batch exclude each other; "
        "--lr must be ≥ 0, got -1.0; --ema must be between 0 and 1, got 2.0"
    )


def test_a_bad_line_in_the_settings_of_a_run_names_that_file(tmp_path):
    (tmp_path / CONFIG_FILE).write_text("sede = 1")
    assert complaint("--run-dir", tmp_path).startswith(
        f"{tmp_path / CONFIG_FILE}: unknown key sede"
    )


def test_a_missing_file_is_named(tmp_path):
    file = tmp_path / "none.toml"
    assert complaint("--config", file) == f"{file}: No such file or directory"


def test_settings_of_a_run_that_are_a_folder_are_named(tmp_path):
    (tmp_path / CONFIG_FILE).mkdir()
    assert complaint("--run-dir", tmp_path) == f"{tmp_path / CONFIG_FILE}: Is a directory"


@pytest.mark.parametrize(
    ("name", "why"), [("file", "Not a directory"), ("n" * 300, "File name too long")]
)
def test_a_run_dir_that_cannot_be_one_is_named(tmp_path, name, why):
    (tmp_path / "file").touch()
    assert complaint("--run-dir", tmp_path / name) == f"{tmp_path / name / CONFIG_FILE}: {why}"


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    """Root may read everything, so that the refusal is played."""

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert complaint("--run-dir", tmp_path) == f"{tmp_path / CONFIG_FILE}: Permission denied"


@pytest.mark.parametrize("content", [b"note = '\xff'", b"seed 3", b"seed = 1\nseed = 2", b"\x00"])
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    assert complaint("--config", file).startswith(f"{file}: not TOML: ")


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--bach-size", "3"], "--batch-size"),
        (["--epochs", "many"], "--epochs"),
        (["--schedule", "none"], "step"),
        (["left over"], "left over"),
    ],
)
def test_a_flag_that_cannot_be_ends_with_2_and_a_hint(capsys, flags, hint):
    with pytest.raises(SystemExit) as ended:
        read(*flags)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert hint in err
    assert out == ""


# ------------------------------------------------------------------------- help, writing, reading


def test_help_shows_the_line_under_each_field(capsys):
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for text in (
        "Trains something.",
        "Highest learning rate.",
        "Mirror half.",
        "All random choices",
    ):
        assert text in out
    assert "--flip, --no-flip" in out


def test_none_and_the_places_of_this_run_are_not_written(tmp_path):
    write_file(tmp_path / "x.toml", Config(config=Path("y.toml"), run_dir=Path("runs/a b")))
    written = tomllib.loads((tmp_path / "x.toml").read_text("utf-8"))
    assert not {"config", "run_dir", "ema", "threads", "evaluate"} & written.keys()
    assert written["seed"] == 0


# NUL is in no path, and the word None stands for no value.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
PATH = TEXT.filter(lambda text: text not in ("None", "auto", "never")).map(Path)
CONFIGS = st.builds(
    Config,
    resume=st.one_of(st.sampled_from(["auto", "never"]), PATH),
    evaluate=st.none() | PATH,
    seed=st.integers(0, 2**70),
    threads=st.none() | st.integers(1, 64),
    precision=st.sampled_from(["fp32", "tf32", "bf16"]),
    compile=st.booleans(),
    lr=st.floats(0, allow_infinity=False),
    ema=st.none() | st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "step"]),
    flip=st.booleans(),
    keep_freed_memory=st.booleans(),
    note=TEXT,
)


@given(CONFIGS)
@example(Config(note='it\'s "so" = \\ \t #1\r\n', evaluate=Path("-x/--y z/ü 数.pt"), lr=5e-324))
@example(Config(note="--seed=1", resume=Path("None "), lr=1e22, flip=True, ema=1e-7))
@hypothesis_settings(max_examples=25, deadline=None)
def test_what_is_written_is_read_back(config):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.toml"
        write_file(file, config)
        assert as_dict(read("--config", file)) == as_dict(config)


def test_settings_that_would_do_nothing_are_named_where_they_were_changed():
    config = RunConfig(seed=3)
    assert list(config.ignored("no chance", "seed", "epochs")) == ["--seed 3: no chance"]


def test_a_setting_that_was_switched_off_stays_off_when_it_is_fed_back(tmp_path):
    @dataclass(frozen=True)
    class Clipping(RunConfig):
        clip_norm: float | None = 1.0
        ema: float | None = None

    off = parse(Clipping, ["--clip-norm", "None", "--threads", "3"], "x", "")
    assert off.clip_norm is None
    write_file(tmp_path / "config.toml", off)
    again = parse(Clipping, ["--config", str(tmp_path / "config.toml")], "x", "")
    assert (again.clip_norm, again.ema, again.threads) == (None, None, 3)
