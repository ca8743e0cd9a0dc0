"""Curves and axes in plain text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probmask.cli.dashboard import Range, draw_axis, draw_curve

UNIT = Range(0, 1)
EMPTY = 0x2800


def drawn(points, *, width, height, **ranges):
    return draw_curve(points, width=width, height=height, **({"across": UNIT, "up": UNIT} | ranges))


def dots(rows):
    """Return the dots of a drawing as (column, row) from the upper left."""
    order = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]  # bits 0 to 7
    return {
        (2 * x + right, 4 * y + down)
        for y, row in enumerate(rows)
        for x, cell in enumerate(row)
        for bit, (right, down) in enumerate(order)
        if cell not in " ┊" and (ord(cell) - EMPTY) >> bit & 1
    }


def test_a_rising_line():
    assert drawn([(0, 0), (1, 1)], width=4, height=2) == ["  ⡠⠊", "⡠⠊  "]


def test_a_decaying_curve():
    points = [(epoch, math.exp(-epoch / 3)) for epoch in range(13)]
    assert drawn(points, width=13, height=3, across=Range(0, 12)) == [
        "⠱⡀           ",
        " ⠈⠢⡀         ",
        "   ⠈⠑⠒⠤⠤⠤⠤⣀⣀⣀",
    ]


def test_a_single_point_is_a_dot():
    assert drawn([(0, 0)], width=3, height=1) == ["⡀  "]
    assert drawn([(1, 1)], width=3, height=1) == ["  ⠈"]


def test_no_points():
    assert drawn([], width=3, height=2) == ["   ", "   "]


def test_borders_are_behind_the_curve():
    rows = drawn([(0, 0), (1, 0)], width=5, height=3, borders=[0.5])
    assert rows == ["  ┊  ", "  ┊  ", "⣀⣀⣀⣀⣀"]


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_is_a_gap(hole):
    points = [(0, 0), (0.25, 0), (0.5, hole), (0.75, 0), (1, 0)]
    assert drawn(points, width=8, height=1) == ["⣀⣀⡀  ⢀⣀⣀"]


def test_values_outside_the_range_are_on_its_edge():
    assert drawn([(0, 9), (1, 9)], width=2, height=1) == ["⠉⠉"]
    assert drawn([(0, -9), (1, -9)], width=2, height=1) == ["⣀⣀"]


def test_an_empty_range_is_drawn_in_the_middle():
    assert drawn([(5, 5)], width=3, height=1, across=Range(5, 5), up=Range(5, 5)) == [" ⠐ "]


values = st.floats(min_value=-1, max_value=2)


@given(st.lists(values, min_size=2, max_size=12), st.integers(2, 9), st.integers(1, 5))
def test_a_curve_connects_all_points(ys, width, height):
    points = [(index / (len(ys) - 1), y) for index, y in enumerate(ys)]
    rows = drawn(points, width=width, height=height)
    assert [len(row) for row in rows] == [width] * height
    found = dots(rows)
    for x, y in points:
        inside = min(1, max(0, y))
        column = math.floor(x * (2 * width - 1) + 0.5)
        row = 4 * height - 1 - math.floor(inside * (4 * height - 1) + 0.5)
        assert (column, row) in found
    assert {column for column, _ in found} == set(range(2 * width))
    seen, border = set(), {next(iter(found))}
    while border:  # all dots are connected
        seen |= border
        steps = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
        border = {(x + a, y + b) for x, y in border for a, b in steps} & found - seen
    assert seen == found


def test_axis_with_one_name():
    assert draw_axis(21, Range(1, 40), ["epoch"]) == "1───────epoch──────40"


def test_axis_with_borders():
    names = ["train", "fine-tune"]
    axis = draw_axis(41, Range(1, 10), names, borders=[5.5])
    assert axis == "1──────train────────┴─────fine-tune────10"
    rows = draw_curve([], width=41, height=1, across=Range(1, 10), up=UNIT, borders=[5.5])
    assert rows[0].index("┊") == axis.index("┴")


def test_names_without_room_are_omitted():
    names = [f"training {number}" for number in range(1, 6)]
    borders = [epoch + 0.5 for epoch in range(1, 5)]
    assert draw_axis(21, Range(1, 5), names, borders) == "1─┴────┴─────┴────┴─5"


def test_an_axis_of_one_epoch():
    assert draw_axis(9, Range(1, 1), ["epoch"]) == "──epoch─1"
