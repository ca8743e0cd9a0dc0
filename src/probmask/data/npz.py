"""Images and labels of the user, from an .npz file of NumPy arrays."""

import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.data.in_memory import Images, InMemory
from probmask.data.source import SmallImages, select_test
from probmask.errors import InputError
from probmask.messages import one_line

Array = np.ndarray[Any, Any]

# What NumPy and zipfile raise for a file that is damaged, encrypted or in another format.
_FORMAT_ERRORS = (
    ValueError,
    EOFError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
# Accepted names of the arrays: training images and labels, test images and labels.
_NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
    ("images", "labels"),  # a part of them becomes the test set
    ("x", "y"),
)
_MAX_CHANNELS = 4
_MAX_CLASSES = 100_000  # a larger label is a mistake; its network would not fit in memory


def npz(path: Path | None, settings: SmallImages) -> InMemory:
    """Your own images and labels, as NumPy arrays in FILE.npz."""
    if path is None:
        raise InputError("--data npz: needs a file; pass it as --data-dir FILE.npz.")
    arrays = _read(path)
    names = list(arrays)
    train = _images(path, arrays, *names[:2])
    # Counted before the split: the only image of a class may become a test image.
    classes = int(train.labels.max()) + 1
    if len(names) == 2:
        selected = select_test("npz", train.labels)
        train, test = train[~selected], train[selected]
    else:
        test = _images(path, arrays, *names[2:])
        _check_consistent(path, train, test)
    return InMemory("npz", train, test, settings, classes=classes)


def _read(path: Path) -> dict[str, Array]:
    """Read the arrays with accepted names; others are ignored."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(
                    f"{path}: contains one array; save images and labels with np.savez."
                )
            # np.asarray, because NumPy returns a member that is not an array as bytes.
            return {name: np.asarray(file[name]) for name in _select_names(path, file.files)}
    except InputError:
        raise
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path}: cannot be read ({reason}); expected an .npz file.") from error
    except MemoryError as error:
        raise InputError(f"{path}: the arrays do not fit in memory ({error}).") from error
    except _FORMAT_ERRORS as error:
        reason = one_line(error)
        if "contains pickled" in reason:  # NumPy takes any unknown format for a pickle
            reason = "unknown format"
        raise InputError(f"{path}: is not an .npz file of plain arrays ({reason}).") from error


def _select_names(path: Path, available: Sequence[str]) -> tuple[str, ...]:
    for names in _NAMES:
        if all(name in available for name in names):
            return names
    found = ", ".join(map(repr, available)) or "no arrays"
    expected = "; or ".join(", ".join(names) for names in _NAMES)
    raise InputError(f"{path}: contains {found}; expected arrays named {expected}.")


def _images(path: Path, arrays: Mapping[str, Array], images: str, labels: str) -> Images:
    pixels = _pixels(path, images, arrays[images])
    classes = _labels(path, labels, arrays[labels])
    if len(pixels) != len(classes) or len(pixels) == 0:
        raise InputError(
            f"{path}: {images} has {len(pixels)} images and {labels} has {len(classes)} labels; "
            "expected one label per image, and at least one image."
        )
    return Images(pixels, classes)


def _pixels(path: Path, name: str, array: Array) -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        raise InputError(
            f"{path}: {name} is {array.dtype} with {array.ndim} dimensions; expected uint8 with "
            "shape N×H×W, N×H×W×C or N×C×H×W."
        )
    if 0 in array.shape[1:]:
        raise InputError(
            f"{path}: {name} has shape {array.shape}; an image has at least one pixel."
        )
    if array.ndim == 3:
        return torch.from_numpy(array).unsqueeze(1)
    first, last = (array.shape[axis] <= _MAX_CHANNELS for axis in (1, 3))
    if first == last:
        raise InputError(
            f"{path}: {name} has shape {array.shape}, in which the channels are ambiguous; exactly "
            f"one of the second and the last dimension must be at most {_MAX_CHANNELS}."
        )
    images = torch.from_numpy(array)
    return images if first else images.permute(0, 3, 1, 2).contiguous()


def _labels(path: Path, name: str, array: Array) -> Tensor:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{path}: {name} is {array.dtype} with shape {array.shape}; expected one integer "
            "per image."
        )
    wrong = array[(array < 0) | (array >= _MAX_CLASSES)]
    if wrong.size:
        raise InputError(
            f"{path}: {name} contains {wrong[0]}; expected labels from 0 to the number of classes "
            "minus 1."
        )
    return torch.from_numpy(array.astype(np.int64))


def _check_consistent(path: Path, train: Images, test: Images) -> None:
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise InputError(
            f"{path}: training images have shape {tuple(train.pixels.shape[1:])}, test images "
            f"{tuple(test.pixels.shape[1:])} (channels, height, width); they must be equal."
        )
    largest_train, largest_test = int(train.labels.max()), int(test.labels.max())
    if largest_test > largest_train:
        raise InputError(
            f"{path}: a test image has label {largest_test}, but the largest label of the training "
            f"images is {largest_train}; remove classes without training images."
        )
