"""scikit-learn's handwritten digits: 1,797 images of 8 by 8 pixels that come with the package."""

import numpy as np
import torch

from probmask.data.in_memory import Images, InMemory
from probmask.errors import InputError

# Every fifth image is a test image: the file is ordered by writer, so both halves see all writers.
_TEST_EVERY = 5


def digits() -> InMemory:
    """Load the digits: 1,438 training and 359 test images, pixels from 0 to 16."""
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
    is_test = torch.arange(len(labels)) % _TEST_EVERY == _TEST_EVERY - 1
    return InMemory(
        "digits",
        Images(pixels[~is_test], labels[~is_test]),
        Images(pixels[is_test], labels[is_test]),
        classes=10,
        mean=(0.3058,),
        std=(0.3764,),
        padding=1,
        scale=16.0,
    )
