"""Directories with one folder of image files per class: ImageNet, and data of the user."""

import os
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
        return Folder(class_names, {"train": _list_part(argument, directory, class_names)})
    class_names = _class_names(argument, directory / "train")
    found = {
        part: _list_part(argument, directory / part, class_names)
        for part in ("train", *parts)
        if (directory / part).is_dir()
    }
    return Folder(class_names, found)


def _class_names(argument: str, directory: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in os.scandir(directory) if _is_class(entry))
    if len(names) < 2:
        raise InputError(
            f"{argument} {directory}: contains {len(names)} folder{'s' if len(names) != 1 else ''};"
            " expected at least two, one per class, with the images of the class."
        )
    return tuple(names)


def _list_part(argument: str, directory: Path, class_names: tuple[str, ...]) -> Files:
    folders = {entry.name for entry in os.scandir(directory) if _is_class(entry)}
    unknown = sorted(folders - set(class_names))
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
    names: list[bytes] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        if class_name not in folders:
            continue
        images = _list_images(directory / class_name)
        if not images:
            raise InputError(
                f"{argument} {directory / class_name}: contains no images; remove the folder, or "
                f"add files with the extension {', '.join(sorted(_EXTENSIONS))}."
            )
        names += [os.fsencode(f"{class_name}/{image}") for image in images]
        labels += [label] * len(images)
    return Files(directory, np.array(names, dtype=np.bytes_), torch.tensor(labels))


def _is_class(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _list_images(directory: Path) -> list[str]:
    """Return the paths of all images below the directory, relative to it and sorted."""
    found = []
    for place, folders, files in os.walk(directory, followlinks=True):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        inner = os.path.relpath(place, directory)
        found += [
            file if inner == "." else f"{inner}/{file}"
            for file in files
            if os.path.splitext(file)[1].lower() in _EXTENSIONS  # noqa: PTH122 - a million files
            and not file.startswith(".")
        ]
    return sorted(found)
