"""The distributed reference under torchrun, as a person starts it and as things go wrong."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "refs/vision_resnet_distributed.py"
TINY = ("--width=8", "--epochs=2", "--device=cpu", "--threads=1", "--log-every=5")
LONGER = (*TINY, "--epochs=4", "--checkpoint-every=5", "--ema=0.9", "--clip-norm=1")
ALONE = ("--standalone",)
"""torchrun takes a free port, and makes up an id."""
NO_ID = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
"""torchrun takes a free port, and the job has no id."""
GRACE = 100
"""Seconds in which everything has to be over. The time-out of an exchange is 600."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def launch(script: Path, *flags: str, folder: Path, processes: int = 2, torchrun=ALONE, env=None):
    """Start a script as torchrun does, in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1",
         f"--nproc-per-node={processes}", *torchrun, script, *flags],
        cwd=folder, env={**os.environ, **(env or {})}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process, seconds: float = 300) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of what ends within some seconds."""
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        raise
    return process.returncode, stdout, stderr


def train(*flags: str, folder: Path, **options) -> dict:
    code, stdout, stderr = ended(launch(SCRIPT, *flags, folder=folder, **options))
    assert code == 0, stderr
    return json.loads(stdout.splitlines()[-1])


def ranks(process) -> dict[int, psutil.Process]:
    """The processes that torchrun has started, by their rank."""
    found = {}
    for child in psutil.Process(process.pid).children():
        environ = child.environ()
        if "RANK" in environ:
            found[int(environ["RANK"])] = child
    return found


def wait_for(condition, process) -> None:
    """Poll until the condition holds; torchrun must not end before that."""
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoints/step-*.pt")}


def files(folder: Path) -> set[str]:
    """What a run has left; the name of TensorBoard's file says when and where."""
    paths = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    boards = [path for path in paths if path.startswith("tensorboard/")]
    assert len(boards) == 1, "rank 0 alone writes"
    return set(paths) - set(boards)


