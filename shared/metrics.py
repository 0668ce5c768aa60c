"""How well a classifier does: loss, accuracy, top-5, and which classes it takes for which."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

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

    def __init__(self) -> None:
        self._counts: tuple[Tensor, Tensor, Tensor] | None = None
        self._classes = 0

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            loss_sum: of its samples, a scalar.
            logits: [B, C].
            labels: int64 [B].
        """
        if self._counts is None:
            self._classes = logits.shape[1]
            zeros = torch.zeros(1 + self._classes**2, device=logits.device, dtype=torch.int64)
            self._counts = torch.zeros((), device=logits.device), zeros[0], zeros[1:]
        total, in_top5, confusion = self._counts
        total += loss_sum
        if self._classes > 5:
            top5 = logits.topk(5, dim=1).indices
            in_top5 += (top5 == labels[:, None]).sum()
        cells = labels * self._classes + logits.argmax(1)
        confusion += torch.bincount(cells, minlength=len(confusion))

    def evaluation(self) -> Evaluation:
        """Read the counts; at least one batch was added.

        Raises:
            Diverged: the loss is not finite.
        """
        assert self._counts is not None
        total, in_top5, confusion = (count.cpu() for count in self._counts)
        confusion = confusion.view(self._classes, self._classes)
        samples = int(confusion.sum())
        if not math.isfinite(total):
            raise Diverged(f"the loss of an evaluation is {total.item()}; a lower --lr may help")
        return Evaluation(
            loss=total.item() / samples,
            accuracy=int(confusion.diag().sum()) / samples,
            top5=in_top5.item() / samples if self._classes > 5 else None,
            confusion=confusion,
        )
