"""The handwritten digits that scikit-learn includes: 1,797 images of 8×8 pixels."""

from pathlib import Path

import numpy as np
import torch

from probmask.data.in_memory import Images, InMemory
from probmask.data.releases import Release
from probmask.data.source import SmallImages
from probmask.errors import InputError

DIGITS = Release("digits", 10, (1, 8, 8), train_images=1_442, test_images=355)
# Every fifth image of each digit is a test image. The file is ordered by writer, so both parts
# contain all writers, and each digit equally often.
_TEST_EVERY = 5


def digits(directory: Path | None, settings: SmallImages) -> InMemory:
    """Handwritten digits, included in scikit-learn."""
    if directory is not None:
        raise InputError(
            f"--data-dir {directory}: the digits are part of scikit-learn and need no directory; "
            "omit this option."
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "--data digits: the digits are part of scikit-learn, which is not installed; run "
            "pip install 'probmask[train]'."
        ) from error
    bunch = load_digits()
    images = Images(
        torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1),
        torch.from_numpy(bunch.target.astype(np.int64)),
    )
    labels = images.labels
    # Position of each image among those of its digit.
    rank = torch.nn.functional.one_hot(labels).cumsum(0).gather(1, labels[:, None]).squeeze(1) - 1
    is_test = rank % _TEST_EVERY == _TEST_EVERY - 1
    return InMemory("digits", images[~is_test], images[is_test], settings, classes=10, scale=16.0)
