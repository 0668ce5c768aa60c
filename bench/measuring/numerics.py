"""Does a variant compute the same? Its first steps, against the same steps in float64."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

STEPS = 3

TOLERANCES = {
    "fp32": (1e-4, 1e-2),
    "tf32": (2e-2, 5e-2),
    "bf16": (5e-2, 0.25),
    "fp16": (1e-2, 5e-2),
}
"""By precision, how far from float64 numbers may be: the loss of each step, as a share of it; the
gradient of the first, as a share of its norm. docs/method.md has what was seen, so that another
order of summation passes and another computation does not."""

_LOSSES = "losses"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of the last step, by the name of the parameter, float64 on the CPU.

    Raises:
        ValueError: a parameter has none.
    """
    return {name: _gradient(name, parameter) for name, parameter in model.named_parameters()}


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise ValueError(f"{name} has no gradient after a step")
    return parameter.grad.detach().double().cpu().contiguous()


def save(losses: list[float], first_gradients: dict[str, Tensor], path: Path) -> None:
    """Keep the steps in float64 for the processes that compare with them."""
    losses_of_steps = torch.tensor(losses, dtype=torch.float64)
    save_file({_LOSSES: losses_of_steps, **first_gradients}, path)


def gradient_error(model: nn.Module, path: Path) -> float:
    """Norm of the difference from the gradient in float64, as a share of the norm of that.

    One parameter at a time, since what a copy of all takes would show in the peak of memory.

    Raises:
        ValueError: a parameter has no gradient.
    """
    difference, norm = 0.0, 0.0
    with safe_open(path, "pt") as exact:
        for name, parameter in model.named_parameters():
            of_exact = exact.get_tensor(name)
            difference += float((_gradient(name, parameter) - of_exact).square().sum())
            norm += float(of_exact.square().sum())
    return math.sqrt(difference / norm)


def judge(losses: list[float], gradient: float, precision: str, path: Path) -> dict[str, Any]:
    """What to say of the first steps.

    Args:
        losses: of `STEPS` steps.
        gradient: what `gradient_error` returned after the first.
        precision: chooses the tolerances.
        path: of the steps in float64.

    Returns:
        `loss_error`, the largest as a share of the loss, `gradient_error`, the tolerances, and
        whether both are within them. None stands for what is not finite.
    """
    with safe_open(path, "pt") as file:
        exact = file.get_tensor(_LOSSES)
    errors = (torch.tensor(losses, dtype=torch.float64) - exact).abs() / exact.abs()
    loss = float(errors.max()) if errors.isfinite().all() else math.inf
    loss_tolerance, gradient_tolerance = TOLERANCES[precision]
    return {
        "losses": [value if math.isfinite(value) else None for value in losses],
        "loss_error": loss if math.isfinite(loss) else None,
        "gradient_error": gradient if math.isfinite(gradient) else None,
        "loss_tolerance": loss_tolerance,
        "gradient_tolerance": gradient_tolerance,
        "passed": loss <= loss_tolerance and gradient <= gradient_tolerance,
    }
