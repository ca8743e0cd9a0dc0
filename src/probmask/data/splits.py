"""Choice of the images that are held out: deterministic, and stratified by class."""

import torch
from torch import Tensor

from probmask.core.allocation import largest_remainder
from probmask.errors import InputError

# A tenth of the training images is held out for validation, but at most 10,000: with these, the
# standard error of an accuracy is at most 0.5 %.
_VALIDATION_FRACTION = 0.1
_MAX_VALIDATION_IMAGES = 10_000
# Fraction of the test images in a data set that has no test part.
_TEST_FRACTION = 0.2


def validation_count(images: int) -> int:
    """Return the default number of validation images for a number of training images."""
    return min(round(_VALIDATION_FRACTION * images), _MAX_VALIDATION_IMAGES)


def select_validation(name: str, labels: Tensor, count: int | None = None) -> Tensor:
    """Return which training images are held out for validation, as booleans.

    Args:
        name: Name of the data set, for errors.
        labels: Labels of the training images.
        count: Number of validation images; None for `validation_count`.

    Raises:
        InputError: If no image would be left for training, or none for validation.
    """
    if count is not None and count >= len(labels):
        raise InputError(
            f"data_args.validation_images={count}: {name} has {len(labels)} training images, and "
            "none would be left for training; choose a smaller number."
        )
    count = validation_count(len(labels)) if count is None else count
    return _hold_out(name, labels, count, part="validation", remedy="pass --select-on none")


def select_unused_validation(name: str, labels: Tensor, used: Tensor, count: int) -> Tensor:
    """Return which of the images not used for training are for validation, as booleans.

    The training set stays the same with and without validation.

    Args:
        name: Name of the data set, for errors.
        labels: Labels of all training images.
        used: Which of them are used for training, as booleans.
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


def select_test(name: str, labels: Tensor) -> Tensor:
    """Return which images of a data set without a test part are for testing, as booleans.

    Raises:
        InputError: If there are too few images.
    """
    count = round(_TEST_FRACTION * len(labels))
    return _hold_out(name, labels, count, part="test", remedy="add images, or a test part")


def _hold_out(name: str, labels: Tensor, count: int, *, part: str, remedy: str) -> Tensor:
    if count == 0:
        raise InputError(
            f"--data {name}: {len(labels)} images are too few to hold out a {part} part; {remedy}."
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
    """Return the number of images to use.

    Raises:
        InputError: If the limit exceeds the available images.
    """
    if limit is not None and limit > available:
        raise InputError(
            f"data_args.{setting}={limit}: {name} has only {available} images; choose a smaller "
            "number, or omit it to use all."
        )
    return available if limit is None else limit
