"""How well a classifier does: loss, accuracy, top-5, and which classes it takes for which."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shared.distributed import largest, total
from shared.errors import Diverged


class Evaluation(NamedTuple):
    """Means over the samples of a data set."""

    loss: float
    accuracy: float
    top5: float | None
    """Share of samples whose class is among the five likeliest; None with five classes or fewer."""
    confusion: Tensor
    """Samples of each class (row) that were taken for each class (column), int64 [C, C]."""

    def class_accuracy(self) -> list[float | None]:
        """Accuracy on the samples of each class; None where there are none."""
        counts, right = self.confusion.sum(1).tolist(), self.confusion.diag().tolist()
        return [r / n if n else None for r, n in zip(right, counts, strict=True)]


class Tally:
    """Counts over the batches of an evaluation, on the device: only the end waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: tuple[Tensor, Tensor, Tensor] | None = None
        self._classes = 0

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            loss_sum: of its samples, a scalar.
            logits: [B, C].
            labels: int64 [B].
        """
        losses, in_top5, confusion = self._counts or self._zeros(logits.shape[1])
        losses += loss_sum
        if self._classes > 5:
            top5 = logits.topk(5, dim=1).indices
            in_top5 += (top5 == labels[:, None]).sum()
        cells = labels * self._classes + logits.argmax(1)
        confusion += torch.bincount(cells, minlength=len(confusion))

    def _zeros(self, classes: int) -> tuple[Tensor, Tensor, Tensor]:
        self._classes = classes
        zeros = torch.zeros(1 + classes**2, device=self._device, dtype=torch.int64)
        self._counts = torch.zeros((), device=self._device), zeros[0], zeros[1:]
        return self._counts

    def evaluation(self) -> Evaluation:
        """Read the counts of all processes; at least one batch was added in one of them.

        Raises:
            Diverged: the loss is not finite.
        """
        classes = largest(self._classes)  # a process without a batch has not seen any
        own = self._counts or self._zeros(classes)
        losses, in_top5, confusion = (total(count).cpu() for count in own)
        confusion = confusion.view(self._classes, self._classes)
        samples = int(confusion.sum())
        if not math.isfinite(losses):
            raise Diverged(f"the loss of an evaluation is {losses.item()}; a lower --lr may help")
        return Evaluation(
            loss=losses.item() / samples,
            accuracy=int(confusion.diag().sum()) / samples,
            top5=in_top5.item() / samples if self._classes > 5 else None,
            confusion=confusion,
        )
