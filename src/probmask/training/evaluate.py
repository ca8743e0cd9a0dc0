"""Accuracy of a network on test or validation images."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from probmask.data import DataSource
from probmask.errors import InputError
from probmask.masking.modes import evaluating


@dataclass(frozen=True)
class Score:
    """How many images were classified correctly."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * self.correct / self.total

    def as_table(self) -> dict[str, Any]:
        """As it stands in a record."""
        return {"correct": self.correct, "total": self.total, "accuracy": self.accuracy}


# So many pixels go through the network at once: 500 images of CIFAR, 41 of ImageNet.
_PIXELS_AT_ONCE = 500 * 64 * 64


def evaluate_model(
    model: nn.Module,
    data: DataSource,
    *,
    part: Literal["val", "test"] = "test",
    device: torch.device | None = None,
) -> Score:
    """Classify all images of the part, in evaluation mode; every module's mode is restored."""
    correct = total = 0
    _, height, width = data.image_shape
    batch_size = max(1, min(500, _PIXELS_AT_ONCE // (height * width)))
    images = data.testing if part == "test" else data.validation
    with evaluating(model):
        for batch in images(batch_size=batch_size):
            guess = model(batch.images.to(device)).argmax(1)
            correct += int((guess == batch.labels.to(device)).sum())
            total += len(batch.labels)
    if total == 0:
        raise InputError(f"--data {data.name}: has no {part} image that can be read.")
    return Score(correct, total)
