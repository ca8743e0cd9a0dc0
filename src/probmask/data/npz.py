"""The user's own small images, from an .npz file of NumPy arrays."""

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.data.in_memory import Images, InMemory
from probmask.data.release import check_labels
from probmask.data.settings import SmallImages
from probmask.data.splits import for_testing
from probmask.errors import InputError

Array = np.ndarray[Any, Any]

# The names under which images and labels are looked for: training, then test.
_NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)
_NAMES_OF_ONE_PART = (("images", "labels"), ("x", "y"))
_MOST_CHANNELS = 4


def npz(path: Path | None, settings: SmallImages) -> InMemory:
    """Your own arrays of images and labels in FILE.npz."""
    if path is None:
        raise InputError("--data npz: which file? Pass it as --data-dir FILE.npz.")
    train, test = _parts(path, _read(path))
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise InputError(
            f"{path}: training images are {tuple(train.pixels.shape[1:])}, test images "
            f"{tuple(test.pixels.shape[1:])} (channels, height, width); make them alike."
        )
    classes = int(train.labels.max()) + 1
    check_labels(test.labels, classes, path)
    return InMemory("npz", train, test, settings, classes=classes)


def _read(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(f"{path}: holds one array; save images and labels by np.savez.")
            return {name: file[name] for name in file.files}
    except InputError:
        raise
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read ({reason}); expected an .npz file.") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: is not an .npz file of plain arrays ({reason}).") from error


def _parts(path: Path, arrays: Mapping[str, Array]) -> tuple[Images, Images]:
    for names in _NAMES:
        if all(name in arrays for name in names):
            train = _images(path, arrays, *names[:2])
            return train, _images(path, arrays, *names[2:])
    for pair in _NAMES_OF_ONE_PART:
        if all(name in arrays for name in pair):
            images = _images(path, arrays, *pair)
            held = for_testing("npz", images.labels)
            return images[~held], images[held]
    known = "; or ".join(", ".join(names) for names in (*_NAMES, *_NAMES_OF_ONE_PART))
    there = ", ".join(arrays) or "nothing"
    raise InputError(f"{path}: holds {there}; expected arrays called {known}.")


def _images(path: Path, arrays: Mapping[str, Array], images: str, labels: str) -> Images:
    pixels = _pixels(path, images, arrays[images])
    classes = _labels(path, labels, arrays[labels])
    if len(pixels) != len(classes) or len(pixels) == 0:
        raise InputError(
            f"{path}: {images} has {len(pixels)} images, {labels} {len(classes)} labels; "
            "there must be as many, and at least one."
        )
    return Images(pixels, classes)


def _pixels(path: Path, name: str, array: Array) -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise InputError(
            f"{path}: {name} is {array.dtype} with {array.ndim} dimensions; expected uint8 (0 to "
            "255) of count×height×width, with the channels last or after the count."
        )
    if array.ndim == 3:
        return torch.from_numpy(array).unsqueeze(1)
    first, last = (array.shape[axis] <= _MOST_CHANNELS for axis in (1, 3))
    if first == last:
        raise InputError(
            f"{path}: {name} has the shape {array.shape}, in which channels cannot be told from "
            f"pixels: at most {_MOST_CHANNELS} channels go either last or after the count."
        )
    images = torch.from_numpy(array)
    return images if first else images.permute(0, 3, 1, 2).contiguous()


def _labels(path: Path, name: str, array: Array) -> Tensor:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
        raise InputError(
            f"{path}: {name} is {array.dtype} of shape {array.shape}; expected one whole number "
            "from 0 for each image."
        )
    return torch.from_numpy(array.astype(np.int64))
