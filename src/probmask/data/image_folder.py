"""Folders of image files, and views of the images: decoded, cropped and scaled for the network.

ImageNet and data of the user are directories with one folder of image files per class.

Worker processes make the views. An exception in a worker process would end the `DataLoader` with a
traceback, so files that cannot be read are returned as data, and the main process decides.
"""

import errno
import math
import os
import random
import stat
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from probmask.core.noise import fold
from probmask.errors import InputError

if TYPE_CHECKING:  # Pillow is imported when the first file is read
    from PIL import Image

_EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
)
# The formats with these extensions. Pillow detects more, among them some that start programs.
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
_MAX_FILE_SIZE = 1_000_000_000  # the pixels of an image are limited by Pillow
# After this many unreadable files in a row, the disk is at fault, not the files.
MAX_FAILURES_IN_A_ROW = 100
# A random crop has this fraction of the image's area, and this ratio of width to height.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_ATTEMPTS = 10
# Before the center is cut out, the shorter side is scaled to this multiple of the view's size.
_MARGIN = 256 / 224
# A longer image is shortened to this ratio first: scaled as a whole it might not fit in memory.
_MAX_ASPECT_RATIO = 16
# Error numbers that concern a single file. All others concern the system.
_FILE_ERRORS = frozenset(
    (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
)


@dataclass(frozen=True)
class Files:
    """Image files below a root directory, and their labels.

    The names are one NumPy array of bytes, which worker processes share. A list of a million
    strings would be copied into each process as reference counts change.
    """

    root: Path
    names: "np.ndarray[Any, Any]"
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor) -> "Files":
        return Files(self.root, self.names[index.numpy()], self.labels[index])

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return self.root / os.fsdecode(bytes(self.names[index]))

    def size(self, index: int) -> int:
        """Return the size of an image in bytes, or -1 if the file cannot be read.

        Raises:
            OSError: If the disk fails, rather than the file.
        """
        try:
            status = self.path(index).stat()
        except OSError as error:
            if _is_system_error(error):
                raise
            return -1
        return status.st_size if stat.S_ISREG(status.st_mode) else -1

    def content(self, index: int, limit: int) -> bytes:
        """Return the first and last `limit` bytes of an image; b"" if the file cannot be read.

        Raises:
            OSError: If the disk fails, rather than the file.
        """
        if self.size(index) < 0:
            return b""
        try:
            with self.path(index).open("rb") as file:
                first = file.read(limit)
                rest = file.seek(0, os.SEEK_END) - len(first)
                file.seek(-min(rest, limit), os.SEEK_END)
                return first + file.read(limit)
        except OSError as error:
            if _is_system_error(error):
                raise
            return b""


@dataclass(frozen=True)
class Folder:
    """The class names of a directory, and its parts by name."""

    class_names: tuple[str, ...]
    parts: dict[str, Files]


def list_folder(argument: str, directory: Path, parts: tuple[str, ...] = ("val", "test")) -> Folder:
    """List the image files of a directory.

    Args:
        argument: Name of the option that gave the directory, for errors.
        directory: Directory with a folder per class, either directly or in train/ and in `parts`.
        parts: Names of the optional parts next to train/.

    Returns:
        The classes, sorted by name, and the files of each part that exists. A directory without
        train/ is listed as the part "train".

    Raises:
        InputError: If the directory does not have this structure.
    """
    if not directory.is_dir():
        raise InputError(
            f"{argument} {directory}: is not a directory; pass a directory with one folder of "
            "images per class."
        )
    if not (directory / "train").is_dir():
        for part in parts:
            if (directory / part).is_dir():
                raise InputError(
                    f"{argument} {directory}: contains {part}/ but no train/; put the training "
                    "images in train/."
                )
        class_names = _class_names(argument, directory)
        files = _list_part(argument, directory, class_names)
        return Folder(tuple(map(_valid_text, class_names)), {"train": files})
    class_names = _class_names(argument, directory / "train")
    found = {
        part: _list_part(argument, directory / part, class_names)
        for part in ("train", *parts)
        if (directory / part).is_dir()
    }
    return Folder(tuple(map(_valid_text, class_names)), found)


def _class_names(argument: str, directory: Path) -> tuple[str, ...]:
    names = _folders(argument, directory)
    if len(names) < 2:
        raise InputError(
            f"{argument} {directory}: contains {len(names)} folder{'s' if len(names) != 1 else ''};"
            " expected at least two, one per class, with the images of the class."
        )
    return tuple(names)


