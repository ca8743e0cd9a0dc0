"""MNIST and Fashion-MNIST, from their idx files, plain or gzipped.

An idx file begins with two zero bytes, the type of its values (8: bytes), the number of its
dimensions, and each dimension as four bytes, the most significant first; the values follow.
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
from probmask.data.locations import default_directory, is_file, missing, unreadable
from probmask.data.release import Release, check_labels, damaged
from probmask.data.settings import SmallImages

MNIST = Release("mnist", 10, (1, 28, 28), train_images=60_000, test_images=10_000)
FASHION_MNIST = Release("fashion-mnist", 10, (1, 28, 28), train_images=60_000, test_images=10_000)
_BYTES = 8
_LARGEST_FILE = 100_000_000  # the training images take 47 MB


def mnist(directory: Path | None, settings: SmallImages) -> InMemory:
    """Handwritten digits."""
    return _load(MNIST, directory, settings)


def fashion_mnist(directory: Path | None, settings: SmallImages) -> InMemory:
    """Pictures of clothes."""
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
    """Find the four files: images and labels for training, images and labels for testing."""
    return [
        _find(release, folder, f"{stem}-{kind}", dimensions)
        for stem in ("train", "t10k")
        for kind, dimensions in (("images", 3), ("labels", 1))
    ]


def _find(release: Release, folder: Path, stem: str, dimensions: int) -> Path:
    # With a dot is how some tools unpack them; torchvision keeps them in a folder "raw".
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
    """Read an idx file of bytes with so many dimensions."""
    data = _content(path)
    header = 4 + 4 * dimensions
    if len(data) < header or data[:4] != bytes((0, 0, _BYTES, dimensions)):
        raise damaged(path, f"it does not begin as an idx file of {dimensions}-dimensional bytes")
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    if math.prod(shape) != len(data) - header:
        raise damaged(path, f"{len(data) - header:,} values for a shape of {shape}")
    values = np.frombuffer(data, np.uint8, offset=header).reshape(shape)
    return torch.from_numpy(values.copy())


def _content(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) > _LARGEST_FILE:
        raise damaged(path, f"more than {_LARGEST_FILE:,} bytes")
    return data
