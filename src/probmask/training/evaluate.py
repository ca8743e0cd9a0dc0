"""Accuracy of a network on test data."""

from dataclasses import dataclass

import torch
from torch import nn

from probmask.data import DataSource
from probmask.masking.modes import evaluating


@dataclass(frozen=True)
class Score:
    """How many test images were classified correctly."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * self.correct / self.total


def evaluate_model(
    model: nn.Module, data: DataSource, *, batch_size: int = 500, device: torch.device | None = None
) -> Score:
    """Classify all test images, in evaluation mode; every module's mode is restored."""
    correct = total = 0
    with evaluating(model):
        for batch in data.testing(batch_size=batch_size):
            guess = model(batch.images.to(device)).argmax(1)
            correct += int((guess == batch.labels.to(device)).sum())
            total += len(batch.labels)
    return Score(correct, total)
