"""Pictures of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shared.files import atomic_write

CURVES_FILE = "curves.png"
"""Name of the picture in a run folder."""

CONFUSION_FILE = "confusion.png"
"""Name of the picture of a classifier's mistakes."""

TRAIN, VALIDATION = "#4c72b0", "#dd8452"


def draw(folder: Path, events: Sequence[Mapping[str, Any]], title: str) -> Path:
    """Draw loss, accuracy, learning rate and gradient norm over the steps of a run.

    Args:
        folder: of the run; the picture is written into it.
        events: as `runlog.read` gives them.
        title: above the picture.
    """
    # Figure without pyplot: no display is looked for, and nothing global is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained", dpi=120)
    figure.suptitle(title, fontsize=11, parse_math=False)  # a folder's name may hold dollars
    loss, accuracy, rate, norm = figure.subplots(2, 2, sharex=True).flatten()
    for axes, name, label in (
        (loss, "loss", "loss"),
        (accuracy, "accuracy", "accuracy"),
        (rate, "lr", "learning rate"),
        (norm, "grad_norm", "gradient norm"),
    ):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if name in ("loss", "grad_norm"):  # the first steps are often hundreds of times the last
            axes.set_yscale("log")
        if name != "accuracy":  # one batch says little about accuracy
            axes.plot(
                *_series(events, "step", name),
                color=TRAIN,
                linewidth=1,
                alpha=0.8,
                label="training step",
            )
        if name in ("loss", "accuracy"):
            axes.plot(
                *_series(events, "epoch", f"train_{name}"),
                color=TRAIN,
                marker=".",
                linestyle="--",
                label="training epoch",
            )
            axes.plot(
                *_series(events, "epoch", f"val_{name}"),
                color=VALIDATION,
                marker="o",
                markersize=4,
                label="validation",
            )
            axes.legend(frameon=False, fontsize=8)
    for axes in (rate, norm):
        axes.set_xlabel("step")
    path = folder / CURVES_FILE
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path


def _series(
    events: Sequence[Mapping[str, Any]], event: str, name: str
) -> tuple[list[int], list[float]]:
    points = [
        (e["step"], e[name]) for e in events if e["event"] == event and e.get(name) is not None
    ]
    return [step for step, _ in points], [value for _, value in points]


def draw_confusion(folder: Path, confusion: Tensor, classes: Sequence[str]) -> Path:
    """Draw which classes were taken for which, with the accuracy on each.

    Args:
        folder: of the run; the picture is written into it.
        confusion: int64 [C, C], a row for each true class.
        classes: their names.
    """
    from matplotlib.figure import Figure

    counts = confusion.double()
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    few = len(classes) <= 20  # more are too small to read
    side = min(3 + 0.45 * len(classes), 12)
    figure = Figure(figsize=(side + 1, side), layout="constrained", dpi=120)
    axes = figure.subplots()
    image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true" + (", and accuracy on it" if few else ""))
    if few:
        rows = [f"{name}  {share:.1%}" for name, share in zip(classes, shares.diag(), strict=True)]
        axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(range(len(classes)), rows, parse_math=False)
        for row, column in confusion.nonzero().tolist():
            shade = "white" if shares[row, column] > 0.5 else "black"
            text = str(int(confusion[row, column]))
            axes.text(column, row, text, ha="center", va="center", color=shade, fontsize=8)
    path = folder / CONFUSION_FILE
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path
