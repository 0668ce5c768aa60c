"""What processes of a group see of each other: started by test_distributed.py, one rank each.

    python group_checks.py RANK WORLD_SIZE FOLDER

Every check runs in all ranks of one group, since starting processes takes seconds. The first one
that fails ends its rank, and tells its name in the traceback.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shared import distributed
from shared.data.sampling import BatchSampler
from shared.distributed import BUFFERS_STAY, on_main, rank, settle, sync_buffers, world_size
from shared.errors import UserError
from shared.metrics import Tally


def check_who_is_who(folder: Path) -> None:
    assert distributed.is_joined()
    assert (rank(), world_size()) == (int(sys.argv[1]), int(sys.argv[2]))
    assert distributed.is_main() == (rank() == 0)


def check_main_acts_for_all(folder: Path) -> None:
    assert on_main(lambda: {"rank": rank(), "path": folder}) == {"rank": 0, "path": folder}
    assert on_main(lambda: (folder / "once").mkdir()) is None, "made twice it would raise"


def check_what_main_refuses_all_refuse(folder: Path) -> None:
    def refuse() -> None:
        raise UserError(f"rank {rank()} says no")

    with pytest.raises(UserError, match=r"^rank 0 says no$"):
        on_main(refuse)
    assert on_main(lambda: 5) == 5, "and the group goes on"


def check_sums_and_the_largest(folder: Path) -> None:
    own = torch.tensor([1.0, rank()])
    assert distributed.total(own).tolist() == [world_size(), sum(range(world_size()))]
    assert own.tolist() == [1.0, rank()], "it stays as it was"
    assert distributed.total(torch.tensor(2**40 + rank())).item() == (
        2**40 * world_size() + sum(range(world_size()))
    )
    assert distributed.largest(rank()) == world_size() - 1
    assert distributed.largest(-rank()) == 0


def check_what_differs_is_refused_by_all(folder: Path) -> None:
    distributed.check_same("--data", ["a", 1])
    own = "other" if rank() == world_size() - 1 else "same"
    with pytest.raises(UserError, match=rf"^--data: rank {world_size() - 1} on .* than rank 0"):
        distributed.check_same("--data", own)
    assert on_main(lambda: 5) == 5, "and the group goes on"


def check_main_goes_first(folder: Path) -> None:
    with distributed.main_goes_first():
        if rank() == 0:
            assert not list(folder.glob("seen-*"))
            time.sleep(0.3)
            (folder / "download").write_text("whole")
        else:
            assert (folder / "download").read_text() == "whole"
            (folder / f"seen-{rank()}").touch()


class Norms(nn.Module):
    """Layers that are used in another order than they are made in; buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def check_buffers_become_those_of_main_or_the_mean(folder: Path) -> None:
    for how in ("rank0", "averaged"):
        model = Norms()
        model.norm.running_mean.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]) + rank())
        model.norm.running_var.fill_(2.0 * rank())
        model.norm.num_batches_tracked.fill_(10 + rank())
        sync_buffers(model, how)
        middle = (world_size() - 1) / 2 if how == "averaged" else 0.0
        assert model.norm.running_mean.tolist() == [middle, 1 + middle, 2 + middle, 3 + middle]
        assert model.norm.running_var.tolist() == [2 * middle] * 4
        assert model.norm.num_batches_tracked.item() == 10, "a counter has no mean"
        assert model.norm.num_batches_tracked.dtype == torch.int64
    sync_buffers(nn.Linear(1, 1), "averaged")  # has none


def ddp_of(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **BUFFERS_STAY)


def places_of(ddp: nn.parallel.DistributedDataParallel, steps: int) -> list[list[str]]:
    """The parameters as they stand in the bucket, in each of some steps."""
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    seen = []

    def noting(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append([names[id(parameter)] for parameter in bucket.parameters()])
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, noting)
    for _ in range(steps):
        ddp(torch.randn(6, 5)).square().sum().backward()
    return seen


def check_settled_buckets_stay_and_nothing_was_learnt(folder: Path) -> None:
    torch.manual_seed(0)
    first, second, third = places_of(ddp_of(Norms()), 3)
    assert first != second == third, "which is what settling is for"
    ddp = ddp_of(Norms())
    before = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    settle(ddp, (2, 5))
    assert all(torch.equal(value, before[n]) for n, value in ddp.module.state_dict().items())
    assert all(parameter.grad is None for parameter in ddp.parameters())
    assert places_of(ddp, 3) == [second] * 3
    assert ddp.module.norm.num_batches_tracked.item() == 3


def check_a_tally_is_that_of_one_process(folder: Path) -> None:
    """Also where a rank has none of a batch, or none of any."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, 7, generator=generator)
    labels = torch.randint(7, (11,), generator=generator)
    for batch_size in (11, 4, 3, 1):
        tally, alone = Tally(torch.device("cpu")), torch.zeros(7, 7, dtype=torch.int64)
        for batch in BatchSampler(11, batch_size, seed=0, shuffle=False):
            own = [key.sample for key in batch]
            loss = F.cross_entropy(logits[own], labels[own], reduction="sum")
            tally.add(loss, logits[own], labels[own])
        found = tally.evaluation()
        for label, predicted in zip(labels, logits.argmax(1), strict=True):
            alone[label, predicted] += 1
        assert torch.equal(found.confusion, alone)
        assert found.accuracy == (logits.argmax(1) == labels).sum().item() / 11
        in_top5 = (logits.topk(5).indices == labels[:, None]).sum().item()
        assert found.top5 == in_top5 / 11
        assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)


def main() -> None:
    own, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    where = (folder / "rendezvous").as_uri()
    # Like the program, it names no backend.
    dist.init_process_group(
        init_method=where, rank=own, world_size=size, timeout=timedelta(minutes=2)
    )
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(folder)
            distributed.largest(0)  # none is ahead: what the next one does is its own
    dist.destroy_process_group()
    distributed.leave(0)


if __name__ == "__main__":
    main()
