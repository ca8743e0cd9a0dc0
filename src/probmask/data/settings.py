"""What may be set of a data set: the table ``[data_args]`` of a run."""

from dataclasses import dataclass
from typing import Literal

from probmask.checks import check_count, check_within
from probmask.errors import InputError


@dataclass(frozen=True, kw_only=True)
class SmallImages:
    """Images that are held in memory.

    Training images are padded by ``padding`` zeros, cropped at random to their old size and, with
    ``flip``, mirrored half of the time. ``mean`` and ``std`` are per channel, of pixels in [0, 1];
    None stands for those of the training images. ``train_images`` and ``test_images`` take the
    first so many only; ``validation_images`` is how many are held out where some are, of those
    that ``train_images`` leaves.
    """

    padding: int
    flip: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    train_images: int | None = None
    validation_images: int | None = None
    test_images: int | None = None

    def __post_init__(self) -> None:
        check_count("data_args", "padding", self.padding, least=0, meaning="pixels")
        _check_limits(self)
        _check_statistics(self.mean, self.std)


@dataclass(frozen=True, kw_only=True)
class Photographs:
    """Images that are read from their files whenever they are needed.

    For training a random part of the image is scaled to ``image_size`` and mirrored half of the
    time; for testing its shorter side is scaled to 256/224 of that and the centre cut out.
    ``unreadable`` says what to do with a file that is no image: "skip" warns of it and takes
    another, "refuse" looks at every file before the training begins. ``train_images`` and
    ``test_images`` take so many only, evenly spread over the list of files; ``validation_images``
    is how many are held out where some are, of those that ``train_images`` leaves.
    """

    image_size: int = 224
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    train_images: int | None = None
    validation_images: int | None = None
    test_images: int | None = None
    unreadable: Literal["skip", "refuse"] = "skip"

    def __post_init__(self) -> None:
        check_count("data_args", "image_size", self.image_size, least=1, meaning="pixels")
        _check_limits(self)
        _check_statistics(self.mean, self.std)
        if len(self.mean) != 3:
            raise InputError(
                f"data_args(mean={self.mean}): photographs have three channels; give three numbers."
            )


def _check_limits(settings: SmallImages | Photographs) -> None:
    for name in ("train_images", "validation_images", "test_images"):
        value = getattr(settings, name)
        if value is not None:
            check_count("data_args", name, value, least=1, meaning="images")


def _check_statistics(mean: tuple[float, ...] | None, std: tuple[float, ...] | None) -> None:
    if (mean is None) != (std is None) or (mean and std and len(mean) != len(std)):
        raise InputError(
            f"data_args(mean={mean}, std={std}): give both, with one number per channel each."
        )
    for value in mean or ():
        check_within("data_args", "mean", value, 0, 1, meaning="a mean of pixels in [0, 1]")
    for value in std or ():
        check_within("data_args", "std", value, 1e-6, float("inf"), meaning="a deviation")
