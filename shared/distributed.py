"""Processes that train together: who they are, what they tell each other, and how they end.

torchrun starts them (https://docs.pytorch.org/docs/stable/elastic/run.html). Where it has not,
there is one process, and nothing here does anything.
"""

import atexit
import hashlib
import inspect
import io
import os
import platform
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from shared.errors import Disconnected, UserError
from shared.interruption import end_with_parent
from shared.settings import ConfigT

T = TypeVar("T")

BufferSync = Literal["rank0", "averaged"]

DDP = nn.parallel.DistributedDataParallel
_BUFFERS = "forward_sync_buffers", "broadcast_buffers"  # as torch calls it now, and before 2.14
BUFFERS_STAY: dict[str, Any] = {
    next(name for name in _BUFFERS if name in inspect.signature(DDP).parameters): False
}
"""Argument of DistributedDataParallel: leave buffers alone in the forward pass."""

MAIN_SPEAKS_FIRST = 2.0
"""Seconds that other ranks wait with an error. Most errors are had by all of them alike; torchrun
ends the rest as soon as one has ended, so that each error is told once."""

LONG_WAIT = 10.0
"""Seconds after which a process says that it waits for the others."""

_CPU = torch.device("cpu")
_PORT = "port of the store"


class Launch(NamedTuple):
    """What torchrun tells a process about itself."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Launch":
        """Read it from environment variables; without any there is one process.

        Raises:
            UserError: some are missing, or they are not numbers that go together.
        """
        names = [name.upper() for name in cls._fields]
        if "WORLD_SIZE" not in environ:
            return cls()
        values = {}
        for name in names:
            default = environ.get(name.removeprefix("LOCAL_"))  # all on one machine, unless told
            value = environ.get(name, default)
            if value is None:
                raise UserError(f"{name} is not set, and WORLD_SIZE is: start with torchrun")
            if not value.isdecimal():
                raise UserError(f"{name} is {value!r}, and has to be a number: start with torchrun")
            values[name.lower()] = int(value)
        launch = cls(**values)
        if not launch.local_rank < launch.local_world_size <= launch.world_size > launch.rank:
            told = ", ".join(f"{name}={value}" for name, value in zip(names, launch, strict=True))
            raise UserError(f"{told}: ranks count from 0 to the number of processes")
        return launch


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if is_joined() else 1


def rank() -> int:
    """Number of this process among them, from 0."""
    return dist.get_rank() if is_joined() else 0


def is_main() -> bool:
    """Whether this is the process that writes the files and speaks: rank 0, on one machine."""
    return rank() == 0


def is_joined() -> bool:
    """Whether this process trains together with others, or could: torchrun may start one alone."""
    return dist.is_available() and dist.is_initialized()


def run_name(environ: Mapping[str, str]) -> str | None:
    """A name for the run that stays the same when torchrun starts its processes again.

    Returns:
        The id that torchrun was given or has made; without one, the moment at which it was started;
        None without torchrun.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        return None
    if run_id != "none":
        return run_id.replace("/", "-")
    began = psutil.Process(os.getppid()).create_time()
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(began)) + f"-{os.getppid()}"


def together(main: Callable[[ConfigT], T], minutes: float = 10) -> Callable[[ConfigT], T]:
    """Let `main` run in every process that torchrun has started, with the settings of rank 0.

    Args:
        main: of a script.
        minutes: that a process waits for the others, then and at every exchange.

    Returns:
        The same function. It raises a UserError where the processes cannot come together, and
        `Disconnected` when another one has ended.
    """

    def run(config: ConfigT) -> T:
        launch = Launch.of(os.environ)
        if "WORLD_SIZE" not in os.environ:
            return main(config)
        _take_device(config.device, launch)
        end_with_parent(signal.SIGTERM)
        # Where the compiler or channels_last lays gradients out: slower by a copy, and not wrong.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        with _group(launch, minutes), _silenced(launch.rank > 0):
            config = on_main(lambda: config)
            is_again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            if is_again and config.resume == "never":
                config = replace(config, resume="auto")  # torchrun's own new start of this run
            return main(config)

    return run