def _list_part(argument: str, directory: Path, class_names: tuple[str, ...]) -> Files:
    folders = _folders(argument, directory)
    unknown = sorted(set(folders) - set(class_names))
    if unknown:
        raise InputError(
            f"{argument} {directory}: folder {unknown[0]!r} is not a class of the training images; "
            "remove it, or add this class to train/."
        )
    if not folders:
        raise InputError(
            f"{argument} {directory}: contains no class folders; move its images into folders "
            "named as in train/."
        )
    tree = _Tree(argument, directory, folders)
    names: list[bytes] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        if class_name not in folders:
            continue
        images = tree.images(class_name)
        if not images:
            raise InputError(
                f"{argument} {directory / class_name}: contains no images; remove the folder, or "
                f"add files with the extension {', '.join(sorted(_EXTENSIONS))}."
            )
        names += map(os.fsencode, images)
        labels += [label] * len(images)
    return Files(directory, np.array(names, dtype=np.bytes_), torch.tensor(labels))


class _Tree:
    """The directories below a directory of class folders, each of which is listed once.

    Links to directories are followed. A link to a directory above itself would otherwise repeat
    its images until the path is too long, and would give them to other classes.
    """

    def __init__(self, argument: str, root: Path, folders: Sequence[str]) -> None:
        self._argument, self._root = argument, root
        above = root.resolve()
        self._above = {_identity(path) for path in (above, *above.parents)}
        self._owners: dict[tuple[int, int], str] = {}
        for folder in folders:
            self._claim(folder, folder)

    def images(self, class_name: str) -> list[str]:
        """Return the paths of all images of a class, relative to the root and sorted."""
        found: list[str] = []
        waiting = [class_name]
        while waiting:
            place = waiting.pop()
            for entry in _entries(self._argument, self._root / place):
                path = f"{place}/{entry.name}"
                if _is_directory(self._argument, entry):
                    if self._claim(path, class_name):
                        waiting.append(path)
                # FIFOs, devices and broken links are listed too; `decode` reports them.
                elif os.path.splitext(path)[1].lower() in _EXTENSIONS:  # noqa: PTH122 - is fast
                    found.append(path)
        return sorted(found)

    def _claim(self, path: str, class_name: str) -> bool:
        """Return whether a directory is new.

        Raises:
            InputError: If it belongs to another class.
        """
        key = _identity(self._root / path)
        if key in self._above:
            return False
        is_new = key not in self._owners
        owner = self._owners.setdefault(key, class_name)
        if owner != class_name:
            raise InputError(
                f"{self._argument} {self._root / path}: is a link to a folder of the class "
                f"{owner!r}, so its images would have two labels; remove the link."
            )
        return is_new


def _identity(directory: Path) -> tuple[int, int]:
    status = directory.stat()
    return status.st_dev, status.st_ino


def _folders(argument: str, directory: Path) -> list[str]:
    entries = _entries(argument, directory)
    return [entry.name for entry in entries if _is_directory(argument, entry)]


def _entries(argument: str, directory: Path) -> list[os.DirEntry[str]]:
    """Return what a directory contains, except for hidden files, sorted by name."""
    try:
        with os.scandir(directory) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(argument, directory, error) from error
    return sorted(visible, key=lambda entry: entry.name)


