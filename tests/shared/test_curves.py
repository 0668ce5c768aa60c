"""The picture of a run."""

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from shared import curves
from shared.curves import CURVES_FILE, draw

EVENTS = [
    {"event": "step", "step": 10, "loss": 2.0, "lr": 0.1, "grad_norm": 3.0, "data_wait": None},
    {"event": "step", "step": 20, "loss": 1.5, "lr": 0.2, "grad_norm": 2.5},
    {
        "event": "epoch", "step": 25, "epoch": 1, "train_loss": 1.7, "train_accuracy": 0.4,
        "val_loss": 1.6, "val_accuracy": 0.5,
    },
    {"event": "step", "step": 30, "loss": 1.0, "lr": 0.1, "grad_norm": None},
    {"event": "result", "step": 30, "result": {"test_loss": 1.0}},
]  # fmt: skip


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were drawn."""
    figures = []

    class Recorded(Figure):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            figures.append(self)

    monkeypatch.setattr("matplotlib.figure.Figure", Recorded)
    return figures


def test_every_panel_has_its_series(tmp_path, drawn):
    assert draw(tmp_path, EVENTS, "a run") == tmp_path / CURVES_FILE
    (figure,) = drawn
    series = {
        axes.get_ylabel(): {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        for axes in figure.axes
    }
    assert series == {
        "loss": {
            "training step": [[10, 2.0], [20, 1.5], [30, 1.0]],
            "training epoch": [[25, 1.7]],
            "validation": [[25, 1.6]],
        },
        "accuracy": {"training epoch": [[25, 0.4]], "validation": [[25, 0.5]]},
        "learning rate": {"training step": [[10, 0.1], [20, 0.2], [30, 0.1]]},
        "gradient norm": {"training step": [[10, 3.0], [20, 2.5]]},
    }
    assert figure.get_suptitle() == "a run"


def test_the_picture_is_a_png_of_these_events(tmp_path):
    rates = {10: 0.1, 20: 0.1, 30: 0.2}
    other = [{**e, "lr": rates[e["step"]]} if "lr" in e else e for e in EVENTS]
    pictures = []
    for number, events in enumerate((EVENTS, EVENTS, other)):
        folder = tmp_path / str(number)
        folder.mkdir()
        pictures.append(imread(draw(folder, events, "a run")))
        assert [path.name for path in folder.iterdir()] == [CURVES_FILE]
    first, again, changed = pictures
    assert first.shape == (720, 1080, 4)
    assert (first == again).all()
    left, top = first.shape[1] // 2, first.shape[0] // 2
    assert (first[:top] == changed[:top]).all(), "losses and accuracies are the same"
    assert not (first[top:, :left] == changed[top:, :left]).all(), "the learning rate is not"
    for color in (curves.TRAIN, curves.VALIDATION):
        rgb = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(first[..., :3] - rgb).max(axis=-1) < 0.01).sum() > 20, color


def test_a_run_without_events_has_a_picture_too(tmp_path):
    assert imread(draw(tmp_path, [], "nothing")).min() < 0.5


def test_a_title_is_not_read_as_mathematics(tmp_path):
    draw(tmp_path, [], r"runs/$x_{$ and \frac")
    assert (tmp_path / CURVES_FILE).stat().st_size > 0
