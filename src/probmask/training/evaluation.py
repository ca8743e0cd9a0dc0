"""Accuracy of a network on test or validation images."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from probmask.data import DataSource
from probmask.errors import InputError
from probmask.masking.batchnorm import evaluating


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


def check_fits(
    model: nn.Module,
    data: DataSource,
    *,
    device: torch.device | None = None,
    trained_on: Any = None,
) -> None:
    """Refuse a network and data that do not belong together; ``trained_on`` names its classes."""
    shape = "×".join(str(size) for size in data.image_shape)
    try:
        with evaluating(model):
            output = model(torch.zeros(1, *data.image_shape, device=device))
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--data {data.name}: the network does not take its {shape} images: {reason}."
        ) from error
    if output.shape != (1, data.classes):
        raise InputError(
            f"--data {data.name}: has {data.classes} classes, but the network gives an output of "
            f"shape {tuple(output.shape[1:])} for an image; take the data it was made for."
        )
    if isinstance(trained_on, list) and data.class_names is not None:
        for ours, theirs in zip(trained_on, data.class_names, strict=False):
            if ours != theirs:
                raise InputError(
                    f"--data {data.name}: has a class {theirs!r} where the network was trained on "
                    f"{ours!r}; take the data it was made for."
                )


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
