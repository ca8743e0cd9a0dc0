"""Control of methods without a budget: adapt a penalty λ until the wanted fraction is kept.

A penalty by itself leads to some sparsity, not to the requested one. A proportional-integral
controller of ln λ corrects this: `steered` is its integral part, `pressed` its proportional part,
and `steered_penalty` applies both. The final selection of exactly the budget corrects the remaining
error.
"""

import math

from probmask.core.schedules import kept_fraction

# If the kept fraction is off by a factor e for a whole training, λ rises by e^_RISE or falls by
# e^-_FALL. It falls faster because gates that have closed open again only slowly.
_RISE, _FALL = 20.0, 80.0
_PROPORTIONAL = 4.0  # exponent of the proportional part
_RANGE = (1e-3, 1e3)


def steered(knob: float, kept: float, wanted: float, *, updates: int) -> float:
    """λ ← λ (kept / wanted)^(r / updates): raise λ while more weights are kept than wanted.

    Integral control of ln λ. For the same error, λ doubles within the same fraction of the
    training, for any number of updates. It falls four times as fast as it rises.

    Args:
        knob: λ, the strength of the penalty.
        kept: the fraction of the weights that is kept now.
        wanted: the fraction that should be kept.
        updates: the number of updates of the whole training.

    Returns:
        The new λ, within [1e-3, 1e3].

    Example:
        >>> steered(1.0, 0.2, 0.1, updates=20)
        2.0
    """
    response = _RISE if kept > wanted else _FALL
    return _clip(knob * math.pow(_ratio(kept, wanted), response / updates), *_RANGE)


def pressed(knob: float, kept: float, wanted: float) -> float:
    """λ (kept / wanted)⁴: the penalty to apply now, with λ of `steered`.

    Proportional control; without it, λ would oscillate.

    Args:
        knob: λ of `steered`.
        kept: the fraction of the weights that is kept now.
        wanted: the fraction that should be kept.

    Returns:
        The strength of the penalty at this update.

    Example:
        >>> pressed(1.0, 0.2, 0.1)
        16.0
    """
    return knob * math.pow(_ratio(kept, wanted), _PROPORTIONAL)


def steered_penalty(
    knob: float,
    kept: float,
    final: float,
    *,
    progress: float,
    ramp: tuple[float, float],
    updates: int,
) -> tuple[float, float]:
    """Apply `steered` and `pressed`, with a wanted fraction that falls cubically to the budget.

    Args:
        knob: λ of `steered`.
        kept: the fraction of the weights that the method's own rule would keep now.
        final: the fraction to keep at the end.
        progress: the fraction of the training that is done.
        ramp: the fractions of the training between which the wanted fraction falls.
        updates: the number of updates of the whole training.

    Returns:
        The new knob, and the strength of the penalty at the next update.
    """
    begin, end = ramp
    wanted = kept_fraction(progress, final, begin=begin, end=end)
    knob = steered(knob, kept, wanted, updates=updates)
    return knob, pressed(knob, kept, wanted)


def travel_rate(distance: float, updates: int, *, most: float) -> float:
    """min(most, 2 distance / updates): Adam's learning rate to move a parameter by a distance.

    Adam moves a parameter by the learning rate at each update if its gradient keeps its sign. A
    cosine schedule averages half of the initial rate.

    Args:
        distance: the distance that the parameter must be able to move.
        updates: the number of updates of the training.
        most: the largest rate.

    Returns:
        The initial learning rate.

    Example:
        >>> travel_rate(3.0, 600, most=0.1)
        0.01
    """
    return min(most, 2 * distance / updates)


def _ratio(kept: float, wanted: float) -> float:
    """kept / wanted, clipped to [1/e, e]: only the sign of a large error counts."""
    return _clip(kept / wanted, math.exp(-1), math.e)


def _clip(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))
