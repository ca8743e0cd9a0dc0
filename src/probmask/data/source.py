"""The interface of a data set, and its batches.

Every training batch is a pure function of seed, epoch and position.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from probmask.core.noise import RunStream, fold
from probmask.data.settings import Settings
from probmask.errors import InputError

# Pixels per forward pass in evaluation: 500 images of CIFAR or 41 of ImageNet fit.
_PIXELS_PER_PASS = 500 * 64 * 64
# What a network takes: a tensor, or tensors by the names of its arguments.
Inputs = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """Inputs of a network and their labels.

    The inputs are normalized images, (count, channels, height, width), or tensors by the names of
    the network's arguments: ``input_ids`` and ``attention_mask``, (count, tokens).
    """

    inputs: Inputs
    labels: Tensor


@dataclass(frozen=True)
class Shard:
    """The slice of every training batch that belongs to `rank`, one of `ranks` ranks."""

    rank: int = 0
    ranks: int = 1


# The shard of a run with a single rank.
WHOLE = Shard()


class DataSource(ABC):
    """A data set for classification.

    The training batch at a given epoch and position is a pure function of the seed. A resumed run
    therefore sees the same batches as an uninterrupted one, even from the middle of an epoch.
    Validation examples are held out only after `with_validation`.

    Attributes:
        name: Name of the data set.
        examples: What its examples are called: "images" or "sentences".
        classes: Number of classes.
        class_names: Names of the classes, if they are known.
        image_shape: (channels, height, width) of the images in a batch; None for sentences.
        train_size: Number of training examples.
        val_size: Number of validation examples.
        test_size: Number of test examples.
        settings: Settings with which the data set was loaded.
    """

    name: str
    examples: str = "images"
    classes: int
    class_names: tuple[str, ...] | None = None
    image_shape: tuple[int, int, int] | None = None
    train_size: int
    val_size: int = 0
    test_size: int
    settings: Settings

    @property
    def description(self) -> str:
        """The examples and their size, for messages."""
        return f"{'×'.join(map(str, self._image_shape))} images"

    @property
    def example_text(self) -> str:
        """What `example` returns, for records: operations are counted for it."""
        return "one image"

    @property
    def examples_per_pass(self) -> int:
        """Number of examples that a network can evaluate at once without much memory."""
        _, height, width = self._image_shape
        return max(1, min(500, _PIXELS_PER_PASS // (height * width)))

    def model_settings(self) -> dict[str, Any]:
        """Return the settings of a network that follow from the data."""
        channels, height, width = self._image_shape
        size = height if height == width else [height, width]
        return {"classes": self.classes, "channels": channels, "image_size": size}

    def example(self, *, largest: bool = False) -> Inputs:
        """Return one artificial example, to try a network and to count its operations.

        It has a typical size or, with ``largest``, the largest size and largest values.
        """
        return torch.zeros(1, *self._image_shape)

    @property
    def _image_shape(self) -> tuple[int, int, int]:
        assert self.image_shape is not None  # sentences override what uses it
        return self.image_shape

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of full training batches in an epoch.

        Raises:
            InputError: If a batch is larger than the training set.
        """
        if batch_size > self.train_size:
            raise InputError(
                f"train(batch_size={batch_size}): {self.name} has {self.train_size} training "
                f"{self.examples} ({self.val_size} are held out); choose a smaller batch size."
            )
        return self.train_size // batch_size

    @property
    @abstractmethod
    def train_labels(self) -> Tensor:
        """Labels of the training images."""

    @abstractmethod
    def with_validation(self) -> Self:
        """Return a copy that holds out validation images; always the same ones."""

    @abstractmethod
    def to(self, device: torch.device, *, workers: int = 0) -> Self:
        """Return a copy whose batches are on `device` and are made by worker processes.

        With ``workers=0``, this process makes the batches. Neither argument changes their content.
        """

    def check(self, *, progress: bool) -> None:
        """Raise InputError now for files that would fail later; may show a progress bar."""

    @property
    def unreadable(self) -> dict[str, str]:
        """Files that were skipped so far because they cannot be read, with the reasons."""
        return {}

    def recall_unreadable(self, files: Mapping[str, str]) -> None:
        """Restore `unreadable` when a run is resumed."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the data, by which a resumed run recognizes it."""

    def matches(self, fingerprint: str) -> bool:
        """Return whether a fingerprint, also of an earlier version, is that of this data."""
        return fingerprint == self.fingerprint()

    @abstractmethod
    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Generator[Batch, None, None]:
        """Yield the shuffled and augmented training batches of an epoch.

        Args:
            epoch: Number of the epoch.
            batch_size: Number of images per batch, over all ranks.
            seed: Seed of the order and of the augmentation.
            start: Position of the first batch to yield.
            shard: The slice of every batch to yield.

        Close the generator if you do not exhaust it; otherwise worker processes keep running.
        """

    @abstractmethod
    def validation(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all validation images once, in order and without augmentation."""

    @abstractmethod
    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all test images once, in order and without augmentation."""

    def _slices(
        self, epoch: int, *, batch_size: int, seed: int, start: int, shard: Shard
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield this rank's slice of each training batch of an epoch.

        A slice is (position of the batch, index of the slice in the epoch's order, image numbers).
        """
        order = torch.randperm(
            self.train_size, generator=generator(seed, RunStream.BATCH_ORDER, epoch)
        )
        size = batch_size // shard.ranks
        for position in range(start, self.steps_per_epoch(batch_size)):
            begin = position * batch_size + shard.rank * size
            yield position, begin, order[begin : begin + size]


class Normalization:
    """Map uint8 pixels to (pixel / scale - mean) / std, per channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, scale: float) -> None:
        means, deviations = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
        self._factor = (1 / (deviations * scale)).float().view(1, -1, 1, 1)
        self._shift = (-means / deviations).float().view(1, -1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return float32 images on the device of the pixels."""
        factor, shift = self._factor.to(pixels.device), self._shift.to(pixels.device)
        return pixels.float().mul_(factor).add_(shift)


def generator(seed: int, *counters: int) -> torch.Generator:
    """Return a CPU generator whose numbers depend only on seed and counters."""
    return torch.Generator().manual_seed(fold(seed, *counters))
