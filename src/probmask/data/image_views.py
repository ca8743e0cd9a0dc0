"""Views of images: decoded, cropped and scaled for the network.

Worker processes make the views. An exception in a worker process would end the `DataLoader` with a
traceback, so files that cannot be read are returned as data, and the main process decides.
"""

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
from probmask.data.image_folder import Files, is_system_error, valid_text

if TYPE_CHECKING:  # Pillow is imported when the first file is read
    from PIL import Image

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
            f"{type(error).__name__}: {reason}", is_system_error=is_system_error(error)
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


def _failure(path: Path, error: UnreadableImageError) -> Failure:
    return Failure(valid_text(str(path)), valid_text(str(error)), error.is_system_error)
