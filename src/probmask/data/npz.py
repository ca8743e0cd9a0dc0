"""The user's own small images, from an .npz file of NumPy arrays."""

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
from probmask.data.settings import SmallImages
from probmask.data.splits import for_testing
from probmask.errors import InputError

Array = np.ndarray[Any, Any]

# What NumPy and zipfile raise for a file that is damaged, encrypted or of another kind.
_NOT_PLAIN = (
    ValueError,
    EOFError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
# The names under which images and labels are looked for: training, then test.
_NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
    ("images", "labels"),  # in one part, which is split
    ("x", "y"),
)
_MOST_CHANNELS = 4
_MOST_CLASSES = 100_000  # a larger label is a mistake, and its network would not fit in memory


def npz(path: Path | None, settings: SmallImages) -> InMemory:
    """Your own arrays of images and labels in FILE.npz."""
    if path is None:
        raise InputError("--data npz: which file? Pass it as --data-dir FILE.npz.")
    arrays = _read(path)
    names = list(arrays)
    train = _images(path, arrays, *names[:2])
    # Before it is split: the only image of a class may go to the test part.
    classes = int(train.labels.max()) + 1
    if len(names) == 2:
        held = for_testing("npz", train.labels)
        train, test = train[~held], train[held]
    else:
        test = _images(path, arrays, *names[2:])
        _check_alike(path, train, test)
    return InMemory("npz", train, test, settings, classes=classes)


def _read(path: Path) -> dict[str, Array]:
    """The arrays that are looked for, and no others: those may be of any kind."""
    try:
        with path.open("rb") as opened:
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(f"{path}: holds one array; save images and labels by np.savez.")
            # As arrays: a member that is none comes as bytes.
            return {name: np.asarray(file[name]) for name in _chosen(path, file.files)}
    except InputError:
        raise
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read ({reason}); expected an .npz file.") from error
    except MemoryError as error:
        raise InputError(f"{path}: does not fit in memory ({error}).") from error
    except _NOT_PLAIN as error:
        reason = " ".join(str(error).split())
        if "contains pickled" in reason:  # NumPy takes anything it does not know for a pickle
            reason = "it is of another kind"
        raise InputError(f"{path}: is not an .npz file of plain arrays ({reason}).") from error


def _chosen(path: Path, there: Sequence[str]) -> tuple[str, ...]:
    for names in _NAMES:
        if all(name in there for name in names):
            return names
    found = ", ".join(map(repr, there)) or "nothing"
    expected = "; or ".join(", ".join(names) for names in _NAMES)
    raise InputError(f"{path}: holds {found}; expected arrays called {expected}.")


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
    if 0 in array.shape[1:]:
        raise InputError(
            f"{path}: {name} has the shape {array.shape}; an image has at least a pixel."
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
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(
            f"{path}: {name} is {array.dtype} of shape {array.shape}; expected one whole number "
            "from 0 for each image."
        )
    wrong = array[(array < 0) | (array >= _MOST_CLASSES)]
    if wrong.size:
        raise InputError(
            f"{path}: {name} holds {wrong[0]}; expected whole numbers from 0, one for each class."
        )
    return torch.from_numpy(array.astype(np.int64))


def _check_alike(path: Path, train: Images, test: Images) -> None:
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise InputError(
            f"{path}: training images are {tuple(train.pixels.shape[1:])}, test images "
            f"{tuple(test.pixels.shape[1:])} (channels, height, width); make them alike."
        )
    learnt, asked = int(train.labels.max()), int(test.labels.max())
    if asked > learnt:
        raise InputError(
            f"{path}: a test image has the label {asked}, but those of the training images end at "
            f"{learnt}; leave out classes that cannot be learnt."
        )
