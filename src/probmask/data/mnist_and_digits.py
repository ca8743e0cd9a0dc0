"""MNIST, Fashion-MNIST and the digits of scikit-learn: small grayscale images of ten classes.

MNIST and Fashion-MNIST are read from their idx files, plain or gzipped. An idx file starts with two
zero bytes, the type of its values (8: bytes) and the number of its dimensions. Each dimension
follows as four bytes in big-endian order, then the values.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from probmask.data.in_memory import Images, InMemory
from probmask.data.releases import (
    Release,
    check_labels,
    damaged,
    default_directory,
    is_file,
    missing,
    unreadable,
)
from probmask.data.settings import SmallImages
from probmask.errors import InputError

MNIST = Release("mnist", 10, (1, 28, 28), train_images=60_000, test_images=10_000)
FASHION_MNIST = Release("fashion-mnist", 10, (1, 28, 28), train_images=60_000, test_images=10_000)
DIGITS = Release("digits", 10, (1, 8, 8), train_images=1_442, test_images=355)
_UINT8 = 8
_MAX_FILE_SIZE = 100_000_000  # the training images take 47 MB
# Every fifth image of each digit is a test image. The file is ordered by writer, so both parts
# contain all writers, and each digit equally often.
_TEST_EVERY = 5


def mnist(directory: Path | None, settings: SmallImages) -> InMemory:
    """Handwritten digits."""
    return _load(MNIST, directory, settings)


def fashion_mnist(directory: Path | None, settings: SmallImages) -> InMemory:
    """Grayscale pictures of clothing."""
    return _load(FASHION_MNIST, directory, settings)


def _load(release: Release, directory: Path | None, settings: SmallImages) -> InMemory:
    folder = directory or default_directory(release.name)
    files = locate(release, folder)
    train, test = (
        Images(read_idx(pixels, 3).unsqueeze(1), _read_labels(release, labels))
        for pixels, labels in (files[:2], files[2:])
    )
    release.check(train, test, source=folder)
    return InMemory(release.name, train, test, settings, classes=release.classes)


def locate(release: Release, folder: Path) -> list[Path]:
    """Return the paths of the four files: training images and labels, test images and labels.

    Raises:
        InputError: If one of them does not exist.
    """
    return [
        _find(release, folder, f"{stem}-{kind}", dimensions)
        for stem in ("train", "t10k")
        for kind, dimensions in (("images", 3), ("labels", 1))
    ]


def _find(release: Release, folder: Path, stem: str, dimensions: int) -> Path:
    # Some tools unpack the files with a dot in the name; torchvision keeps them in a folder "raw".
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for place in (folder, folder / "raw"):
        for name in names:
            if is_file(place / name):
                return place / name
    raise missing(release.name, folder, names[0])


def _read_labels(release: Release, path: Path) -> Tensor:
    labels = read_idx(path, 1).long()
    check_labels(labels, release.classes, path)
    return labels


def read_idx(path: Path, dimensions: int) -> Tensor:
    """Read an idx file of uint8 values.

    Raises:
        InputError: If the file cannot be read, or does not have this number of dimensions.
    """
    data = _read_content(path)
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes((0, 0, _UINT8, dimensions)):
        raise damaged(
            path, f"it has no header of an idx file with {dimensions} dimensions of bytes"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if math.prod(shape) != len(data) - header:
        raise damaged(path, f"it contains {len(data) - header:,} values for shape {shape}")
    values = np.frombuffer(data, np.uint8, offset=header).reshape(shape)
    return torch.from_numpy(values.copy())


def _read_content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_MAX_FILE_SIZE + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > _MAX_FILE_SIZE:
        raise damaged(path, f"it contains more than {_MAX_FILE_SIZE:,} bytes")
    return data


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
