"""Activation checkpointing: less memory, for a part of the forward pass made again in backward.

After Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016
(https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Recomputation = Literal["none", "full", "selective"]


def recompute(module: nn.Module, how: Recomputation, kept: Sequence[OpOverload] = ()) -> None:
    """Let a module keep only its input for the backward pass, and make the rest of it again.

    Its outputs, its gradients and the averages of BatchNorms in it stay bitwise what they were, and
    so do the keys of its state. Dropout draws the same again. Other layers that change a buffer in
    their forward, such as spectral norms, would change it twice.

    Args:
        module: its `forward` is replaced, of this instance alone; copies of it run themselves.
        how: full: everything is made again. selective: all but the outputs of `kept`, which are
            kept. none: nothing is changed.
        kept: operators that are dear to compute, such as `torch.ops.aten.convolution.default`.
    """
    if how != "none":
        operators = tuple(kept) if how == "selective" else None
        module.forward = partial(_forward, module.forward, module, operators)


def _forward(
    forward: Callable[..., Any],
    module: nn.Module,
    kept: Sequence[OpOverload] | None,
    /,
    *inputs: Any,
    **named: Any,
) -> Any:
    contexts: dict[str, Any] = {}
    if kept is not None:
        make = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
        contexts["context_fn"] = make
    # A compiled backward pass repeats operators and not modules: it changes every buffer once.
    if not torch.compiler.is_compiling():
        forward = _averaging_once(forward, module)
    # The reentrant form does not go together with DDP.
    return checkpoint(forward, *inputs, use_reentrant=False, **contexts, **named)


def _policy(
    kept: Sequence[OpOverload],
    context: object,
    operator: OpOverload,
    *inputs: object,
    **named: object,
) -> CheckpointPolicy:
    is_kept = operator in kept
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _averaging_once(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """A function of which every call but the first is a repetition, for one forward pass."""
    calls = count()
    # Made here: in the repetition, selective checkpointing lets no operator run that is new to it.
    unread = torch.zeros((), dtype=torch.int64)

    def run(*inputs: Any, **named: Any) -> Any:
        with _averages_stay(module, unread) if next(calls) else nullcontext():
            return forward(*inputs, **named)

    return run


@contextmanager
def _averages_stay(module: nn.Module, unread: Tensor) -> Iterator[None]:
    """Keep the running averages of BatchNorms as they are (pytorch#96136).

    With momentum 0 they are still read and written, so that the operators, and what these save for
    the backward pass, are the same as in the forward pass. Batches are counted in `unread`, since
    SyncBatchNorm refuses to have no counter.
    """
    norms = [part for part in module.modules() if isinstance(part, _NormBase)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = unread
    try:
        yield
    finally:
        for norm, (momentum, counter) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, counter
