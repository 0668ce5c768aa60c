"""Number formats: what is computed in which."""

import pytest
import torch

from shared.errors import UserError
from shared.precision import autocast, set_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _switches_as_before():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def uses_tf32() -> list[bool]:
    """For products, convolutions and recurrent layers."""
    cudnn = torch.backends.cudnn
    switches = torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
    return [switch.fp32_precision == "tf32" for switch in switches]


@pytest.fixture
def gpu(monkeypatch):
    """Make this a machine with such a GPU."""

    def set_up(capability: tuple[int, int], bf16: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: bf16 or emulated)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old Card")

    return set_up


def test_bf16_computes_products_in_bfloat16_and_sums_of_losses_in_float32():
    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    with autocast("bf16", CPU):
        logits = x @ w
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    assert w.grad.dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_the_others_change_no_result(precision):
    x, w = torch.randn(4, 3), torch.randn(3, 2)
    with autocast(precision, CPU):
        product = x @ w
    assert product.dtype == torch.float32
    assert torch.equal(product, x @ w)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "tf32"])
def test_products_and_convolutions_have_the_same_mode(gpu, precision):
    gpu((8, 0))
    set_precision("fp32" if precision == "tf32" else "tf32", CUDA)
    set_precision(precision, CUDA)
    assert uses_tf32() == [precision == "tf32"] * 3


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_compiling_can_ask_which_mode_it_is(gpu, precision):
    """PyTorch raises where its two interfaces disagree, and torch.compile asks for GPUs."""
    gpu((8, 0))
    set_precision(precision, CUDA)
    assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")
    assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")
    assert torch.get_float32_matmul_precision() == {"fp32": "highest", "tf32": "high"}[precision]


@pytest.mark.parametrize(
    ("device", "capability"), [(CPU, (0, 0)), (torch.device("mps"), (0, 0)), (CUDA, (7, 5))]
)
def test_tf32_is_refused_where_there_is_none(gpu, device, capability):
    gpu(capability)
    with pytest.raises(
        UserError, match=rf"^--precision tf32: needs an NVIDIA GPU .* not {device}$"
    ):
        set_precision("tf32", device)


def test_bf16_is_refused_where_it_would_be_emulated(gpu):
    gpu((7, 5), bf16=False)
    with pytest.raises(UserError, match=r"^--precision bf16: Old Card has no bfloat16$"):
        set_precision("bf16", CUDA)
    gpu((8, 0))
    set_precision("bf16", CUDA)


def test_a_refusal_changes_nothing():
    before = uses_tf32()
    with pytest.raises(UserError):
        set_precision("tf32", CPU)
    assert uses_tf32() == before


def test_fp16_computes_products_in_float16_and_sums_of_losses_in_float32():
    x, w = torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)
    with autocast("fp16", CPU):
        logits = x @ w
        loss = torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
    assert (logits.dtype, loss.dtype) == (torch.float16, torch.float32)


@pytest.mark.parametrize("computes", [True, False])
def test_fp16_on_a_cpu_that_has_to_emulate_it_is_warned_of(monkeypatch, capsys, computes):
    monkeypatch.setattr("shared.precision.computes_fp16", lambda: computes)
    set_precision("fp16", CPU)
    assert ("no float16 arithmetic" in capsys.readouterr().out) is not computes


@pytest.mark.parametrize("computes", [True, False])
def test_bf16_on_a_cpu_that_has_to_emulate_it_is_warned_of(monkeypatch, capsys, computes):
    monkeypatch.setattr("shared.precision.computes_bf16", lambda device: computes)
    set_precision("bf16", CPU)
    assert ("no bfloat16 arithmetic" in capsys.readouterr().out) is not computes


def test_fp16_is_refused_where_gradients_cannot_be_scaled():
    with pytest.raises(UserError, match=r"--precision fp16: .* mps"):
        set_precision("fp16", torch.device("mps"))
