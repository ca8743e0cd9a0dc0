"""Taking images out of a data set: the same ones every time, and each class equally."""

import torch
from torch import Tensor

from probmask.core.allocation import largest_remainder
from probmask.errors import InputError

# A tenth of the training images is held out for validation, but of a large set no more than tell
# two networks apart: with 10,000 images the standard error of an accuracy is at most 0.5 %.
_VALIDATION_SHARE = 0.1
_VALIDATION_IMAGES = 10_000
# A fifth of a data set that comes in one part is its test set.
_TEST_SHARE = 0.2


def validation_count(images: int) -> int:
    """How many of so many training images are held out for validation."""
    return min(round(_VALIDATION_SHARE * images), _VALIDATION_IMAGES)


def for_validation(name: str, labels: Tensor, asked: int | None = None) -> Tensor:
    """Which training images are held out for validation, as booleans; ``asked``: how many."""
    if asked is not None and asked >= len(labels):
        raise InputError(
            f"data_args.validation_images={asked}: {name} has {len(labels)} training images, and "
            "some must be left to train on; ask for fewer."
        )
    count = validation_count(len(labels)) if asked is None else asked
    return _held_out(name, labels, count, part="validation", remedy="pass --select-on none")


def beside_training(name: str, labels: Tensor, trained: Tensor, asked: int) -> Tensor:
    """Which of the images that are not trained on are for validation, as booleans.

    ``trained`` marks those that are: the training then has as many images as without validation.
    """
    left = int((~trained).sum())
    if asked > left:
        raise InputError(
            f"data_args.validation_images={asked}: of the {len(labels)} training images of {name}, "
            f"data_args.train_images={len(labels) - left} leaves {left}; ask for fewer of either."
        )
    marked = torch.zeros(len(labels), dtype=torch.bool)
    marked[~trained] = evenly_by_class(labels[~trained], asked)
    return marked


def for_testing(name: str, labels: Tensor) -> Tensor:
    """Which images of a set that comes in one part are for testing, as booleans."""
    count = round(_TEST_SHARE * len(labels))
    return _held_out(name, labels, count, part="test", remedy="bring more, or a test part")


def _held_out(name: str, labels: Tensor, count: int, *, part: str, remedy: str) -> Tensor:
    if count == 0:
        raise InputError(
            f"--data {name}: has {len(labels)} images, too few to hold out a {part} part; {remedy}."
        )
    return evenly_by_class(labels, count)


def evenly_by_class(labels: Tensor, count: int) -> Tensor:
    """Mark ``count`` images: of each class its share, evenly spread over its images in order.

    Without chance: files are often ordered by origin, and every origin should be in both parts.
    """
    sizes = torch.bincount(labels)
    quotas = torch.tensor(largest_remainder(sizes.tolist(), count, sizes.tolist()))
    by_class = labels.argsort(stable=True)
    first = (sizes.cumsum(0) - sizes)[labels[by_class]]
    place = torch.arange(len(labels)) - first  # the how-manieth of its class
    quota, size = quotas[labels[by_class]], sizes[labels[by_class]]
    marked = torch.empty(len(labels), dtype=torch.bool)
    marked[by_class] = (place + 1) * quota // size > place * quota // size
    return marked


def evenly(total: int, count: int) -> Tensor:
    """The numbers of ``count`` out of ``total`` images, evenly spread."""
    return torch.arange(count) * total // count


def limited(name: str, setting: str, asked: int | None, there: int) -> int:
    """How many images to take of those that are there, if a setting asks for fewer."""
    if asked is not None and asked > there:
        raise InputError(
            f"data_args.{setting}={asked}: {name} has only {there}; ask for fewer or leave it out."
        )
    return there if asked is None else asked