def assert_same_weights(one: Path, other: Path) -> None:
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """A run of two processes that nobody interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(*LONGER, "--run-dir=run", folder=folder)
    return folder / "run"


def test_two_processes_leave_one_run(tmp_path):
    code, stdout, stderr = ended(launch(SCRIPT, *TINY, "--run-dir=run", folder=tmp_path))
    assert code == 0, stderr
    result = json.loads(stdout.splitlines()[-1])
    assert result["processes"] == 2
    assert result["steps"] == 40
    assert stdout.count("\n{") == 1, "rank 0 alone speaks"
    assert stdout.count("epoch 2/2") == 1
    assert "averages of BatchNorm: rank0" in stdout
    assert "Warning" not in stderr
    assert files(tmp_path / "run") == {
        "config.toml", "environment.json", "metrics.jsonl", "confusion.png", "curves.png",
        "model.safetensors", "checkpoints/best.pt", "checkpoints/step-00000040.pt",
    }  # fmt: skip
    # What was measured in shares is what one process measures.
    weights = f"--evaluate={tmp_path}/run/model.safetensors"
    alone = subprocess.run(
        [sys.executable, SCRIPT, *TINY, weights], capture_output=True, text=True, check=True
    )
    evaluated = json.loads(alone.stdout.splitlines()[-1])
    assert evaluated["test_accuracy"] == result["test_accuracy"]
    assert evaluated["test_loss"] == pytest.approx(result["test_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "job", "name"),
    [
        pytest.param(0, ALONE, r"[0-9a-f-]{36}", id="rank 0", marks=pytest.mark.stress),
        pytest.param(1, NO_ID, r"\d{8}-\d{6}-\d+", id="rank 1, no id"),
        pytest.param(
            *(1, (*NO_ID, "--rdzv-id=my-job"), r"my-job"),
            id="rank 1, an id",
            marks=pytest.mark.stress,
        ),
    ],
)
def test_a_killed_process_leaves_no_trace_in_the_weights(tmp_path, undisturbed, rank, job, name):
    """torchrun starts all of them again, which find the folder by the name of the job."""
    process = launch(SCRIPT, *LONGER, folder=tmp_path, torchrun=(*job, "--max-restarts=2"))
    runs = tmp_path / "runs"
    wait_for(lambda: any(runs.glob("*/checkpoints/step-*.pt")), process)
    ranks(process)[rank].kill()
    code, stdout, stderr = ended(process)
    assert code == 0, stderr
    assert "continuing from" in stdout
    (folder,) = runs.iterdir()
    assert re.fullmatch(f"vision_resnet_distributed-{name}", folder.name)
    assert_same_weights(folder, undisturbed)


def to_torchrun(process) -> None:
    process.send_signal(signal.SIGTERM)


def to_everyone(process) -> None:
    """As SLURM does it: what torchrun passes on comes as a second signal."""
    for member in (*ranks(process).values(), process):
        member.send_signal(signal.SIGTERM)


def to_one_process(process) -> None:
    ranks(process)[1].send_signal(signal.SIGTERM)


def by_the_keyboard(process) -> None:
    process.send_signal(signal.SIGINT)


def torchrun_is_killed(process) -> None:
    process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop",
    [
        to_torchrun,
        by_the_keyboard,
        torchrun_is_killed,
        pytest.param(to_everyone, marks=pytest.mark.stress),
        pytest.param(to_one_process, marks=pytest.mark.stress),
    ],
)
def test_all_stop_at_one_step_and_go_on_bitwise(tmp_path, undisturbed, stop):
    flags = (*LONGER, "--checkpoint-every=0", "--workers=1", "--run-dir=run")
    process = launch(SCRIPT, *flags, folder=tmp_path)
    folder = tmp_path / "run"
    log = folder / "metrics.jsonl"
    wait_for(lambda: log.exists() and '"step"' in log.read_text(), process)
    members = psutil.Process(process.pid).children(recursive=True)
    assert len(members) >= 4, "two processes and their workers"
    stop(process)
    code, _, stderr = ended(process, GRACE)
    psutil.wait_procs(members, timeout=GRACE)
    assert not [member for member in members if member.is_running()], "orphans"
    assert code != 0
    assert "forcefully" not in stderr, "torchrun had to kill"
    (step,) = re.findall(r"interrupted at step (\d+), which is saved", stderr)
    assert checkpoints(folder) == {f"step-{int(step):08}.pt"}
    result = train(*flags, folder=tmp_path)
    assert result["steps"] == 80
    assert_same_weights(folder, undisturbed)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    seen = {}
    for processes in (2, 1, 3):
        epochs = f"--epochs={len(seen) + 1}"
        process = launch(
            SCRIPT, *TINY, epochs, "--run-dir=run", folder=tmp_path, processes=processes
        )
        code, stdout, stderr = ended(process)
        assert code == 0, stderr
        seen[processes] = stdout
    assert "warning: processes was 2 and is 1: from here on other roundings" in seen[1]
    assert "warning: processes was 1 and is 3: from here on other roundings" in seen[3]
    assert "epoch 3/3" in seen[3]
    assert "epoch 2/3" not in seen[3]


@pytest.mark.slow
def test_the_short_runs_and_the_measuring_of_weights_take_several_processes(tmp_path):
    assert train(*TINY, "--dry-run", folder=tmp_path)["passed"]
    assert train(*TINY, "--overfit-batch", "--batch-size=12", "--run-dir=run", folder=tmp_path)[
        "passed"
    ]
    weights = f"--evaluate={tmp_path}/run/model.safetensors"
    two, one = (train(*TINY, weights, folder=tmp_path, processes=n) for n in (2, 1))
    assert two["test_accuracy"] == one["test_accuracy"]
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-5)


@pytest.mark.slow
def test_compiled_in_several_processes_with_checkpointing_it_computes_the_same(tmp_path):
    """And what it has saved goes on uncompiled, in one process."""
    once = (*TINY, "--epochs=1")
    compiled = ("--compile", "--activation-checkpointing=selective", "--run-dir=compiled")
    ours = train(*once, *compiled, folder=tmp_path)
    theirs = train(*once, "--run-dir=plain", folder=tmp_path)
    assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-3)
    weights, others = (load_file(tmp_path / n / "model.safetensors") for n in ("compiled", "plain"))
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-2, atol=1e-4)
    plain = ("--no-compile", "--activation-checkpointing=none", "--run-dir=compiled")
    result = train(*TINY, *plain, folder=tmp_path, processes=1)
    assert (result["epochs"], result["steps"]) == (2, 40)


FAULTY = """
import sys
import torch
from refs import vision_resnet_distributed as script
from shared.distributed import rank, together
from shared.errors import UserError
from shared.program import run_program

train_step = script.train_step

def faulty(model, optimizer, scaler, batch, config, step):
    if step == 3 and rank() == 1:
        {fault}
    return train_step(model, optimizer, scaler, batch, config, step)

script.train_step = faulty
sys.exit(run_program(together(script.main), script.Config, ""))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message", "times"),
    [
        ("raise UserError('pictures/x.png: broken')", "error: pictures/x.png: broken", 1),
        ("raise RuntimeError('planted')", "RuntimeError: planted", 1),
        ("raise MemoryError", "out of memory: try a smaller --batch-size", 1),
        ("batch.inputs.fill_(float('nan'))", "the loss is nan at step 4", 1),
    ],
    ids=["file", "crash", "memory", "nan"],
)
def test_a_process_that_fails_ends_all_with_its_message(tmp_path, fault, message, times):
    script = tmp_path / "faulty.py"
    script.write_text(textwrap.dedent(FAULTY).format(fault=fault))
    env = {"PYTHONPATH": str(ROOT)}
    code, _, stderr = ended(launch(script, *TINY, "--run-dir=run", folder=tmp_path, env=env), GRACE)
    assert code != 0
    assert stderr.count(message) == times
    assert "lost the others" not in stderr
    assert "gloo" not in stderr, "of the others' lost connections nothing is told"