def _take_device(name: str, launch: Launch) -> None:
    """Give each process an accelerator of its own, unless they train on the CPU.

    Raises:
        UserError: there are fewer than processes, or one is named for all.
    """
    if name == "cpu" or not torch.accelerator.is_available():
        return
    if ":" in name and launch.local_world_size > 1:
        raise UserError(f"--device {name}: each of {launch.local_world_size} processes has its own")
    count = torch.accelerator.device_count()
    if launch.local_world_size > count:
        raise UserError(
            f"{launch.local_world_size} processes were started on this machine, which has {count} "
            "accelerators: a smaller --nproc-per-node, or --device cpu"
        )
    torch.accelerator.set_device_index(launch.local_rank)


@contextmanager
def _group(launch: Launch, minutes: float) -> Iterator[None]:
    # No backend is named: gloo for tensors on the CPU, NCCL and the like for those on accelerators.
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"{name} is not set, and WORLD_SIZE is: start with torchrun")
    timeout = timedelta(minutes=minutes)
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    line = f"rank {launch.rank} of {launch.world_size} waits for the others at {place}"
    waits = Timer(LONG_WAIT, print, [line], {"file": sys.stderr, "flush": True})
    waits.start()
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, numbers = _fresh_store(launch, timeout), (launch.world_size, launch.rank)
            dist.init_process_group(None, None, timeout, *numbers, store)
        else:
            dist.init_process_group(timeout=timeout)
        on_main(lambda: None)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise UserError(
            f"rank {launch.rank} of {launch.world_size} cannot join the others at "
            f"{place}: {_first_line(error)}"
        ) from None
    finally:
        waits.cancel()
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        # torchrun ends this process now. If it does not, this one should not be silent.
        time.sleep(2 * MAIN_SPEAKS_FIRST)
        raise Disconnected(
            f"rank {launch.rank} lost the others, one of which may say why: {_first_line(error)}"
        ) from None
    dist.destroy_process_group()


def _fresh_store(launch: Launch, timeout: timedelta) -> TCPStore:
    """A store in which nothing is left from processes that torchrun has started before these.

    torchrun keeps one for all its attempts (torch 2.9 to 2.14), so that a process that was started
    again can find there the address of one that is gone. It serves to tell where the new store is;
    what it says of an old one leads to nobody, and is asked again.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_torchrun = TCPStore(host, port, is_master=False, timeout=timeout)
    if launch.rank == 0:
        store = TCPStore(host, 0, launch.world_size, True, timeout, wait_for_workers=False)
        of_torchrun.set(_PORT, str(store.port))
        return store
    began = time.monotonic()
    while True:
        port = int(of_torchrun.get(_PORT))
        try:
            # A port that is gone is found out here: TCPStore would print what it tries.
            socket.create_connection((host, port), timeout=1).close()
            store = TCPStore(host, port, launch.world_size, False, timedelta(seconds=1))
        except (OSError, dist.DistError):
            if time.monotonic() - began > timeout.total_seconds():
                raise
        else:
            store.set_timeout(timeout)
            return store


def _is_lost(error: RuntimeError) -> bool:
    """Whether it is about the connection. gloo has no type of its own for that."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _silenced(silent: bool) -> Any:
    """Print nothing on standard output inside, if `silent`; errors are told all the same."""
    return redirect_stdout(Path(os.devnull).open("w")) if silent else nullcontext()


def speaks_first() -> bool:
    """Whether this process is the main one, also when the processes have parted."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def leave(code: int) -> NoReturn:
    """End a process that torchrun has started, without destroying what C++ still holds.

    With torch 2.14 gloo's threads abort about one process in ten at its very end ("terminate called
    without an active exception"), which torchrun takes for a failure.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def main_speaks_first() -> Iterator[None]:
    """Around everything that a program does: let rank 0 tell an error that all have."""
    try:
        yield
    except BaseException:
        if not speaks_first():
            sys.stderr.flush()
            time.sleep(MAIN_SPEAKS_FIRST)
        raise


