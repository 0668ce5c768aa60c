"""Some steps in float64, without BatchNorm, in as many processes as torchrun starts.

    torchrun --nproc-per-node N distributed_steps.py FILE

Rank 0 writes the losses and gradient norms of the steps, the weights after them, how often
gradients were exchanged, and the seeds of all ranks; each checks that all have its weights. Then
one step with BatchNorm, for each way to average.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from refs import vision_resnet_distributed as script
from shared import distributed
from shared.data import images
from shared.data.splits import spread
from shared.training import Learner

CPU = torch.device("cpu")
SAMPLES, EPOCHS = 37, 2
CONFIG = script.Config(
    width=4, batch_size=11, accumulate=3, precision="fp32", device="cpu", ema=0.9, crop_padding=2
)
"""37 samples make three batches of 11 and one of 4, of which three processes get 2, 1 and 1."""


def without_batch_norm(model: nn.Module) -> nn.Module:
    """Samples of a batch do not see each other then, so that shares of it add up."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    return model


def steps(config: script.Config) -> dict:
    """Train, and tell what came of it."""
    part = spread(images.load(config).train, SAMPLES)
    about = script.describe(part, config)
    prepare = script.make_preparation(about, part, config, CPU)
    loader = script.make_loader(part, config, CPU, shuffle=True)
    torch.manual_seed(distributed.rank())  # other weights in each, until they are wrapped
    model = without_batch_norm(script.build_model(about, config, CPU)).double()
    learner = Learner(model, config, len(loader))
    model = script.parallelize(learner.model, part.shape, config, CPU)
    exchanges = []
    if isinstance(model, nn.parallel.DistributedDataParallel):

        def counted(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            exchanges.append(bucket.index())
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, counted)
    results, seen, seeds = [], [], []
    for epoch in range(EPOCHS):
        rows = prepare.augmentation.table(loader.size, config.seed, epoch)
        for batch in loader.epoch(epoch):
            seen += batch.indices.tolist()
            inputs = prepare(batch, rows)
            inputs = inputs._replace(inputs=inputs.inputs.double())
            result = script.train_step(
                model, learner.optimizer, learner.scaler, inputs, config, len(results)
            )
            learner.step_ended()
            seeds.append(torch.initial_seed())
            results.append([float(result.loss), float(result.grad_norm), float(result.correct)])
    weights = dict(learner.evaluated.state_dict())
    assert_equal_everywhere(weights)
    return {
        "results": results,
        "weights": weights,
        "exchanges": len(exchanges),
        "seen": len(seen),
        "seeds": gathered(seeds),
    }


def gathered(value: Any) -> list[Any]:
    """What all processes have."""
    values = [None] * distributed.world_size()
    dist.all_gather_object(values, value)
    return values


def assert_equal_everywhere(weights: dict[str, torch.Tensor]) -> None:
    """All processes hold the same."""
    for others in gathered(weights):
        assert all(torch.equal(others[name], weight) for name, weight in weights.items())


def averages(config: script.Config) -> torch.Tensor:
    """What the first BatchNorm remembers of a batch of 12, after one step."""
    part = spread(images.load(config).train, 12)
    about = script.describe(part, config)
    prepare = script.make_preparation(about, part, config, CPU)
    torch.manual_seed(0)
    learner = Learner(script.build_model(about, config, CPU), config, 1)
    model = script.parallelize(learner.model, part.shape, config, CPU)
    for batch in script.make_loader(part, config, CPU, shuffle=True).epoch():
        inputs = prepare(batch)
        script.train_step(model, learner.optimizer, learner.scaler, inputs, config, 0)
    assert_equal_everywhere(dict(learner.model.state_dict()))
    return learner.model.bn1.running_mean


def main(config: script.Config) -> None:
    """Write what came of it, on rank 0."""
    found = steps(config)
    for how in ("rank0", "averaged"):
        found[how] = averages(replace(config, batch_norm=how, batch_size=12, accumulate=1))
    if distributed.is_main():
        torch.save(found, Path(sys.argv[1]))


if __name__ == "__main__":
    distributed.together(main)(CONFIG)
    distributed.leave(0)
