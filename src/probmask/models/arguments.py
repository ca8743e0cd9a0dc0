"""Checks of what networks are built with and of the images they are given."""

from collections.abc import Sequence

from torch import Tensor

from probmask.checks import check_choice, check_count
from probmask.errors import InputError

# Every network takes these numbers.
_SIZES = {
    "classes": "classes to tell apart",
    "channels": "channels of the images",
    "width": "channels of the first layer",
}
# Of the images that conv4 is built for: its two poolings halve them twice.
SMALLEST_SIDE = 4


def check_arguments(caller: str, **arguments: object) -> None:
    """Refuse values that no network can be built with."""
    for name, value in arguments.items():
        if name in _SIZES:
            check_count(caller, name, value, least=1, meaning=_SIZES[name])
        elif name == "stem_stride":
            check_count(caller, name, value, least=1, meaning="stride of the first layer")
            check_choice(caller, name, value, (1, 2))
        elif name == "image_size":
            height_and_width(caller, value)


def height_and_width(caller: str, size: object) -> tuple[int, int]:
    """The image size that was given as one number or as a pair, refused if too small."""
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(pair) != 2:
        raise InputError(
            f"{caller}(image_size={size!r}): one number, or the height and width of the images."
        )
    meaning = "pixels along each side of the images"
    for side in pair:
        check_count(caller, "image_size", side, least=SMALLEST_SIDE, meaning=meaning)
    return pair


def check_at_least(network: str, images: Tensor, least: int) -> None:
    """Refuse images that the network's pooling would leave nothing of."""
    height, width = _sides(images) or (least, least)
    if height < least or width < least:
        raise InputError(
            f"{network}: images are {height} by {width}; it needs at least {least} by {least}, "
            "for its pooling to leave anything; take larger images or another network."
        )


def check_exactly(network: str, images: Tensor, size: Sequence[int]) -> None:
    """Refuse images of another size than the network's linear layers were built for."""
    height, width = _sides(images) or size
    if height != size[0] or width != size[1]:
        raise InputError(
            f"{network}: images are {height} by {width}, but it was built for {size[0]} by "
            f"{size[1]}; build it with image_size=[{height}, {width}]."
        )


def _sides(images: Tensor) -> tuple[int, int] | None:
    """Height and width, unless a symbolic tracer passes a stand-in, which has none yet."""
    return (images.shape[-2], images.shape[-1]) if isinstance(images, Tensor) else None
