"""Batched augmentation and normalisation of images held as bytes, on whichever device they are."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Crops:
    """Random crops and flips of images, which may be padded with zeros first.

    The images are padded once and all their windows are a view, so that the crops of a batch are
    one indexing operation that copies whole rows.
    """

    def __init__(self, pixels: Tensor, *, padding: int, flip: bool) -> None:
        self._positions = 2 * padding + 1
        self._flip = flip
        height, width = pixels.shape[-2:]
        padded = nn.functional.pad(pixels, (padding,) * 4) if padding else pixels
        self._windows = padded.unfold(2, height, 1).unfold(3, width, 1)

    def draw(
        self,
        chosen: Tensor,
        generator: torch.Generator,
        *,
        of: int | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Crop the chosen images at random; return their numbers in the order of the crops.

        With ``of`` they are those from the ``first`` on of a batch of so many: ranks that share a
        batch crop it as one alone would. The mirrored ones come first, which saves gathering them
        twice; the order within a batch has no meaning. The generator is the CPU's: the same seed
        crops alike on every device.
        """
        count = len(chosen) if of is None else of
        part, device = slice(first, first + len(chosen)), self._windows.device
        places = torch.randint(self._positions, (2, count), generator=generator)[:, part]
        mirrored = 0
        if self._flip:
            mirror = (torch.rand(count, generator=generator) < 0.5)[part]
            mirrored = int(mirror.sum())
            order = (~mirror).int().argsort(stable=True)
            chosen, places = chosen[order], places[:, order]
        chosen, (top, left) = chosen.to(device), places.to(device)
        crops = self._windows[chosen, :, top, left]
        crops[:mirrored] = crops[:mirrored].flip(3)
        return crops, chosen


class Normalisation:
    """Maps bytes to (pixel / scale - mean) / std, channel by channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, scale: float) -> None:
        means, deviations = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
        self._factor = (1 / (deviations * scale)).float().view(1, -1, 1, 1)
        self._shift = (-means / deviations).float().view(1, -1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return float32 images."""
        factor, shift = self._factor.to(pixels.device), self._shift.to(pixels.device)
        return pixels.float().mul_(factor).add_(shift)
