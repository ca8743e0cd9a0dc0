"""Folders of image files: ImageNet and data of the user, with one folder per class."""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.errors import InputError

_EXTENSIONS = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
)
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
            if is_system_error(error):
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
            if is_system_error(error):
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
        return Folder(tuple(map(valid_text, class_names)), {"train": files})
    class_names = _class_names(argument, directory / "train")
    found = {
        part: _list_part(argument, directory / part, class_names)
        for part in ("train", *parts)
        if (directory / part).is_dir()
    }
    return Folder(tuple(map(valid_text, class_names)), found)


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


def valid_text(name: str) -> str:
    """Return a file name with escapes for what is not valid text, so that a record can hold it."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def is_system_error(error: Exception) -> bool:
    """Return whether the disk or the memory failed, rather than the file."""
    # Decoders raise OSError for a damaged image too, but without an error number.
    number = error.errno if isinstance(error, OSError) else None
    return isinstance(error, MemoryError) or (number or 0) not in (0, *_FILE_ERRORS)