@contextmanager
def told_later() -> Iterator[None]:
    """Hold back what is printed inside, where rank 0 prints the same; let it be, if all is well."""
    if speaks_first():
        yield
        return
    told = io.StringIO()
    try:
        with redirect_stdout(told), redirect_stderr(told):
            yield
    except BaseException:
        time.sleep(MAIN_SPEAKS_FIRST)
        sys.stderr.write(told.getvalue())
        raise


def on_main(make: Callable[[], T]) -> T:
    """Call `make` on rank 0 alone. All get what it returns there, or raise its UserError."""
    if world_size() == 1:
        return make()
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = make()
        except UserError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, device=_CPU)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]


def check_same(what: str, value: object) -> None:
    """Refuse to go on where processes differ in what all should have alike.

    Args:
        what: for the message.
        value: that of this process, of which the text is compared.

    Raises:
        UserError: in all of them, if one has another value; names that one and its machine.
    """
    if world_size() == 1:
        return
    own = hashlib.sha256(repr(value).encode()).hexdigest(), platform.node()
    of_all: list[Any] = [None] * world_size()
    dist.all_gather_object(of_all, own)
    for number, (digest, host) in enumerate(of_all):
        if digest != of_all[0][0]:
            raise UserError(
                f"{what}: rank {number} on {host} has other ones than rank 0 on {of_all[0][1]}"
            )


@contextmanager
def main_goes_first() -> Iterator[None]:
    """Let rank 0 do what is inside before the others do it, for example download a file."""
    if not is_main():
        largest(0)
    yield
    if is_main():
        largest(0)


def total(value: Tensor) -> Tensor:
    """The sum of a tensor over the processes."""
    if world_size() == 1:
        return value
    summed = value.clone()
    dist.all_reduce(summed)
    return summed


def largest(value: int) -> int:
    """The largest of the processes' numbers. It does not wait for an accelerator."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(value)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor)


@torch.no_grad()
def sync_buffers(model: nn.Module, how: BufferSync) -> None:
    """Make the buffers of a model equal in all processes, such as the averages of BatchNorm.

    Args:
        model: wrapped or not.
        how: averaged: numbers become their mean over the processes, counters those of rank 0.
            rank0: all become those of rank 0.
    """
    if world_size() == 1:
        return
    buffers = list(model.buffers())
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        own = [buffer for buffer in buffers if buffer.dtype == dtype]
        flat = torch.cat([buffer.flatten() for buffer in own])  # many small messages take longer
        if how == "averaged" and dtype.is_floating_point:
            dist.all_reduce(flat)
            flat /= world_size()
        else:
            dist.broadcast(flat, src=0)
        pieces = flat.split([buffer.numel() for buffer in own])
        for buffer, piece in zip(own, pieces, strict=True):
            buffer.copy_(piece.view_as(buffer))


def settle(model: nn.Module, shape: Sequence[int]) -> None:
    """Let DistributedDataParallel arrange its buckets as it will have them from now on.

    It begins with the order of the parameters, and after the first backward pass takes that in
    which gradients came. Another place in a bucket is another order of summation where there are
    three processes or more: so a run that goes on would round its first step differently from one
    that was not interrupted. Here the first backward pass is one that nothing is learnt from.

    Args:
        model: a DistributedDataParallel in training mode, with one input.
        shape: of the input.
    """
    before = [buffer.clone() for buffer in model.buffers()]
    model(next(model.parameters()).new_zeros(*shape)).sum().backward()
    model.zero_grad()
    for buffer, value in zip(model.buffers(), before, strict=True):
        buffer.copy_(value)