OTHER_DATA = """
import sys
from refs import vision_resnet_distributed as script
from shared.data import images
from shared.data.splits import spread
from shared.distributed import rank, together
from shared.program import run_program

whole = images._digits

def one_fewer():
    splits = whole()
    return splits._replace(test=spread(splits.test, len(splits.test) - rank()))

images._digits = one_fewer
sys.exit(run_program(together(script.main), script.Config, ""))
"""


@pytest.mark.slow
def test_a_process_that_reads_other_data_is_named_before_the_first_step(tmp_path):
    script = tmp_path / "other.py"
    script.write_text(OTHER_DATA)
    env = {"PYTHONPATH": str(ROOT)}
    code, _, stderr = ended(launch(script, *TINY, "--run-dir=run", folder=tmp_path, env=env), GRACE)
    assert code != 0
    assert stderr.count("--data digits: classes and labels: rank 1 on ") == 1
    assert 'Traceback (most recent call last):\n  File "' + str(script) not in stderr
    assert not (tmp_path / "run/config.toml").exists(), "nothing has begun"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch-size=0",), "--batch-size must be"),
        (("--bogus=1",), "--bogus"),
        (("--data=imagefolder", "--data-dir=missing"), "missing"),
        (("--batch-norm=synced",), "--batch-norm synced: not on cpu"),
        (("--parallel=dp",), "--parallel dp: needs one process that has two CUDA devices"),
        (("--batch-size=1258",), "--batch-size 1258: the smallest batch of 1259 samples"),
        (("--batch-size=1256",), "--batch-size 1256 --accumulate 1: of 1259 samples the smallest"),
    ],
    ids=["value", "flag", "data", "device", "parallel", "uneven", "single"],
)
def test_an_error_that_all_have_is_told_once(tmp_path, flags, message):
    process = launch(SCRIPT, *TINY, "--run-dir=run", *flags, folder=tmp_path)
    code, _, stderr = ended(process, GRACE)
    assert code != 0
    assert stderr.count(message) == 1, stderr


@pytest.mark.slow
def test_shares_of_different_size_train(tmp_path):
    """The last batch of an epoch has 5 of 1259 samples, and those of two parts have others."""
    result = train(*TINY, "--batch-size=418", "--epochs=1", "--run-dir=run", folder=tmp_path)
    assert result["steps"] == 4


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set, and WORLD_SIZE is: start with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "one"}, "RANK is 'one'"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK=5, WORLD_SIZE=2"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "rank 0 of 1 cannot join the others at"),
    ],
)
def test_a_wrong_environment_is_one_line(environ, message):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, SCRIPT, *TINY],
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environ},
            capture_output=True,
            text=True,
            timeout=GRACE,
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


@pytest.mark.slow
def test_a_process_that_the_others_do_not_join_gives_up(tmp_path):
    """As where fewer were started than WORLD_SIZE says."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import sys\n"
        "from refs import vision_resnet_distributed as script\n"
        "from shared import distributed\n"
        "from shared.distributed import together\n"
        "from shared.program import run_program\n"
        "distributed.LONG_WAIT = 0.2\n"
        "sys.exit(run_program(together(script.main, minutes=0.05), script.Config, ''))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, script, *TINY],
        env={**os.environ, **alone, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=GRACE,
    )
    assert done.returncode == 2
    assert f"rank 0 of 2 waits for the others at 127.0.0.1:{port}" in done.stderr
    assert f"rank 0 of 2 cannot join the others at 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_is_one_process_says_so(tmp_path):
    code, _, stderr = ended(launch(ROOT / "refs/vision_resnet.py", *TINY, folder=tmp_path), GRACE)
    assert code != 0
    assert stderr.count("vision_resnet.py is one process; several are for") == 1


@pytest.fixture
def hosts():
    """Two network namespaces, joined by a pair of virtual cards: name, address and card of each."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need the command ip and root")
    tag = f"rb{os.getpid()}"
    names = [f"{tag}a", f"{tag}b"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1],
           "netns", names[1])  # fmt: skip
        for index, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{index}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.77.0.{index}") for index, name in enumerate(names, 1)]
    finally:
        for name in made:
            ip("netns", "delete", name)


def test_two_hosts_train_as_two_processes_of_one_do(tmp_path, hosts):
    (_, endpoint), _ = hosts
    processes = []
    for name, address in hosts:
        is_host = int(address == endpoint)
        command = [
            "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run",
            "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two-hosts",
            f"--rdzv-endpoint={endpoint}:29400", f"--rdzv-conf=is_host={is_host}",
            f"--local-addr={address}", SCRIPT, *TINY, f"--run-dir={tmp_path}/{name}",
        ]  # fmt: skip
        env = {**os.environ, "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen(
                command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    results = [ended(process) for process in processes]
    assert [code for code, *_ in results] == [0, 0], results
    # gloo of torch 2.9 prints a line of its own in every process.
    told = [stdout for _, stdout, _ in results if "\n{" in stdout]
    assert len(told) == 1, "one of the two has rank 0"
    result = json.loads(told[0].splitlines()[-1])
    assert result["processes"] == 2
    train(*TINY, "--run-dir=one-host", folder=tmp_path)
    assert_same_weights(Path(result["run_dir"]), tmp_path / "one-host")
