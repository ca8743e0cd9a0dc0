"""Steering a method that has no budget of its own towards one, by the knob it does have."""

import math

# Over a whole training, an error of a factor e in what is kept raises the knob by e to this power,
# and lowers it by the other: gates that have closed open again only with difficulty.
_RISE, _FALL = 20.0, 80.0
# An error acts at once, to this power, and not only through what it adds up to.
_PUSH = 4.0
_RANGE = (1e-3, 1e3)


def steered(knob: float, kept: float, wanted: float, *, updates: int) -> float:
    """λ ← λ (kept / wanted)^(r / updates): the knob rises while more is kept than wanted.

    Integral control of ln λ: in a training of ``updates`` updates, however many there are, it
    doubles within the same part of it for the same error. It falls four times as fast, and stays
    within 1e-3 to 1e3.
    """
    response = _RISE if kept > wanted else _FALL
    return _within(knob * math.pow(_ratio(kept, wanted), response / updates), *_RANGE)


def pressed(knob: float, kept: float, wanted: float) -> float:
    """λ (kept / wanted)^4: the knob with what the error of this moment adds.

    The proportional part of the control; without it λ would swing about its value.
    """
    return knob * math.pow(_ratio(kept, wanted), _PUSH)


def travel_rate(distance: float, updates: int, *, most: float) -> float:
    """2 distance / updates, but at most ``most``: Adam's rate for covering a distance in time.

    Adam moves a parameter whose gradient keeps its sign by the rate at each update, and a rate that
    falls along a cosine is half its height on average.
    """
    return min(most, 2 * distance / updates)


def _ratio(kept: float, wanted: float) -> float:
    """kept / wanted, within a factor of e: an error far off says no more than which way to go."""
    return _within(kept / wanted, math.exp(-1), math.e)


def _within(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))
