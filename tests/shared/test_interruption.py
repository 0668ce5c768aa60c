"""Signals that wait for the end of a step."""

import multiprocessing
import signal
import subprocess

import pytest

from shared.interruption import SIGNALS, Interruption, shield_worker


@pytest.fixture
def arrived():
    """Signals that a handler from before was called with."""
    calls = []
    before = {s: signal.signal(s, lambda signum, frame: calls.append(signum)) for s in SIGNALS}
    yield calls
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_acts_as_before(arrived, signum):
    with Interruption() as interruption:
        assert interruption.signum is None
        signal.raise_signal(signum)
        assert interruption.signum == signum
        assert arrived == []
        signal.raise_signal(signum)
        assert arrived == [signum]
        assert interruption.signum == signum


def test_after_one_signal_the_other_acts_as_before(arrived):
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert interruption.signum == signal.SIGTERM
    assert arrived == [signal.SIGINT]


def test_a_second_ctrl_c_is_a_keyboard_interrupt(arrived):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interruption():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("first", [None, signal.SIGTERM])
def test_handlers_are_put_back_at_the_end_also_of_a_failure(arrived, first):
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def fail():
        with Interruption():
            assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
            if first is not None:
                signal.raise_signal(first)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {signum: signal.getsignal(signum) for signum in SIGNALS} == before


def test_default_and_ignored_signals_are_put_back_too(arrived):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def work(pipe):
    shield_worker()
    while True:
        pipe.send(pipe.recv())


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="PyTorch's own handler is used")
def test_only_the_parent_ends_a_worker():
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe()
    worker = context.Process(target=work, args=(end,), daemon=True)
    worker.start()
    for signum in ("INT", "TERM", "TERM"):
        pipe.send(signum)
        assert pipe.recv() == signum, "it is shielded now, and alive"
        subprocess.run(["kill", f"-{signum}", str(worker.pid)], check=True)
    pipe.send("still there")
    assert pipe.recv() == "still there"
    for _ in range(60):  # one that comes while another is pending is lost
        worker.terminate()
        worker.join(1)
        if not worker.is_alive():
            break
    assert worker.exitcode == 0


def test_a_patient_one_takes_any_number_of_signals():
    """torchrun sends one, and whoever sends it to all processes of a job sends another."""
    with Interruption(patient=True) as interruption:
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(signum)
        assert interruption.signum == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
