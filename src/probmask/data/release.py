"""What a published data set consists of; its files are held to this."""

from dataclasses import dataclass
from pathlib import Path

import torch

from probmask.data.in_memory import Images
from probmask.errors import InputError


@dataclass(frozen=True)
class Release:
    """A data set as it was published."""

    name: str
    classes: int
    image_shape: tuple[int, int, int]
    train_images: int
    test_images: int

    def check(self, train: Images, test: Images, *, source: Path) -> None:
        """Refuse images whose number or shape is not the release's."""
        for images, count in ((train, self.train_images), (test, self.test_images)):
            shape = (count, *self.image_shape)
            if tuple(images.pixels.shape) != shape or len(images) != count:
                there = f"{_times(images.pixels.shape)} pixels and {len(images):,} labels"
                raise damaged(source, f"{there} instead of {_times(shape)} and {count:,}")


def check_labels(labels: torch.Tensor, classes: int, source: Path | str) -> None:
    """Refuse labels that are not of one of the classes."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        where = int(wrong.nonzero()[0])
        raise damaged(
            source,
            f"the label of image {where} is {int(labels[where])}, not from 0 to {classes - 1}",
        )


def damaged(source: Path | str, reason: str) -> InputError:
    """Say what is wrong with a file."""
    return InputError(f"{source}: is damaged ({reason}); fetch it again.")


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(f"{size:,}" for size in shape)
