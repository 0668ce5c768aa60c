"""Checks that a few processes make of each other; torchrun starts it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from shared import distributed
from shared.distributed import on_main, rank, settle, sync_buffers, together, total, world_size
from shared.errors import UserError
from shared.metrics import Tally
from shared.settings import RunConfig

CPU = torch.device("cpu")


def fail() -> None:
    """Raise what a user can mend."""
    raise UserError(f"of rank {rank()}")


def check_exchanges() -> None:
    """What one tells, all know."""
    assert on_main(lambda: {"rank": rank(), "tensor": torch.ones(2)})["rank"] == 0
    with pytest.raises(UserError, match="of rank 0"):
        on_main(fail)
    size = world_size()
    assert total(torch.tensor(rank() + 1)) == size * (size + 1) // 2
    assert distributed.largest(rank()) == size - 1
    done = Path(sys.argv[0]).with_suffix(".done")
    done.unlink(missing_ok=True)
    distributed.largest(0)
    with distributed.main_goes_first():
        assert done.exists() is (rank() > 0)
        if rank() == 0:
            done.touch()
            print("first")
    distributed.largest(0)
    if rank() == 0:
        done.unlink()


def check_buffers() -> None:
    """Averages become equal, and settling leaves everything as it was."""
    for how, expected in (("rank0", 0.0), ("averaged", (world_size() - 1) / 2)):
        norm = nn.BatchNorm1d(3)
        norm.running_mean.fill_(rank())
        norm.num_batches_tracked.fill_(rank() + 5)
        sync_buffers(norm, how)
        assert torch.equal(norm.running_mean, torch.full((3,), expected))
        assert torch.equal(norm.running_var, torch.ones(3))
        assert norm.num_batches_tracked == 5
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    wrapped = distributed.DDP(model, **distributed.BUFFERS_STAY)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    settle(wrapped, (4, 3))
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert all(parameter.grad is None for parameter in model.parameters())


def check_evaluation() -> None:
    """11 samples are counted once each, also where some processes have none."""
    labels = torch.arange(11) % 7
    logits = torch.randn(11, 7, generator=torch.Generator().manual_seed(0))
    for counted in (11, 2):
        own = torch.arange(counted).tensor_split(world_size())[rank()]
        tally = Tally(CPU)
        if len(own):
            loss = nn.functional.cross_entropy(logits[own], labels[own], reduction="sum")
            tally.add(loss, logits[own], labels[own])
        found = tally.evaluation()
        assert int(found.confusion.sum()) == counted
        right = (logits[:counted].argmax(1) == labels[:counted]).sum()
        assert found.accuracy == int(right) / counted
        mean = nn.functional.cross_entropy(logits[:counted], labels[:counted])
        torch.testing.assert_close(found.loss, float(mean), rtol=1e-5, atol=0)


def main(config: RunConfig) -> None:
    """Check everything."""
    check_exchanges()
    check_buffers()
    check_evaluation()
    print("all is well")


if __name__ == "__main__":
    together(main)(RunConfig(device="cpu"))
    distributed.leave(0)
