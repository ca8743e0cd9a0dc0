"""What worker processes do: read files and make views of them, failures included as data.

An exception in a worker process ends the loader with a traceback of its own; what fails is
therefore handed back, and the main process decides what to do about it.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from probmask.core.noise import fold
from probmask.data.decoding import UnreadableImageError, central_view, decode, random_view
from probmask.data.folder import Files

# So many unreadable files in a row are no accident.
MOST_IN_A_ROW = 100


@dataclass(frozen=True)
class Failure:
    """A file that could not be read."""

    path: str
    reason: str
    is_of_the_system: bool = False  # and not of the file: a disk that fails, no memory


@dataclass(frozen=True)
class View:
    """An image as the network takes it, or none, and the files that failed on the way to it."""

    pixels: Tensor | None
    label: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """The views of a batch, and how many of them there are not."""

    pixels: Tensor
    labels: Tensor
    missing: int
    failures: tuple[Failure, ...]

    def pin_memory(self) -> "Loaded":
        """The same in memory that a GPU copies from while it computes."""
        pixels, labels = self.pixels.pin_memory(), self.labels.pin_memory()
        return Loaded(pixels, labels, self.missing, self.failures)


class Views(Dataset[View]):
    """Views of files, by keys that say which and how."""

    @abstractmethod
    def __getitem__(self, key: Any) -> View: ...


class CentralViews(Views):
    """The centre of each image; an unreadable one has none."""

    def __init__(self, files: Files, size: int) -> None:
        self._files, self._size = files, size

    def __getitem__(self, key: int) -> View:
        label = int(self._files.labels[key])
        path = self._files.path(key)
        try:
            return View(central_view(decode(path), self._size), label)
        except UnreadableImageError as error:
            return View(None, label, (_failure(path, error),))


class RandomViews(Views):
    """A random view for each place in an epoch, as a function of seed and place.

    In the stead of an unreadable file comes the next one in the list, mostly of the same class, so
    that batches keep their size and a resumed run sees the same.
    """

    def __init__(self, files: Files, size: int, seed: int) -> None:
        self._files, self._size, self._seed = files, size, seed

    def __getitem__(self, key: tuple[int, int]) -> View:
        place, first = key
        chance = random.Random(fold(self._seed, place))  # noqa: S311 - no secret
        failures: list[Failure] = []
        for step in range(min(MOST_IN_A_ROW, len(self._files))):
            index = (first + step) % len(self._files)
            path = self._files.path(index)
            try:
                pixels = random_view(decode(path), self._size, chance)
            except UnreadableImageError as error:
                failures.append(_failure(path, error))
                if error.is_of_the_system:
                    break
            else:
                return View(pixels, int(self._files.labels[index]), tuple(failures))
        return View(None, 0, tuple(failures))


def _failure(path: Path, error: UnreadableImageError) -> Failure:
    return Failure(str(path), str(error), error.is_of_the_system)


def collate(views: Sequence[View]) -> Loaded:
    """Put the views of a batch together."""
    seen = [view for view in views if view.pixels is not None]
    pixels = [view.pixels for view in seen if view.pixels is not None]
    return Loaded(
        torch.stack(pixels) if pixels else torch.empty(0, dtype=torch.uint8),
        torch.tensor([view.label for view in seen], dtype=torch.long),
        len(views) - len(seen),
        tuple(failure for view in views for failure in view.failures),
    )
