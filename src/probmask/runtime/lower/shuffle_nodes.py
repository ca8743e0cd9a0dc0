"""Operations that move elements between channels, rows and columns of images: shuffles.

They are views: each is a reshape, a permutation and a reshape.
"""

from typing import Any

from probmask.runtime.lower.views import View


def pixel_shuffle(view: View, arguments: dict[str, Any], shape: tuple[int, ...]) -> View | None:
    """Move channels to the rows and columns between those of an image."""
    factor = arguments["upscale_factor"]
    *leading, channels, height, width = shape
    split = (*leading, channels, factor, factor, height // factor, width // factor)
    n = len(leading)
    return _moved(view, split, (*range(n + 1), n + 3, n + 1, n + 4, n + 2), shape)


def pixel_unshuffle(view: View, arguments: dict[str, Any], shape: tuple[int, ...]) -> View | None:
    """Move every few rows and columns of an image to channels of their own."""
    factor = arguments["downscale_factor"]
    *leading, channels, height, width = shape
    split = (*leading, channels // factor**2, height, factor, width, factor)
    n = len(leading)
    return _moved(view, split, (*range(n + 1), n + 2, n + 4, n + 1, n + 3), shape)


def channel_shuffle(view: View, arguments: dict[str, Any], shape: tuple[int, ...]) -> View | None:
    """Interleave groups of channels."""
    groups = arguments["groups"]
    batch, channels, *positions = shape
    split = (batch, groups, channels // groups, *positions)
    return _moved(view, split, (0, 2, 1, *range(3, len(split))), shape)


def _moved(
    view: View, split: tuple[int, ...], order: tuple[int, ...], shape: tuple[int, ...]
) -> View | None:
    divided = view.reshaped(split)
    return None if divided is None else divided.permuted(order).reshaped(shape)
