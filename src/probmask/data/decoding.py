"""From an image file to bytes of the size that the network takes: crops as ImageNet's users do."""

import errno
import math
import random
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

# A random crop has this part of the image's area, and this ratio of width to height.
_AREA = (0.08, 1.0)
_RATIO = (3 / 4, 4 / 3)
_ATTEMPTS = 10
# The shorter side is scaled to 256 where the centre of 224 is cut out.
_MARGIN = 256 / 224
# An image that is longer in proportion loses its ends first: as a whole it might not fit into
# memory once scaled, and only its centre is wanted.
_LONGEST = 16


# What the system says of one file, and not of itself.
_ABOUT_THE_FILE = frozenset(
    (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
)


class UnreadableImageError(Exception):
    """A file is not an image, or only a part of one; or the system fails to read it."""

    def __init__(self, reason: str, *, is_of_the_system: bool = False) -> None:
        super().__init__(reason)
        self.is_of_the_system = is_of_the_system


def decode(path: Path) -> "Image.Image":
    """Read an image of any kind (grey, palette, CMYK, …) as RGB."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata, which nobody here looks at
            with Image.open(path) as image:
                return _as_rgb(image)
    except Exception as error:  # broken files raise nearly anything in the decoders
        # Which file it is, whoever catches this knows.
        reason = " ".join(str(error).removesuffix(repr(str(path))).rstrip(" :").split())
        raise UnreadableImageError(
            f"{type(error).__name__}: {reason}", is_of_the_system=_is_of_the_system(error)
        ) from error


def _is_of_the_system(error: Exception) -> bool:
    # Decoders raise an OSError for a damaged image too, but that has no number.
    number = error.errno if isinstance(error, OSError) else None
    return isinstance(error, MemoryError) or (number or 0) not in (0, *_ABOUT_THE_FILE)


def _as_rgb(image: "Image.Image") -> "Image.Image":
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits, of which Pillow would show all above 255 as white
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def random_view(image: "Image.Image", size: int, chance: random.Random) -> Tensor:
    """A random part of the image scaled to ``size``, mirrored half of the time."""
    from PIL import Image

    box = random_box(image.width, image.height, chance)
    view = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if chance.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _as_tensor(view)


def central_view(image: "Image.Image", size: int) -> Tensor:
    """The centre of the image, of ``size``, after its shorter side is scaled a little larger."""
    from PIL import Image

    longest = _LONGEST * min(image.size)
    if max(image.size) > longest:
        across, down = (min(side, longest) for side in image.size)
        image = image.crop(_central_box(*image.size, across, down))
    shorter = round(size * _MARGIN)
    width, height = (shorter * side // min(image.size) for side in image.size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return _as_tensor(scaled.crop((left, top, left + size, top + size)))


def random_box(width: int, height: int, chance: random.Random) -> tuple[int, int, int, int]:
    """A box (left, top, right, bottom) of random area, shape and place within the image."""
    for _ in range(_ATTEMPTS):
        area = width * height * chance.uniform(*_AREA)
        ratio = math.exp(chance.uniform(math.log(_RATIO[0]), math.log(_RATIO[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = chance.randint(0, width - across), chance.randint(0, height - down)
            return left, top, left + across, top + down
    # Too narrow to find one: the largest in its centre whose ratio is allowed.
    across = min(width, round(height * _RATIO[1]))
    down = min(height, round(width / _RATIO[0]))
    return _central_box(width, height, across, down)


def _central_box(width: int, height: int, across: int, down: int) -> tuple[int, int, int, int]:
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def _as_tensor(image: "Image.Image") -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