def _is_directory(argument: str, entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return False
        raise _unreadable(argument, entry.path, error) from error


def _unreadable(argument: str, path: Path | str, error: OSError) -> InputError:
    return InputError(f"{argument} {path}: cannot be read ({error.strerror}).")


def _valid_text(name: str) -> str:
    """Return a file name with escapes for what is not valid text, so that a record can hold it."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


class UnreadableImageError(Exception):
    """A file is not a complete image, or the system fails to read it."""

    def __init__(self, reason: str, *, is_system_error: bool = False) -> None:
        super().__init__(reason)
        self.is_system_error = is_system_error


@dataclass(frozen=True)
class Failure:
    """A file that could not be read."""

    path: str
    reason: str
    is_system_error: bool = False  # the disk or the memory failed, rather than the file


@dataclass(frozen=True)
class View:
    """A view of an image, or None, and the files that could not be read for it."""

    pixels: Tensor | None
    label: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """The views of a batch, the number of missing ones, and the files that could not be read."""

    pixels: Tensor
    labels: Tensor
    missing: int
    failures: tuple[Failure, ...]

    def pin_memory(self) -> "Loaded":
        """Return a copy in page-locked memory; `DataLoader` calls this."""
        pixels, labels = self.pixels.pin_memory(), self.labels.pin_memory()
        return Loaded(pixels, labels, self.missing, self.failures)


class Views(Dataset[View]):
    """Views of files, by keys that the subclass defines."""

    @abstractmethod
    def __getitem__(self, key: Any) -> View: ...


@final
class CentralViews(Views):
    """The center of each image, by index; None for an unreadable file."""

    def __init__(self, files: Files, size: int) -> None:
        self._files, self._size = files, size

    def __getitem__(self, key: int) -> View:
        label = int(self._files.labels[key])
        path = self._files.path(key)
        try:
            return View(central_view(decode(path), self._size), label)
        except UnreadableImageError as error:
            return View(None, label, (_failure(path, error),))


@final
class RandomViews(Views):
    """Random views by (place in the epoch, index of the file); a function of seed and key.

    The next readable file in the list, mostly of the same class, replaces an unreadable one.
    Batches keep their size, and a resumed run sees the same batches.
    """

    def __init__(self, files: Files, size: int, seed: int) -> None:
        self._files, self._size, self._seed = files, size, seed

    def __getitem__(self, key: tuple[int, int]) -> View:
        place, first = key
        rng = random.Random(fold(self._seed, place))  # noqa: S311 - not for cryptography
        failures: list[Failure] = []
        for step in range(min(MAX_FAILURES_IN_A_ROW, len(self._files))):
            index = (first + step) % len(self._files)
            path = self._files.path(index)
            try:
                pixels = random_view(decode(path), self._size, rng)
            except UnreadableImageError as error:
                failures.append(_failure(path, error))
                if error.is_system_error:
                    break
            else:
                return View(pixels, int(self._files.labels[index]), tuple(failures))
        return View(None, 0, tuple(failures))


def collate(views: Sequence[View]) -> Loaded:
    """Stack the views of a batch."""
    readable = [(view.pixels, view.label) for view in views if view.pixels is not None]
    return Loaded(
        torch.stack([pixels for pixels, _ in readable])
        if readable
        else torch.empty(0, dtype=torch.uint8),
        torch.tensor([label for _, label in readable], dtype=torch.long),
        len(views) - len(readable),
        tuple(failure for view in views for failure in view.failures),
    )


def decode(path: Path) -> "Image.Image":
    """Return the file as an RGB `PIL.Image.Image`; gray, palette and CMYK images are converted.

    Raises:
        UnreadableImageError: If the file cannot be read or decoded, or is too large.
    """
    from PIL import Image

    try:
        _check_file(path.stat())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about metadata, which is not used
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=_FORMATS) as image:
                return _to_rgb(image)
    except UnreadableImageError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UnreadableImageError(
            f"it has more than {Image.MAX_IMAGE_PIXELS:,} pixels; scale it down"
        ) from error
    except Exception as error:  # decoders raise nearly any exception for a damaged file
        # The caller adds the path, so it is removed from Pillow's message.
        reason = " ".join(str(error).removesuffix(repr(str(path))).rstrip(" :").split())
        raise UnreadableImageError(
            f"{type(error).__name__}: {reason}", is_system_error=_is_system_error(error)
        ) from error


def _check_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):  # reading a FIFO or a device might never end
        raise UnreadableImageError("it is not a regular file")
    if status.st_size > _MAX_FILE_SIZE:
        raise UnreadableImageError(f"it has more than {_MAX_FILE_SIZE:,} bytes; compress it")


def random_view(image: "Image.Image", size: int, rng: random.Random) -> Tensor:
    """Return a random part of a PIL image, scaled to `size` and mirrored half of the time."""
    from PIL import Image

    box = random_box(image.width, image.height, rng)
    view = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if rng.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _to_tensor(view)


def central_view(image: "Image.Image", size: int) -> Tensor:
    """Return the center of a PIL image, after scaling its shorter side to `size` · 256/224."""
    from PIL import Image

    longest = _MAX_ASPECT_RATIO * min(image.size)
    if max(image.size) > longest:
        width, height = (min(side, longest) for side in image.size)
        image = image.crop(_central_box(*image.size, width, height))
    shorter = round(size * _MARGIN)
    width, height = (shorter * side // min(image.size) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _to_tensor(scaled.crop((left, top, left + size, top + size)))


def random_box(width: int, height: int, rng: random.Random) -> tuple[int, int, int, int]:
    """Return a box (left, top, right, bottom) of random area, shape and position in the image."""
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(*_AREA)
        ratio = math.exp(rng.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = rng.randint(0, width - box_width), rng.randint(0, height - box_height)
            return left, top, left + box_width, top + box_height
    # The image is too narrow: use the largest central box with an allowed ratio.
    box_width = min(width, round(height * _RATIO[1]))
    box_height = min(height, round(width / _RATIO[0]))
    return _central_box(width, height, box_width, box_height)


def _central_box(
    width: int, height: int, box_width: int, box_height: int
) -> tuple[int, int, int, int]:
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def _to_rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits; Pillow would turn all values above 255 white
        gray = np.array(image)
        np.clip(gray >> 8, 0, 255, out=gray)
        return Image.fromarray(gray.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _to_tensor(image: "Image.Image") -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _is_system_error(error: Exception) -> bool:
    # Decoders raise OSError for a damaged image too, but without an error number.
    number = error.errno if isinstance(error, OSError) else None
    return isinstance(error, MemoryError) or (number or 0) not in (0, *_FILE_ERRORS)


def _failure(path: Path, error: UnreadableImageError) -> Failure:
    return Failure(_valid_text(str(path)), _valid_text(str(error)), error.is_system_error)
