"""scikit-learn's handwritten digits: 1,797 images of 8 by 8 pixels that come with the package."""

import numpy as np
import torch

from probmask.data.in_memory import Images, InMemory
from probmask.errors import InputError

# Every fifth image of each digit is a test image: the file is ordered by writer, so both parts see
# all writers, and each digit equally often.
_TEST_EVERY = 5


def digits(directory: str | None = None) -> InMemory:
    """Handwritten digits, 8×8 pixels: 1,442 training and 355 test images."""
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
    pixels = torch.from_numpy(bunch.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    # The how-manieth of its digit each image is.
    place = torch.nn.functional.one_hot(labels).cumsum(0).gather(1, labels[:, None]).squeeze(1) - 1
    is_test = place % _TEST_EVERY == _TEST_EVERY - 1
    return InMemory(
        "digits",
        Images(pixels[~is_test], labels[~is_test]),
        Images(pixels[is_test], labels[is_test]),
        classes=10,
        mean=(0.3051,),
        std=(0.3762,),
        padding=1,
        scale=16.0,
    )
