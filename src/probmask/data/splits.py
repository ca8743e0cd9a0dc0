"""Which examples of a data set are used, and which are held out for validation or testing.

The held-out examples are always the same, and stratified by class.
"""

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

    The selection is deterministic. Files are often ordered by origin; even spacing puts files of
    every origin into both parts.
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
