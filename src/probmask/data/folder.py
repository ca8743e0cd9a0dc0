"""Folders of images, one for each class: ImageNet, and the user's own."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probmask.errors import InputError

_ENDINGS = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
)


@dataclass(frozen=True)
class Files:
    """Image files under a root, and their labels.

    The names are one array of bytes: worker processes then share it, where a list of a million
    strings would be copied to each as its reference counts change.
    """

    root: Path
    names: "np.ndarray[Any, Any]"
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor) -> "Files":
        return Files(self.root, self.names[chosen.numpy()], self.labels[chosen])

    def path(self, index: int) -> Path:
        """Where an image lies."""
        return self.root / os.fsdecode(bytes(self.names[index]))


@dataclass(frozen=True)
class Folder:
    """What a directory holds: its classes by name, and the parts that it has."""

    class_names: tuple[str, ...]
    parts: dict[str, Files]


def list_folder(argument: str, directory: Path, parts: tuple[str, ...] = ("val", "test")) -> Folder:
    """List the images of a directory with train/ and other parts, or with the classes alone."""
    if not directory.is_dir():
        raise InputError(
            f"{argument} {directory}: is no directory; give one with folders of images."
        )
    if not (directory / "train").is_dir():
        for part in parts:
            if (directory / part).is_dir():
                raise InputError(
                    f"{argument} {directory}: has a {part}/ but no train/ in it; call the folder "
                    "of the training images so."
                )
        class_names = _class_names(argument, directory)
        return Folder(class_names, {"train": _list(argument, directory, class_names)})
    class_names = _class_names(argument, directory / "train")
    found = {
        part: _list(argument, directory / part, class_names)
        for part in ("train", *parts)
        if (directory / part).is_dir()
    }
    return Folder(class_names, found)


def _class_names(argument: str, directory: Path) -> tuple[str, ...]:
    names = sorted(entry.name for entry in os.scandir(directory) if _is_class(entry))
    if len(names) < 2:
        raise InputError(
            f"{argument} {directory}: has {len(names)} folder{'s' if len(names) != 1 else ''} in "
            "it; expected one for each class, at least two, with the images of the class."
        )
    return tuple(names)


def _list(argument: str, directory: Path, class_names: tuple[str, ...]) -> Files:
    there = {entry.name for entry in os.scandir(directory) if _is_class(entry)}
    unknown = sorted(there - set(class_names))
    if unknown:
        raise InputError(
            f"{argument} {directory}: has a folder {unknown[0]!r}, which is no class of the "
            "training images; remove it, or add such images to train/."
        )
    if not there:
        raise InputError(
            f"{argument} {directory}: has no folders of classes in it; sort its images into "
            "folders called as those of the training images."
        )
    names: list[bytes] = []
    labels: list[int] = []
    for label, class_name in enumerate(class_names):
        images = _images(directory / class_name) if class_name in there else []
        if class_name in there and not images:
            raise InputError(
                f"{argument} {directory / class_name}: has no images in it; remove the folder, or "
                f"bring files that end in {', '.join(sorted(_ENDINGS))}."
            )
        names += [os.fsencode(f"{class_name}/{image}") for image in images]
        labels += [label] * len(images)
    return Files(directory, np.array(names, dtype=np.bytes_), torch.tensor(labels))


def _is_class(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _images(directory: Path) -> list[str]:
    """The image files in the folder and in the folders within it, relative to it."""
    found = []
    for place, folders, files in os.walk(directory, followlinks=True):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        inner = os.path.relpath(place, directory)
        found += [
            file if inner == "." else f"{inner}/{file}"
            for file in files
            if os.path.splitext(file)[1].lower() in _ENDINGS  # noqa: PTH122 - a million of them
            and not file.startswith(".")
        ]
    return sorted(found)
