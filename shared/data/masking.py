"""SpecAugment: stretches of time and bands of frequency that are hidden in training.

Park et al., SpecAugment: A Simple Data Augmentation Method for Automatic Speech Recognition, 2019
(https://arxiv.org/abs/1904.08779), without its time warping.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.seeding import AUGMENTATION, generator


@dataclass(frozen=True)
class Masking:
    """How much is hidden of a training sequence. The defaults hide nothing."""

    time_masks: int = 0
    """Stretches of frames that are hidden."""
    time_mask: float = 0.2
    """Longest of these, as a share of the sequence."""
    feature_masks: int = 0
    """Bands of features that are hidden."""
    feature_mask: float = 0.2
    """Widest of these, as a share of the features."""

    def table(self, size: int, seed: int, epoch: int) -> dict[str, Tensor]:
        """Draw the parameters of an epoch, for `mask`.

        Row i depends on (seed, epoch, i) and not on `size`.

        Returns:
            Tensors on the CPU with one row for each of the `size` samples, only for what is on:
            `time` and `features`, float32 [size, masks, 2]: width and place of each mask, as
            shares of what they may be.
        """
        counts = {"time": self.time_masks, "features": self.feature_masks}
        return {
            name: torch.rand(size, count, 2, generator=generator(AUGMENTATION, seed, epoch, number))
            for number, (name, count) in enumerate(counts.items())
            if count
        }

    def hidden(self, lengths: Tensor, shape: torch.Size, rows: Mapping[str, Tensor]) -> Tensor:
        """What the rows hide of a batch, bool [B, T, F]; stretches of time lie in the sequence.

        Args:
            lengths: frames of each sequence, int64 [B], on any device.
            shape: of the batch, [B, T, F].
            rows: for each of these samples its row of `table`, on the same device.
        """
        _, frames, features = shape
        hidden = torch.zeros(shape, dtype=torch.bool, device=lengths.device)
        if "time" in rows:
            hidden |= _stretches(rows["time"], self.time_mask, lengths, frames)[:, :, None]
        if "features" in rows:
            sizes = torch.full_like(lengths, features)
            hidden |= _stretches(rows["features"], self.feature_mask, sizes, features)[:, None, :]
        return hidden


def _stretches(draws: Tensor, share: float, sizes: Tensor, width: int) -> Tensor:
    """Which of `width` places lie in any stretch, bool [B, width], all within sizes [B]."""
    longest = (share * sizes[:, None]).long()
    lengths = _up_to(longest, draws[..., 0])
    starts = _up_to(sizes[:, None] - lengths, draws[..., 1])
    places = torch.arange(width, device=draws.device)
    inside = (places >= starts[..., None]) & (places < (starts + lengths)[..., None])
    return inside.any(1)


def _up_to(largest: Tensor, draws: Tensor) -> Tensor:
    """Whole numbers from 0 to `largest`, from draws in [0, 1)."""
    return torch.minimum((draws * (largest + 1)).long(), largest)
