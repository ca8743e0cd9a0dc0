"""Accuracy of a network on test data."""

from dataclasses import dataclass

import torch
from torch import nn

from probmask.data import DataSource


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
    """Classify all test images, in evaluation mode; the model's mode is restored."""
    was_training = model.training
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for batch in data.testing(batch_size=batch_size):
            guess = model(batch.images.to(device)).argmax(1)
            correct += int((guess == batch.labels.to(device)).sum())
            total += len(batch.labels)
    model.train(was_training)
    return Score(correct, total)
