"""The interface of a data set: its settings, its batches, and which examples are held out.

Every training batch is a pure function of seed, epoch and position. The held-out examples are
always the same, and stratified by class.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from probmask.checks import check_count, check_within
from probmask.core.allocation import largest_remainder
from probmask.core.noise import RunStream, fold
from probmask.errors import InputError

# A tenth of the training images is held out for validation, but at most 10,000: with these, the
# standard error of an accuracy is at most 0.5 %.
_VALIDATION_FRACTION = 0.1
_MAX_VALIDATION_IMAGES = 10_000
# Fraction of the test images in a data set that has no test part.
_TEST_FRACTION = 0.2
# Pixels per forward pass in evaluation: 500 images of CIFAR or 41 of ImageNet fit.
_PIXELS_PER_PASS = 500 * 64 * 64
# What a network takes: a tensor, or tensors by the names of its arguments.
Inputs = Tensor | dict[str, Tensor]


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


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Settings of data sets of sentences (``[data_args]``).

    Attributes:
        tokenizer: "words" (lower-case words and punctuation, numbered by their frequency in the
            training sentences), "bytes" (of UTF-8), a directory with a tokenizer.json, such a
            file, or the name of a model whose tokenizer.json is in Hugging Face's cache.
        tokenizer_sha256: Digest of the tokenizer, which a record states. If it is given, another
            tokenizer is refused.
        max_length: Largest number of tokens; longer sentences are cut.
        vocabulary: Largest number of tokens of the tokenizer "words".
        text: Column of the sentences: its name, or its number from 1 on. None: the column
            "sentence" or "text", or the first of two columns.
        label: Column of the labels. None: the column "label", or the second of two columns.
        header: Whether the first line names the columns. None: it does if it has the names above.
        train_sentences: Number of training sentences to use, from the first on. None: all.
        validation_sentences: Number of sentences that `DataSource.with_validation` holds out, from
            the first on if they have a file of their own. None: all of that file, or else a tenth
            of the training sentences, at most 10,000.
        test_sentences: Number of test sentences to use, from the first on. None: all.
    """

    tokenizer: str = "words"
    tokenizer_sha256: str | None = None
    max_length: int = 128
    vocabulary: int = 20_000
    text: str | int | None = None
    label: str | int | None = None
    header: bool | None = None
    train_sentences: int | None = None
    validation_sentences: int | None = None
    test_sentences: int | None = None

    def __post_init__(self) -> None:
        _check_limits(self)
        check_count("data_args", "max_length", self.max_length, least=2, meaning="a length")
        check_count(
            "data_args", "vocabulary", self.vocabulary, least=3, meaning="a number of words"
        )
        for name, column in (("text", self.text), ("label", self.label)):
            if isinstance(column, int):
                check_count("data_args", name, column, least=1, meaning="a column, from 1 on")


Settings = SmallImages | Photographs | Sentences


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


def validation_count(images: int) -> int:
    """Return the default number of validation images for a number of training images."""
    return min(round(_VALIDATION_FRACTION * images), _MAX_VALIDATION_IMAGES)


def select_validation(
    name: str, labels: Tensor, count: int | None = None, *, examples: str = "images"
) -> Tensor:
    """Return a boolean tensor that marks the training examples held out for validation.

    Args:
        name: Name of the data set, for errors.
        labels: Labels of the training examples.
        count: Number of validation examples; None for `validation_count`.
        examples: What the examples are called.

    Raises:
        InputError: If no example would be left for training, or none for validation.
    """
    if count is not None and count >= len(labels):
        raise InputError(
            f"data_args.validation_{examples}={count}: {name} has {len(labels)} training "
            f"{examples}, and none would be left for training; choose a smaller number."
        )
    count = validation_count(len(labels)) if count is None else count
    remedy = "pass --select-on none"
    return _hold_out(name, labels, count, part="validation", remedy=remedy, examples=examples)


def select_unused_validation(name: str, labels: Tensor, used: Tensor, count: int) -> Tensor:
    """Return a boolean tensor that marks unused training images for validation.

    The training set stays the same with and without validation.

    Args:
        name: Name of the data set, for errors.
        labels: Labels of all training images.
        used: Boolean tensor that marks the images used for training.
        count: Number of validation images.

    Raises:
        InputError: If fewer than `count` images are unused.
    """
    unused = int((~used).sum())
    if count > unused:
        raise InputError(
            f"data_args.validation_images={count}: {name} has {len(labels)} training images, and "
            f"data_args.train_images={len(labels) - unused} leaves {unused}; decrease either."
        )
    selected = torch.zeros(len(labels), dtype=torch.bool)
    selected[~used] = select_stratified(labels[~used], count)
    return selected


def select_test(name: str, labels: Tensor, *, examples: str = "images") -> Tensor:
    """Return a boolean tensor that marks the examples to test on, without a test part.

    Raises:
        InputError: If there are too few examples.
    """
    count = round(_TEST_FRACTION * len(labels))
    remedy = f"add {examples}, or a test part"
    return _hold_out(name, labels, count, part="test", remedy=remedy, examples=examples)


def _hold_out(
    name: str, labels: Tensor, count: int, *, part: str, remedy: str, examples: str
) -> Tensor:
    if count == 0:
        raise InputError(
            f"--data {name}: {len(labels)} {examples} are too few to hold out a {part} part; "
            f"{remedy}."
        )
    return select_stratified(labels, count)


def select_stratified(labels: Tensor, count: int) -> Tensor:
    """Select `count` images, each class in proportion, evenly spaced within the class.

    There is no randomness. Files are often ordered by origin, and with even spacing every origin
    is in both parts.
    """
    sizes = torch.bincount(labels)
    quotas = torch.tensor(largest_remainder(sizes.tolist(), count, sizes.tolist()))
    by_class = labels.argsort(stable=True)
    first = (sizes.cumsum(0) - sizes)[labels[by_class]]
    rank = torch.arange(len(labels)) - first  # position of an image within its class
    quota, size = quotas[labels[by_class]], sizes[labels[by_class]]
    selected = torch.empty(len(labels), dtype=torch.bool)
    selected[by_class] = (rank + 1) * quota // size > rank * quota // size
    return selected


def evenly_spaced(total: int, count: int) -> Tensor:
    """Return `count` evenly spaced indices below `total`."""
    return torch.arange(count) * total // count


def limited_count(name: str, setting: str, limit: int | None, available: int) -> int:
    """Return the number of examples to use; ``setting`` limits it, such as ``train_images``.

    Raises:
        InputError: If the limit exceeds the available examples.
    """
    if limit is not None and limit > available:
        examples = setting.rpartition("_")[2]
        raise InputError(
            f"data_args.{setting}={limit}: {name} has only {available} {examples}; choose a "
            "smaller number, or omit it to use all."
        )
    return available if limit is None else limit


def _check_limits(settings: SmallImages | Photographs | Sentences) -> None:
    for name, value in asdict(settings).items():
        part, _, examples = name.partition("_")
        if part in ("train", "validation", "test") and value is not None:
            check_count("data_args", name, value, least=1, meaning=f"a number of {examples}")


def _check_statistics(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    if (mean is None) != (std is None) or (mean and std and len(mean) != len(std)):
        raise InputError(
            f"data_args(mean={mean}, std={std}): give both, with one number per channel each."
        )
    for value in mean or ():
        check_within("data_args", "mean", value, 0, 1, meaning="the mean of pixels in [0, 1]")
    for value in std or ():
        check_within("data_args", "std", value, 1e-6, float("inf"), meaning="a standard deviation")
