"""Curves in plain text: Braille patterns hold two by four dots in a character."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_EMPTY = 0x2800
# What each dot of a character adds to the empty one, by column and by row from above.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BORDER, _LINE, _CROSSING = "┊", "─", "┴"


@dataclass(frozen=True)
class Range:
    """The values that an axis shows."""

    low: float
    high: float

    def place(self, value: float, count: int) -> int:
        """Which of ``count`` places in a row a value falls on; what lies outside, on the edge."""
        width = self.high - self.low
        fraction = (value - self.low) / width if width > 0 else 0.5
        return math.floor(min(1.0, max(0.0, fraction)) * (count - 1) + 0.5)


def draw_curve(
    points: Iterable[tuple[float, float]],
    *,
    width: int,
    height: int,
    across: Range,
    up: Range,
    borders: Sequence[float] = (),
) -> list[str]:
    """Draw straight lines from point to point in ``height`` rows of ``width`` characters.

    A point that is not finite interrupts the curve. ``borders`` are drawn from top to bottom
    wherever the curve leaves room.
    """
    cells = [[0] * width for _ in range(height)]
    for x, y in _dots(points, across, up, width=2 * width, height=4 * height):
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    marked = {_column(border, across, width) for border in borders}
    return [
        "".join(
            chr(_EMPTY + dots) if dots else _BORDER if column in marked else " "
            for column, dots in enumerate(row)
        )
        for row in cells
    ]


def draw_axis(
    width: int, across: Range, names: Sequence[str], borders: Sequence[float] = ()
) -> str:
    """The line below a curve: its first and last value, and the names of what borders part.

    A name that finds no room is left out.
    """
    line = [_LINE] * width
    columns = [_column(border, across, width) for border in borders]
    for name, (begin, end) in zip(names, pairwise([-1, *columns, width]), strict=True):
        if end - begin - 1 >= len(name) + 2 * len(f"{across.high:g}") + 2:
            first = begin + 1 + (end - begin - 1 - len(name)) // 2
            line[first : first + len(name)] = name
    for column in columns:
        line[column] = _CROSSING
    last = f"{across.high:g}"
    line[width - len(last) :] = last
    first_value = f"{across.low:g}"
    if across.high > across.low:
        line[: len(first_value)] = first_value
    return "".join(line)


def _column(border: float, across: Range, width: int) -> int:
    return across.place(border, 2 * width) // 2


def _dots(
    points: Iterable[tuple[float, float]], across: Range, up: Range, *, width: int, height: int
) -> Iterable[tuple[int, int]]:
    """The dots of the curve, counted from the upper left corner."""
    last: tuple[int, int] | None = None
    for x, y in points:
        if not math.isfinite(y):
            last = None
            continue
        dot = across.place(x, width), height - 1 - up.place(y, height)
        yield from _straight(last or dot, dot)
        last = dot


def _straight(begin: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    (x, y), (right, down) = begin, (end[0] - begin[0], end[1] - begin[1])
    steps = max(abs(right), abs(down), 1)
    for step in range(steps + 1):
        yield x + math.floor(right * step / steps + 0.5), y + math.floor(down * step / steps + 0.5)
