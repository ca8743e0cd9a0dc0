"""Settings of the data sets: the table ``[data_args]`` of a configuration."""

from dataclasses import asdict, dataclass
from typing import Literal

from probmask.checks import check_count, check_within
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
