import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from refs.vision_resnet_distributed import BasicBlock, ResNet
from shared.recomputation import recompute

KEPT = (torch.ops.aten.convolution.default,)
WAYS = ("none", "full", "selective")
REPEATING = WAYS[1:]


class Block(nn.Module):
    """A convolution, a norm, a ReLU in place, and dropout."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = norm

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = F.relu(self.norm(self.conv(x)), inplace=True)
        return scale * F.dropout(x, 0.3, self.training)


def network(how: str, kind: type[nn.Module] = nn.BatchNorm2d, **named) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind(4, **named)) for _ in range(3)))
    for block in model:
        recompute(block, how, KEPT)
    return model


def images(samples: int, **named) -> Tensor:
    return torch.randn(samples, 4, 6, 6, **named)


def train(
    model: nn.Module, dtype: torch.dtype = torch.float32, autocast: bool = False
) -> list[tuple[str, Tensor]]:
    """Three steps of two micro-batches: losses, gradients and buffers."""
    torch.manual_seed(1)
    model.to(dtype)
    found = []
    for _ in range(3):
        model.zero_grad()
        for samples in (4, 3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(images(samples, dtype=dtype)).square().mean()
            loss.backward()
            found.append(("loss", loss.detach()))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
            found.append((f"gradient of {name}", parameter.grad.clone()))
        for name, buffer in model.named_buffers():
            found.append((name, buffer.clone()))
    return found


def differing(plain: list[tuple[str, Tensor]], other: list[tuple[str, Tensor]]) -> list[str]:
    """Names of what is not bitwise the same."""
    assert len(plain) >= 3 * (2 + 9)
    pairs = zip(plain, other, strict=True)
    return [name for (name, mine), (_, theirs) in pairs if not torch.equal(mine, theirs)]


# What is computed


@pytest.mark.parametrize("how", REPEATING)
@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)]
)
def test_losses_gradients_and_buffers_are_bitwise_the_plain_ones(how, dtype, autocast):
    """Dropout included: another draw in the repetition would give other gradients."""
    plain, other = (train(network(way), dtype, autocast) for way in ("none", how))
    assert differing(plain, other) == []


@pytest.mark.parametrize("how", REPEATING)
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (nn.BatchNorm2d, {"momentum": None}),
        (nn.BatchNorm2d, {"track_running_stats": False}),
        (nn.SyncBatchNorm, {}),
        (nn.SyncBatchNorm, {"momentum": None}),
    ],
)
def test_every_kind_of_batch_norm_averages_once(how, kind, named):
    plain, other = (train(network(way, kind, **named)) for way in ("none", how))
    assert differing(plain, other) == []


def test_the_repetition_runs_in_the_precision_of_the_forward_pass():
    model, seen = network("full"), []
    model[1].conv.register_forward_hook(lambda part, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images(2)).sum()
    loss.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("how", WAYS)
def test_two_forward_passes_before_one_backward_pass(how):
    found = []
    for way in ("none", how):
        model = network(way)
        torch.manual_seed(1)
        (model(images(4)).square().mean() + model(images(3)).square().mean()).backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *found))


def test_a_second_backward_pass_repeats_once_more():
    found = []
    for how in ("none", "full"):
        model = network(how)
        loss = model(torch.ones(4, 4, 6, 6)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("how", WAYS)
def test_named_inputs_are_handed_on(how):
    block, x = network(how).eval()[0], images(2)
    assert torch.equal(block(x, scale=2.0), 2 * block(x))


# The model stays what it is


@pytest.mark.parametrize("how", WAYS)
def test_keys_stay_and_copies_run_themselves(how):
    model = network(how).eval()
    assert model.state_dict().keys() == network("none").state_dict().keys()
    x = images(2)
    before = model(x)
    for copied in (copy.deepcopy(model), AveragedModel(model).module):
        assert torch.equal(copied(x), before)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.fill_(0.5)
        plain = network("none").eval()
        plain.load_state_dict(copied.state_dict())
        assert torch.equal(copied(x), plain(x))
        copied(x).sum().backward()
        assert all(parameter.grad is not None for parameter in copied.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("how", REPEATING)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_norms_are_what_they_were_when_the_repetition_fails(how, momentum):
    model = network(how, momentum=momentum)
    norms = [block.norm for block in model]
    loss = model(images(2)).sum()
    before = [(norm.num_batches_tracked, norm.running_mean.clone()) for norm in norms]

    def fail(*_):
        assert norms[1].momentum == 0
        raise MemoryError

    norms[1].register_forward_hook(fail)
    with pytest.raises(MemoryError):
        loss.backward()
    for norm, (counter, mean) in zip(norms, before, strict=True):
        assert norm.momentum == momentum
        assert norm.num_batches_tracked is counter
        assert counter == 1
        assert torch.equal(norm.running_mean, mean)


# What is kept and what is repeated


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
                self._made[storage._cdata] = weakref.ref(storage), storage.nbytes()
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


def kept(how: str, x: Tensor) -> float:
    """What lives after a forward pass, in activations of a block's size."""
    model = deep(how)
    with Living() as living:
        loss = model(x).sum()
        found = living.bytes()
    assert loss.requires_grad == torch.is_grad_enabled()
    return found / (x.numel() * x.element_size())


