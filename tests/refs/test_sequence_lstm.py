"""The sequence reference: its two ways of running an LSTM, its step, its runs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from refs import sequence_lstm
from refs.sequence_lstm import Config, SequenceLSTM, run_masked, run_packed
from shared import seeding
from shared.data import sequences
from shared.data.sequences import SequenceBatch
from shared.errors import UserError
from shared.precision import computes_bf16
from shared.program import run_program
from shared.runs import Run

GOLDEN = Path(__file__).parent / "sequence_lstm_keys.json"
CPU = torch.device("cpu")
VOWELS = sequences.load(Config())
NEEDS_BF16 = pytest.mark.skipif(
    not computes_bf16(CPU), reason="this CPU has no LSTM in bfloat16; the refusal is a test"
)
LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        run_dir=tmp_path / "run", device="cpu", hidden=8, epochs=2, batch_size=60, threads=1
    )


def batch_of(lengths, features: int = 5, dtype=torch.float32, pad: float = 0.0, wider: int = 0):
    generator = seeding.generator(1)
    lengths = torch.tensor(lengths)
    inputs = torch.full((len(lengths), int(lengths.max()) + wider, features), pad, dtype=dtype)
    for row, length in enumerate(lengths.tolist()):
        inputs[row, :length] = torch.randn(length, features, generator=generator, dtype=dtype)
    labels = torch.randint(9, (len(lengths),), generator=generator)
    return SequenceBatch(inputs, lengths, labels, torch.arange(len(lengths)))


def stack_of(layers: int, bidirectional: bool, bias: bool, dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    sizes = [5] + [3 * (1 + bidirectional)] * (layers - 1)
    return nn.ModuleList(
        nn.LSTM(size, 3, batch_first=True, bidirectional=bidirectional, bias=bias, dtype=dtype)
        for size in sizes
    )


# Packed and masked


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    with_state=st.booleans(),
    dropout=st.sampled_from([0.0, 0.5]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_packed_and_masked_are_the_same(
    lengths, layers, bidirectional, bias, with_state, dropout, dtype
):
    """Outputs, last states, and the gradients of weights, inputs and first states."""
    found = {}
    directions = 1 + bidirectional
    for run in (run_packed, run_masked):
        lstms = stack_of(layers, bidirectional, bias, dtype)
        batch = batch_of(lengths, dtype=dtype)
        inputs = batch.inputs.requires_grad_()
        firsts = []
        for _ in range(layers):
            first = torch.randn(
                2, directions, len(lengths), 3, generator=seeding.generator(2), dtype=dtype
            )
            firsts.append(first.requires_grad_())
        steps, states = inputs, []
        torch.manual_seed(5)
        for lstm, first in zip(lstms, firsts, strict=True):
            state = (first[0], first[1]) if with_state else None
            steps, state = run(lstm, steps, batch.lengths, state)
            states += state
            steps = F.dropout(steps, dropout)
        weighing = seeding.generator(3)
        loss = sum(
            (tensor * torch.randn(tensor.shape, generator=weighing, dtype=dtype)).sum()
            for tensor in (steps, *states)
        )
        sources = [inputs, *lstms.parameters(), *(firsts if with_state else [])]
        found[run] = [steps, *states, *torch.autograd.grad(loss, sources)]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for packed, masked in zip(*found.values(), strict=True):
        scale = packed.abs().max().item() or 1.0
        torch.testing.assert_close(masked, packed, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("pad", [1e6, math.inf, math.nan])
def test_what_padding_holds_reaches_neither_states_nor_gradients(pad):
    (lstm,) = stack_of(1, True, True, torch.float64)
    found = []
    for value in (0.0, pad):
        batch = batch_of([3, 1, 5], dtype=torch.float64, pad=value, wider=2)
        outputs, (hidden, cell) = run_masked(lstm, batch.inputs, batch.lengths)
        loss = outputs.square().sum() + hidden.sum() + cell.sum()
        found.append([outputs, hidden, cell, *torch.autograd.grad(loss, list(lstm.parameters()))])
    for clean, padded in zip(*found, strict=True):
        assert torch.equal(clean, padded)


@pytest.mark.parametrize("run", [run_packed, run_masked])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_empty_sequence_keeps_its_state_and_puts_out_zeros(run, bidirectional):
    (lstm,) = stack_of(1, bidirectional, True, torch.float32)
    batch = batch_of([4, 0, 2])
    state = tuple(torch.randn(1 + bidirectional, 3, 3) for _ in range(2))
    for first in (None, state):
        outputs, (hidden, cell) = run(lstm, batch.inputs, batch.lengths, first)
        zeros = torch.zeros_like(hidden)
        before = (zeros, zeros) if first is None else first
        assert torch.equal(hidden[:, 1], before[0][:, 1])
        assert torch.equal(cell[:, 1], before[1][:, 1])
        assert not outputs[1].any()
        own = None if first is None else (first[0][:, :1], first[1][:, :1])
        expected, (last, last_cell) = run(lstm, batch.inputs[:1], torch.tensor([4]), own)
        torch.testing.assert_close(outputs[:1], expected)
        torch.testing.assert_close(hidden[:, :1], last)
        torch.testing.assert_close(cell[:, :1], last_cell)


@pytest.mark.parametrize("varlen", ["packed", "masked"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_padding_and_the_rest_of_the_batch_change_nothing(varlen, pooling):
    """Logits and gradients, with wider padding, other values in it, and other neighbours."""
    torch.manual_seed(0)
    model = SequenceLSTM(9, 5, hidden=4, layers=2, pooling=pooling, varlen=varlen).double()
    lengths = [3, 9, 1, 6]

    def run(batch):
        logits = model(batch.inputs, batch.lengths)
        loss = F.cross_entropy(logits[:3], batch.labels[:3], reduction="sum")
        return logits[:3], torch.autograd.grad(loss, list(model.parameters()))

    logits, gradients = run(batch_of(lengths, dtype=torch.float64))
    for pad, wider in ((0.0, 7), (123.0, 0), (-1e30, 2), (math.inf, 1), (math.nan, 1)):
        changes = {"pad": pad, "wider": wider}
        others, other_gradients = run(batch_of(lengths, dtype=torch.float64, **changes))
        torch.testing.assert_close(others, logits, rtol=1e-12, atol=1e-14)
        for one, other in zip(gradients, other_gradients, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-13)
    alone = [
        model(batch.inputs[row : row + 1, :length], batch.lengths[row : row + 1])
        for batch in [batch_of(lengths, dtype=torch.float64)]
        for row, length in enumerate(lengths[:3])
    ]
    torch.testing.assert_close(torch.cat(alone), logits, rtol=1e-12, atol=1e-14)


def test_an_empty_sequence_in_a_batch_gives_finite_logits_and_gradients():
    for varlen in ("packed", "masked"):
        for pooling in ("last", "mean"):
            model = SequenceLSTM(9, 5, hidden=4, layers=2, pooling=pooling, varlen=varlen)
            for lengths, wider in (([2, 0, 5], 0), ([0, 0], 1)):
                batch = batch_of(lengths, wider=wider)
                logits = model(batch.inputs, batch.lengths)
                assert logits.isfinite().all()
                logits.sum().backward()
                assert all(p.grad.isfinite().all() for p in model.parameters())


def test_outputs_are_as_wide_as_the_inputs_when_all_sequences_are_short():
    (lstm,) = stack_of(1, True, True, torch.float32)
    batch = batch_of([2, 3], wider=5)
    for run in (run_packed, run_masked):
        outputs, _ = run(lstm, batch.inputs, batch.lengths)
        assert outputs.shape == (2, 8, 6)


@pytest.mark.parametrize("lengths", [[3, 9], [-1, 2], [2], [2, 2, 2]])
def test_lengths_that_do_not_fit_are_refused(lengths):
    (lstm,) = stack_of(1, True, True, torch.float32)
    for run in (run_packed, run_masked):
        with pytest.raises(ValueError, match=r"lengths .* do not fit inputs"):
            run(lstm, torch.zeros(2, 8, 5), torch.tensor(lengths))


def test_one_layer_gives_what_nn_lstm_gives():
    (lstm,) = stack_of(1, True, True, torch.float32)
    inputs = torch.randn(3, 7, 5)
    expected, (hidden, cell) = lstm(inputs)
    for run in (run_packed, run_masked):
        outputs, state = run(lstm, inputs, torch.tensor([7, 7, 7]))
        for one, other in zip((outputs, *state), (expected, hidden, cell), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_keys_and_shapes_are_those_that_are_written_down():
    """If this fails, old weights no longer load: add to MIGRATIONS, then write the file anew."""
    model = SequenceLSTM(9, 12, layers=2)
    found = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    assert found == json.loads(GOLDEN.read_text())


# The step


@settings(max_examples=12, deadline=None)
@given(lengths=LENGTHS, parts=st.integers(1, 9), smoothing=st.sampled_from([0.0, 0.1]))
def test_micro_batches_give_the_gradient_of_the_whole_batch(lengths, parts, smoothing):
    """Also where their sequences are of different length (a mean of means is not enough)."""
    torch.manual_seed(0)
    model = SequenceLSTM(9, 5, hidden=4, layers=2).double()
    batch = batch_of(lengths, dtype=torch.float64)
    whole = F.cross_entropy(
        model(batch.inputs, batch.lengths), batch.labels, label_smoothing=smoothing
    )
    gradients = torch.autograd.grad(whole, list(model.parameters()))
    size = len(lengths)
    config = Config(
        accumulate=min(parts, size), batch_size=size, label_smoothing=smoothing, clip_norm=None
    )
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    result = sequence_lstm.train_step(model, still, batch, config, step=0)
    torch.testing.assert_close(result.loss.double(), whole.detach(), rtol=1e-6, atol=1e-6)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_a_step_clips_and_then_steps_once():
    torch.manual_seed(0)
    model = SequenceLSTM(9, 5, hidden=4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    config = Config(accumulate=3, clip_norm=1e-4)
    batch = batch_of([3, 7, 2, 5])
    result = sequence_lstm.train_step(model, optimizer, batch, config, step=0)
    moved = [old - new for old, new in zip(before, model.parameters(), strict=True)]
    assert len(calls) == 1
    assert result.grad_norm > 1e-4, "the norm that is told is the one before clipping"
    total = torch.cat([change.flatten() for change in moved]).norm().item()
    assert total == pytest.approx(1e-4, rel=1e-2)


def test_dropout_repeats_with_the_step_and_is_the_same_packed_and_masked():
    norms = []
    for varlen, step, noise in (("packed", 0, 1), ("masked", 0, 2), ("packed", 1, 1)):
        torch.manual_seed(0)
        model = SequenceLSTM(9, 5, hidden=8, layers=3, dropout=0.5, varlen=varlen)
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        torch.manual_seed(noise)
        batch = batch_of([3, 7, 2, 5])
        norms.append(sequence_lstm.train_step(model, still, batch, Config(), step).grad_norm)
    assert norms[0] == pytest.approx(norms[1].item(), rel=1e-4)
    assert norms[0] != pytest.approx(norms[2].item(), rel=1e-3)


@pytest.mark.parametrize(
    ("varlen", "dtype"),
    [
        ("packed", torch.float32),
        pytest.param("masked", torch.bfloat16, marks=NEEDS_BF16),
    ],
)
def test_the_type_that_ran_is_told(config, varlen, dtype):
    config = replace(config, precision="bf16", varlen=varlen)
    about = sequence_lstm.describe(VOWELS.train, config)
    model = sequence_lstm.build_model(about, config, CPU)
    assert sequence_lstm.lstm_dtype(model, config, CPU) == dtype
    config = replace(config, precision="fp32")
    assert sequence_lstm.lstm_dtype(model, config, CPU) == torch.float32


def test_a_cpu_without_bfloat16_is_told_at_once(config, monkeypatch):
    monkeypatch.setattr(sequence_lstm, "computes_bf16", lambda device: False)
    about = sequence_lstm.describe(VOWELS.train, config)
    for varlen in ("auto", "masked"):
        wanted = replace(config, precision="bf16", varlen=varlen)
        with pytest.raises(UserError, match="--precision bf16: an LSTM needs a CPU with AVX-512"):
            sequence_lstm.build_model(about, wanted, CPU)
        sequence_lstm.build_model(about, replace(wanted, precision="fp32"), CPU)
    sequence_lstm.build_model(about, replace(config, precision="bf16", varlen="packed"), CPU)


@pytest.mark.parametrize("batch_size", [1, 7, 370])
def test_an_evaluation_does_not_depend_on_the_batch_size(config, batch_size):
    about = sequence_lstm.describe(VOWELS.train, config)
    model = sequence_lstm.build_model(about, config, CPU)
    prepare = sequence_lstm.make_preparation(about, config, CPU)

    def evaluate(size: int):
        settings_of_size = replace(config, batch_size=size)
        loader = sequence_lstm.make_loader(VOWELS.test, settings_of_size, CPU)
        return sequence_lstm.evaluate(model, loader, prepare, settings_of_size)

    expected, found = evaluate(64), evaluate(batch_size)
    assert found.accuracy == expected.accuracy
    assert torch.equal(found.confusion, expected.confusion)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


# The run


def final_weights(config: Config) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    result = sequence_lstm.train(config)
    assert result["epochs"] == config.epochs
    assert config.run_dir is not None
    return load_file(config.run_dir / "model.safetensors")


def assert_bitwise(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_number_of_workers_changes_no_weight(config, tmp_path):
    config = replace(config, time_masks=1, feature_masks=1)
    weights = final_weights(config)
    again = replace(config, workers=2, run_dir=tmp_path / "again")
    assert_bitwise(final_weights(again), weights)


class PowerCut(BaseException):
    """Nothing catches it."""


def die_at(monkeypatch, step: int, config: Config) -> None:
    """Start a run, which dies right after it was told of a step."""
    step_ended = Run.step_ended

    def dying(self, *args, **kwargs):
        step_ended(self, *args, **kwargs)
        if self.progress.step == step:
            raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step_ended", dying)
        with pytest.raises(PowerCut):
            sequence_lstm.train(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"ema": 0.9, "accumulate": 2, "optimizer": "sgd", "schedule": "plateau"},
        {"time_masks": 2, "feature_masks": 1, "varlen": "packed", "batch_size": 50},
        pytest.param(
            {"precision": "bf16", "pooling": "last", "schedule": "step", "bucket": False},
            marks=NEEDS_BF16,
        ),
    ],
    ids=["plateau", "masks", "bf16"],
)
@pytest.mark.parametrize("step", [1, 4, 7])
def test_a_run_that_died_goes_on_to_the_same_weights(config, tmp_path, monkeypatch, changes, step):
    config = replace(config, checkpoint_every=1, layers=2, dropout=0.3, **changes)
    weights = final_weights(config)
    again = replace(config, run_dir=tmp_path / "again")
    die_at(monkeypatch, step, again)
    torch.manual_seed(99)  # nothing of the process may matter
    assert_bitwise(final_weights(again), weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("varlen", ["packed", "masked"])
def test_a_deterministic_run_on_an_accelerator_resumes_bitwise(
    config, tmp_path, monkeypatch, varlen
):
    config = replace(config, device="auto", deterministic=True, varlen=varlen, checkpoint_every=1)
    weights = final_weights(config)
    again = replace(config, run_dir=tmp_path / "again")
    die_at(monkeypatch, 5, again)
    assert_bitwise(final_weights(again), weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_packed_and_masked_are_the_same_on_an_accelerator():
    device = torch.accelerator.current_accelerator()
    found = []
    for run in (run_packed, run_masked):
        (lstm,) = stack_of(1, True, True, torch.float32).to(device)
        batch = batch_of([7, 2, 5])
        inputs = batch.inputs.to(device).requires_grad_()
        outputs, (hidden, cell) = run(lstm, inputs, batch.lengths)
        loss = outputs.square().sum() + hidden.sum() + cell.sum()
        found.append(
            [outputs, hidden, cell, *torch.autograd.grad(loss, [inputs, *lstm.parameters()])]
        )
    for packed, masked in zip(*found, strict=True):
        torch.testing.assert_close(masked, packed, rtol=1e-4, atol=1e-4)


def test_weights_bring_their_network_and_are_refused_for_other_data(config):
    result = sequence_lstm.train(config)
    weights = Path(result["run_dir"]) / "model.safetensors"
    found = sequence_lstm.main(replace(config, evaluate=weights, hidden=16, varlen="packed"))
    assert found["test_accuracy"] == result["test_accuracy"]
    with pytest.raises(UserError, match=r"model\.safetensors: its classes"):
        sequence_lstm.main(replace(config, evaluate=weights, data="synthetic"))


def test_a_model_that_can_learn_learns_a_batch_by_heart(config):
    config = replace(config, overfit_batch=True, hidden=32, batch_size=16, lr=0.01)
    assert sequence_lstm.main(config)["passed"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--lr=-1", "--hidden=0"), "--lr must be ≥ 0, got -1.0"),
        (("--lr=-1", "--hidden=0"), "--hidden must be ≥ 1"),
        (("--dropout=1",), "--dropout must be between 0 and 0.99"),
        (("--time-mask=2",), "--time-mask must be between 0 and 1"),
        (("--compile",), "--compile: LSTMs break the graph"),
        (("--data=synthetic", "--longest=3"), "--longest 3: is less than --shortest 20"),
        (("--longest=300",), "--longest 300: --data japanese-vowels has its own lengths"),
        (("--mels=20",), "--mels 20: --data japanese-vowels has no recordings"),
        (("--time-mask=0.5",), "--time-mask 0.5: there are no --time-masks"),
        (
            ("--data=audiofolder", "--data-dir=x", "--coefficients=9"),
            "--coefficients 9: --features logmel has none",
        ),
        (
            ("--data=audiofolder", "--data-dir=x", "--features=mfcc", "--coefficients=50"),
            "--coefficients 50: there are only --mels 40",
        ),
        (("--data=audiofolder",), "--data audiofolder needs --data-dir"),
        (("--data=audiofolder", "--data-dir=absent"), "absent: no such folder"),
        (("--data=speechcommands", "--data-dir=absent"), "Speech Commands is not there"),
        (("--data-dir=x",), "--data-dir x: --data japanese-vowels has no folder"),
        (("--check-data",), "--check-data"),
        (("--download",), "--download"),
        (("--batch-size=244",), "--batch-size 244: there are 243 training samples"),
        (("--max-frames=0",), "--max-frames must be ≥ 1"),
    ],
)
def test_bad_settings_are_one_clear_line(tmp_path, monkeypatch, capsys, flags, complaint):
    monkeypatch.chdir(tmp_path)
    assert run_program(sequence_lstm.main, Config, "", ["--device=cpu", *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.strip().splitlines()) == 1
    assert not any(tmp_path.rglob("*.toml")), "nothing was begun"
