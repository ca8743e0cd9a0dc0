"""Images and labels of the user, from an .npz file of NumPy arrays."""

import math
import stat
import struct
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
from probmask.data.splits import select_test
from probmask.errors import InputError
from probmask.messages import one_line

Array = np.ndarray[Any, Any]

# What NumPy and zipfile raise for a file that is damaged, encrypted or in another format.
_FORMAT_ERRORS = (
    ValueError,
    EOFError,
    RuntimeError,
    SyntaxError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
_NPY_MAGIC = b"\x93NUMPY"  # the start of an .npy file
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Accepted names of the arrays: training images and labels, test images and labels.
_NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
    ("images", "labels"),  # a part of them becomes the test set
    ("x", "y"),
)
# Optional name: the number of classes, if some of them have no images.
_CLASSES = "num_classes"
_MAX_CHANNELS = 4
_MAX_CLASSES = 100_000  # a larger label is a mistake; its network would not fit in memory
_MAX_LABELS_SHOWN = 10
# The arrays may take this many times the size of the file, or `_SMALL` bytes. Deflate reaches a
# ratio of 1,000 for zeros, but far less for images.
_MAX_RATIO = 32
_SMALL = 1 << 28


def npz(path: Path | None, settings: SmallImages) -> InMemory:
    """Your own images and labels, as NumPy arrays in FILE.npz."""
    if path is None:
        raise InputError("--data npz: needs a file; pass it as --data-dir FILE.npz.")
    arrays = _read(path)
    given = arrays.pop(_CLASSES, None)
    names = list(arrays)
    train = _images(path, arrays, *names[:2])
    # Counted before the split: the only image of a class may become a test image.
    classes = _count_classes(path, names[1], train.labels, given)
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
        if stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise InputError(f"{path}: is not a regular file; expected an .npz file.")
        with path.open("rb") as opened:
            if opened.peek(len(_NPY_MAGIC)).startswith(_NPY_MAGIC):
                np.lib.format.read_magic(opened)
                raise InputError(
                    f"{path}: contains one array; save images and labels with np.savez."
                )
            with zipfile.ZipFile(opened) as archive:
                return _read_arrays(path, archive)
    except InputError:
        raise
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"{path}: cannot be read ({reason}); expected an .npz file.") from error
    except MemoryError as error:
        raise InputError(f"{path}: the arrays do not fit in memory ({error}).") from error
    except _FORMAT_ERRORS as error:
        reason = one_line(error)
        raise InputError(f"{path}: is not an .npz file of plain arrays ({reason}).") from error


def _read_arrays(path: Path, archive: zipfile.ZipFile) -> dict[str, Array]:
    members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
    names = _select_names(path, list(members))
    if _CLASSES in members:
        names = (*names, _CLASSES)
    declared = sum(members[name].file_size for name in names)
    limit = max(_SMALL, _MAX_RATIO * path.stat().st_size)
    if declared > limit:
        raise InputError(
            f"{path}: the arrays take {declared:,} bytes, but a compressed file of this size may "
            f"contain at most {limit:,}; save them with np.savez instead of np.savez_compressed."
        )
    return {name: _read_array(archive, members[name]) for name in names}


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Read one array, after the sizes in its header are compared with the size of the member."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{member.filename!r} has an unknown compression")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = _HEADERS.get(version)
        if read_header is None:
            raise ValueError(f"{member.filename!r} has the unknown version {version}")
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename!r} contains Python objects")
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise ValueError(f"{member.filename!r} does not have the size that its header declares")
        file.seek(0)
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
        return array


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
    absent = set(test.labels.tolist()) - set(train.labels.tolist())
    if absent:
        raise InputError(
            f"{path}: test images have the label{'s' if len(absent) > 1 else ''} "
            f"{_shown(sorted(absent))}, but no training image has; add training images of these "
            "classes, or remove them."
        )


def _count_classes(path: Path, name: str, labels: Tensor, given: Array | None) -> int:
    """Return the number of classes: as given, or so that every class has an image."""
    present = sorted(set(labels.tolist()))
    largest: int = present[-1]
    if given is not None:
        return _given_classes(path, name, largest, given)
    if len(present) == 1:
        raise InputError(
            f"{path}: all labels in {name} are {largest}; expected at least two classes."
        )
    absent = sorted(set(range(largest)) - set(present))
    if absent:
        raise InputError(
            f"{path}: {name} has labels up to {largest}, but not {_shown(absent)}; number the "
            "classes from 0 without gaps (np.unique(labels, return_inverse=True)[1], for all "
            f"labels together), or save {_CLASSES}={largest + 1} with the arrays if these classes "
            "have no images."
        )
    return largest + 1


def _given_classes(path: Path, name: str, largest: int, given: Array) -> int:
    if given.ndim != 0 or given.dtype.kind not in "iu" or not largest < given <= _MAX_CLASSES:
        shown = str(given) if given.size == 1 else f"an array of shape {given.shape}"
        raise InputError(
            f"{path}: {_CLASSES} is {shown}; expected one integer from {largest + 1}, the largest "
            f"label in {name} plus 1, to {_MAX_CLASSES:,}."
        )
    return int(given)


def _shown(labels: Sequence[int]) -> str:
    more = len(labels) - _MAX_LABELS_SHOWN
    shown = ", ".join(map(str, labels[:_MAX_LABELS_SHOWN]))
    return f"{shown} and {more:,} more" if more > 0 else shown
