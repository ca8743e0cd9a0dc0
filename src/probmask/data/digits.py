"""scikit-learn's handwritten digits: 1,797 images of 8 by 8 pixels that come with the package."""

from pathlib import Path

import numpy as np
import torch

from probmask.data.in_memory import Images, InMemory
from probmask.data.release import Release
from probmask.data.settings import SmallImages
from probmask.errors import InputError

DIGITS = Release("digits", 10, (1, 8, 8), train_images=1_442, test_images=355)
# Every fifth image of each digit is a test image: the file is ordered by writer, so both parts see
# all writers, and each digit equally often.
_TEST_EVERY = 5


def digits(directory: Path | None, settings: SmallImages) -> InMemory:
    """Handwritten digits, embedded."""
    if directory is not None:
        raise InputError(
            f"--data-dir {directory}: the digits come with scikit-learn and lie in no directory; "
            "leave it out."
        )
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "--data digits: the digits come with scikit-learn, which is not installed; "
            "pip install 'probmask[train]'."
        ) from error
    bunch = load_digits()
    images = Images(
        torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1),
        torch.from_numpy(bunch.target.astype(np.int64)),
    )
    labels = images.labels
    # The how-manieth of its digit each image is.
    place = torch.nn.functional.one_hot(labels).cumsum(0).gather(1, labels[:, None]).squeeze(1) - 1
    is_test = place % _TEST_EVERY == _TEST_EVERY - 1
    return InMemory("digits", images[~is_test], images[is_test], settings, classes=10, scale=16.0)
