import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shared.metrics import Tally


def tallied(logits, labels, batch_size):
    tally = Tally(torch.device("cpu"))
    for part, own in zip(logits.split(batch_size), labels.split(batch_size), strict=True):
        tally.add(F.cross_entropy(part, own, reduction="sum"), part, own)
    return tally.evaluation()


@given(st.integers(1, 20), st.integers(2, 9), st.integers(1, 20))
def test_an_evaluation_is_that_of_all_samples_whatever_the_batches(samples, classes, batch_size):
    generator = torch.Generator().manual_seed(samples * 100 + classes)
    logits = torch.randn(samples, classes, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    found = tallied(logits, labels, batch_size)
    predicted = logits.argmax(1)
    assert found.accuracy == (predicted == labels).sum().item() / samples
    assert found.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)
    for true in range(classes):
        for taken in range(classes):
            expected = ((labels == true) & (predicted == taken)).sum()
            assert found.confusion[true, taken] == expected


def test_top5_is_there_with_more_than_five_classes():
    logits = torch.arange(7.0).repeat(7, 1)
    assert tallied(logits, torch.arange(7), 3).top5 == 5 / 7
    assert tallied(logits[:, :5], torch.arange(5).repeat(2)[:7], 3).top5 is None


def test_a_class_without_samples_has_no_accuracy():
    logits = torch.eye(3)[[0, 0, 1]]
    assert tallied(logits, torch.tensor([0, 1, 1]), 2).class_accuracy() == [1.0, 0.5, None]
