import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from refs.vision_resnet_distributed import BasicBlock, ResNet
from shared.recomputation import recompute

KEPT = (torch.ops.aten.convolution.default,)
WAYS = ("none", "full", "selective")


class Block(nn.Module):
    """A convolution, a norm, a ReLU in place, and dropout."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.norm(self.conv(x)), inplace=True)
        return nn.functional.dropout(x, 0.3, self.training)


def network(how: str, momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(momentum) for _ in range(3)))
    for block in model:
        recompute(block, how, KEPT)
    return model


def train(model: nn.Module, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Three steps of two micro-batches: losses, gradients and buffers."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        for samples in (4, 3):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(torch.randn(samples, 4, 6, 6)).square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [parameter.grad.clone() for parameter in model.parameters()]
        found += [buffer.clone() for buffer in model.buffers()]
    return found


@pytest.mark.parametrize("how", WAYS[1:])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_losses_gradients_and_buffers_are_bitwise_the_plain_ones(how, momentum, dtype):
    plain, other = (train(network(way, momentum), dtype) for way in ("none", how))
    assert len(plain) == len(other) == 3 * (2 + 9 + 9)
    assert all(map(torch.equal, plain, other))


@pytest.mark.parametrize("how", WAYS)
def test_keys_stay_and_copies_run_themselves(how):
    model = network(how).eval()
    assert model.state_dict().keys() == network("none").state_dict().keys()
    x = torch.randn(2, 4, 6, 6)
    before = model(x)
    for copied in (copy.deepcopy(model), AveragedModel(model).module):
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.fill_(0.5)
        assert not torch.equal(copied(x), before)
        assert torch.equal(model(x), before)


def test_norms_are_what_they_were_when_the_repetition_fails():
    model = network("full")
    loss = model(torch.randn(2, 4, 6, 6)).sum()

    def fail(*_):
        raise MemoryError

    model[1].norm.register_forward_hook(fail)
    with pytest.raises(MemoryError):
        loss.backward()
    assert model[1].norm.momentum == 0.1
    assert model[1].norm.num_batches_tracked == 1


class Living(TorchDispatchMode):
    """Counts the bytes of tensors that were made inside and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                key = weakref.ref(storage), storage.nbytes()
                self._made[storage._cdata] = key
        return outputs

    def bytes(self) -> int:
        gc.collect()
        return sum(size for storage, size in self._made.values() if storage() is not None)


def deep(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [BasicBlock(8, 8, 1) for _ in range(4)]
    for block in blocks:
        recompute(block, how, KEPT)
    return nn.Sequential(*blocks)


def test_what_is_kept_is_counted():
    """In activations of a block's size: 16 images of 8 channels and 8x8 pixels in float32."""
    activation = 16 * 8 * 8 * 8 * 4
    kept = {}
    for how in WAYS:
        model, x = deep(how), torch.randn(16, 8, 8, 8)
        with Living() as living:
            loss = model(x).sum()
            kept[how] = living.bytes() / activation
        loss.backward()
    # The output of each block, of which the last was summed up and is gone.
    assert kept["full"] == pytest.approx(3, abs=0.1)
    # And the outputs of two convolutions.
    assert kept["selective"] == pytest.approx(3 + 2 * 4, abs=0.1)
    # And those of the norms that ReLUs were made of, in place.
    assert kept["none"] == pytest.approx(4 * 4, abs=0.2)


def test_what_is_repeated_is_counted():
    flops = {}
    for how in WAYS:
        model = deep(how)
        x = torch.randn(16, 8, 8, 8, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        flops[how] = counter.get_total_flops()
    assert flops["full"] * 3 == flops["none"] * 4, "forward, its repetition, and two for backward"
    assert flops["selective"] == flops["none"]


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_compiled_it_is_what_it_is_otherwise(how):
    found = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = ResNet(4, channels=1, stem="cifar", width=4)
        for block in model.modules():
            if isinstance(block, BasicBlock):
                recompute(block, how, KEPT)
        if compiled:
            model.compile(dynamic=False, fullgraph=True)
        torch.manual_seed(1)
        for _ in range(2):
            model.zero_grad()
            loss = model(torch.randn(6, 1, 8, 8)).square().mean()
            loss.backward()
        parts = [parameter.grad for parameter in model.parameters()]
        found[compiled] = [loss.detach(), *parts, *model.buffers()]
    for plain, other in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-4, atol=1e-5)
