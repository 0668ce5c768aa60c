"""Some steps in float64, without BatchNorm, in as many processes as torchrun starts.

    torchrun --nproc-per-node N distributed_steps.py FILE

Rank 0 writes the losses and gradient norms of the steps, the weights after them, and how often
gradients were exchanged; each rank checks that its weights are those of rank 0.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from refs import vision_resnet_distributed as script
from shared import distributed
from shared.data import images
from shared.data.splits import spread
from shared.training import Learner

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
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    part = spread(images.load(config).train, SAMPLES)
    about = script.describe(part, config)
    prepare = script.make_preparation(about, part, config, cpu)
    loader = script.make_loader(part, config, cpu, shuffle=True)
    model = without_batch_norm(script.build_model(about, config, cpu)).double()
    learner = Learner(model, config, len(loader))
    model = script.parallelize(learner.model, part.shape, config, cpu)
    exchanges = []
    if isinstance(model, nn.parallel.DistributedDataParallel):

        def counted(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            exchanges.append(bucket.index())
            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, counted)
    results, seen = [], []
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
            results.append([float(result.loss), float(result.grad_norm), float(result.correct)])
    weights = dict(learner.evaluated.state_dict())
    for weight in weights.values():
        of_main = weight.clone()
        dist.broadcast(of_main, src=0)
        assert torch.equal(weight, of_main)
    return {"results": results, "weights": weights, "exchanges": len(exchanges), "seen": len(seen)}


def main(config: script.Config) -> None:
    """Write what came of it, on rank 0."""
    found = steps(config)
    if distributed.is_main():
        torch.save(found, Path(sys.argv[1]))


if __name__ == "__main__":
    distributed.together(main)(CONFIG)
