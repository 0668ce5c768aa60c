"""How well a classifier does: loss, accuracy, top-5, and which classes it takes for which."""

from typing import NamedTuple

import torch
from torch import Tensor


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
    """Counts over the batches of an evaluation, on the device: only the end waits for it.

    Args:
        classes: number of classes.
        device: of the logits.
    """

    def __init__(self, classes: int, device: torch.device) -> None:
        self._loss_sum = torch.zeros((), device=device)
        self._in_top5 = torch.zeros((), device=device, dtype=torch.int64)
        self._confusion = torch.zeros(classes * classes, device=device, dtype=torch.int64)
        self._classes = classes

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            loss_sum: of its samples, a scalar.
            logits: [B, C].
            labels: int64 [B].
        """
        self._loss_sum += loss_sum
        if self._classes > 5:
            top5 = logits.topk(5, dim=1).indices
            self._in_top5 += (top5 == labels[:, None]).sum()
        cells = labels * self._classes + logits.argmax(1)
        self._confusion += torch.bincount(cells, minlength=len(self._confusion))

    def evaluation(self) -> Evaluation:
        """Read the counts."""
        confusion = self._confusion.view(self._classes, self._classes).cpu()
        samples = int(confusion.sum())
        return Evaluation(
            loss=self._loss_sum.item() / samples,
            accuracy=int(confusion.diag().sum()) / samples,
            top5=self._in_top5.item() / samples if self._classes > 5 else None,
            confusion=confusion,
        )