def test_what_is_kept_is_counted():
    x = torch.randn(16, 8, 8, 8)
    # The output of each block, of which the last was summed up and is gone.
    assert kept("full", x) == pytest.approx(3, abs=0.1)
    # And the outputs of two convolutions.
    assert kept("selective", x) == pytest.approx(3 + 2 * 4, abs=0.1)
    # And those of the norms that ReLUs were made of, in place.
    assert kept("none", x) == pytest.approx(4 * 4, abs=0.2)


@pytest.mark.parametrize("how", WAYS)
def test_without_gradients_nothing_is_kept(how):
    with torch.no_grad():
        assert kept(how, torch.randn(16, 8, 8, 8)) < 0.1
        x = images(2)
        assert torch.equal(network(how).eval()(x), network("none").eval()(x))


def flops(how: str) -> dict[str, int]:
    """Of the forward and of the backward pass of a ResNet whose blocks are repeated."""
    torch.manual_seed(0)
    model = ResNet(4, channels=1, stem="cifar", width=8)
    blocks = [part for part in model.modules() if isinstance(part, BasicBlock)]
    for block in blocks:
        recompute(block, how, KEPT)
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.randn(4, 1, 8, 8)).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    with FlopCounterMode(display=False) as stem, torch.no_grad():
        model.conv1(torch.randn(4, 1, 8, 8))
    with FlopCounterMode(display=False) as head, torch.no_grad():
        model.fc(torch.randn(4, 64))
    counters = {"forward": forward, "backward": backward, "stem": stem, "head": head}
    return {name: counter.get_total_flops() for name, counter in counters.items()}


def test_what_is_repeated_is_counted():
    plain, full, selective = (flops(how) for how in WAYS)
    forward, stem = plain["forward"], plain["stem"]
    assert plain["backward"] == 2 * forward - stem, "images need no gradient"
    assert full == plain | {"backward": plain["backward"] + forward - stem - plain["head"]}
    assert selective == plain


# Compiled


def compiled_or_not(how: str, compiled: bool) -> tuple[list[Tensor], int]:
    """Losses, gradients and buffers of two steps; bytes that the last kept for its backward."""
    torch.manual_seed(0)
    model = ResNet(4, channels=1, stem="cifar", width=8)
    for block in model.modules():
        if isinstance(block, BasicBlock):
            recompute(block, how, KEPT)
    if compiled:
        model.compile(dynamic=False, fullgraph=True)
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        model.zero_grad()
        storages = {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(32, 1, 8, 8)).square().mean()
        loss.backward()
        found.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*found, *gradients, *model.buffers()], sum(storages.values())


@pytest.mark.slow
def test_compiled_it_computes_the_same_and_keeps_less():
    plain, _ = compiled_or_not("none", compiled=False)
    kept = {}
    for how in WAYS:
        torch.compiler.reset()
        other, kept[how] = compiled_or_not(how, compiled=True)
        for mine, theirs in zip(plain, other, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    assert kept["full"] < kept["selective"] < kept["none"]
