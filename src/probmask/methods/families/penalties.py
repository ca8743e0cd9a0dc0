"""Penalties on the number of kept weights, steered so that the budget is met.

A penalty by itself leads to some sparsity, not to the one asked for. A masker therefore has two
factors: ``knob``, which integrates the error over the training, and ``pressure``, the factor on the
penalty, which adds the present error. The remaining error is made up for at the end of the
training, by selecting exactly the budget.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from probmask.core.schedules import kept_fraction
from probmask.core.steering import pressed, steered


def steered_penalty(
    knob: float,
    kept: float,
    final: float,
    *,
    progress: float,
    ramp: tuple[float, float],
    updates: int,
) -> tuple[float, float]:
    """Return knob and pressure for the next update.

    Args:
        knob: The present knob.
        kept: The fraction of weights that the method's own rule would keep now.
        final: The fraction of weights to keep at the end.
        progress: The fraction of the training that is done.
        ramp: The fractions of the training between which the wanted fraction falls cubically.
        updates: Number of updates of the training.
    """
    begin, end = ramp
    wanted = kept_fraction(progress, final, begin=begin, end=end)
    knob = steered(knob, kept, wanted, updates=updates)
    return knob, pressed(knob, kept, wanted)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars."""
    return torch.stack(list(parts)).sum()
