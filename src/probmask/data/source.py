"""The interface of a data set: its settings, its batches, and how they are normalized.

Every training batch is a pure function of seed, epoch and position.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from probmask.checks import check_count, check_within
from probmask.core.noise import RunStream, fold
from probmask.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SmallImages:
    """Settings of data sets that are held in memory (``[data_args]``).

    Attributes:
        padding: Width of the zero padding in pixels. Training images are padded, then cropped at
            a random position to their original size.
        flip: Whether half of the training images, chosen at random, are mirrored.
        mean: Mean of each channel, for pixels in [0, 1]. None: computed from the training images.
        std: Standard deviation of each channel. None: computed from the training images.
        train_images: Number of training images to use, from the first on. None: all.
        validation_images: Number of images that `DataSource.with_validation` holds out. None: a
            tenth of the training images, at most 10,000. If `train_images` is set too, they are
            taken from the images that are not used for training.
        test_images: Number of test images to use, from the first on. None: all.
    """

    padding: int
    flip: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train_images: int | None = None
    validation_images: int | None = None
    test_images: int | None = None

    def __post_init__(self) -> None:
        check_count("data_args", "padding", self.padding, least=0, meaning="a number of pixels")
        _check_limits(self)
        _check_statistics(self.mean, self.std)


@dataclass(frozen=True, kw_only=True)
class Photographs:
    """Settings of data sets whose image files are read when they are needed (``[data_args]``).

    Attributes:
        image_size: Side of the images in pixels. For training, a random part of the image is
            scaled to this size and mirrored half of the time. For testing, the shorter side is
            scaled to 256/224 of this size and the center is cut out.
        mean: Mean of each channel, for pixels in [0, 1].
        std: Standard deviation of each channel.
        train_images: Number of training images to use, evenly spaced in the list. None: all.
        validation_images: Number of images that `DataSource.with_validation` holds out. None: a
            tenth of the training images, at most 10,000. If `train_images` is set too, they are
            taken from the images that are not used for training.
        test_images: Number of test images to use, evenly spaced in the list. None: all.
        unreadable: What to do with a file that cannot be decoded. "skip" warns and uses another
            file; "refuse" reads every file before training starts, and raises InputError.
    """

    image_size: int = 224
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    train_images: int | None = None
    validation_images: int | None = None
    test_images: int | None = None
    unreadable: Literal["skip", "refuse"] = "skip"

    def __post_init__(self) -> None:
        check_count(
            "data_args", "image_size", self.image_size, least=1, meaning="a number of pixels"
        )
        _check_limits(self)
        _check_statistics(self.mean, self.std)
        if len(self.mean) != 3:
            raise InputError(
                f"data_args(mean={self.mean}): image files have three channels; give three numbers."
            )


@dataclass(frozen=True)
class Batch:
    """Normalized images, (count, channels, height, width), and their labels."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Shard:
    """The slice of every training batch that belongs to `rank`, one of `ranks` ranks."""

    rank: int = 0
    ranks: int = 1


# The shard of a run with a single rank.
WHOLE = Shard()


class DataSource(ABC):
    """A data set for image classification.

    The training batch at a given epoch and position is a pure function of the seed. A resumed run
    therefore sees the same batches as an uninterrupted one, even from the middle of an epoch.
    Validation images are held out only after `with_validation`.

    Attributes:
        name: Name of the data set.
        classes: Number of classes.
        class_names: Names of the classes, if they are known.
        image_shape: (channels, height, width) of the images in a batch.
        train_size: Number of training images.
        val_size: Number of validation images.
        test_size: Number of test images.
        settings: Settings with which the data set was loaded.
    """

    name: str
    classes: int
    class_names: tuple[str, ...] | None = None
    image_shape: tuple[int, int, int]
    train_size: int
    val_size: int = 0
    test_size: int
    settings: SmallImages | Photographs

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of full training batches in an epoch.

        Raises:
            InputError: If a batch is larger than the training set.
        """
        if batch_size > self.train_size:
            raise InputError(
                f"batch_size={batch_size}: {self.name} has {self.train_size} training images "
                f"({self.val_size} are held out); pass a smaller --batch-size."
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


def _check_limits(settings: SmallImages | Photographs) -> None:
    limits = {
        "train_images": settings.train_images,
        "validation_images": settings.validation_images,
        "test_images": settings.test_images,
    }
    for name, value in limits.items():
        if value is not None:
            check_count("data_args", name, value, least=1, meaning="a number of images")


def _check_statistics(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    if (mean is None) != (std is None) or (mean and std and len(mean) != len(std)):
        raise InputError(
            f"data_args(mean={mean}, std={std}): give both, with one number per channel each."
        )
    for value in mean or ():
        check_within("data_args", "mean", value, 0, 1, meaning="the mean of pixels in [0, 1]")
    for value in std or ():
        check_within("data_args", "std", value, 1e-6, float("inf"), meaning="a standard deviation")
