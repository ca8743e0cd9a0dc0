"""Training, one pruning, fine-tuning: the phases, and the pruning between them.

Pruning by weight and MLPrune share this. They differ in the values by which weights are pruned.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from torch import Tensor

from probmask.checks import Range
from probmask.errors import InputError
from probmask.masking.masker import Masker
from probmask.masking.method import Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.methods.families.stored import StoredWeight, activate_

EpochFraction = Annotated[float, Range(0, 0.99, "a fraction of all epochs")]
RateFactor = Annotated[float, Range(0, meaning="a factor of the learning rate")]


def tuning_phases(
    caller: str,
    epochs: int,
    *,
    fine_tune: float,
    rate: float,
    schedule: Literal["constant", "cosine"],
    equal_epochs: bool,
) -> tuple[Phase, Phase]:
    """Return the phases: a training and a fine-tuning of at least one epoch each.

    Args:
        caller: Name of the method, for the error message.
        epochs: Epochs of both phases together, or of the training alone; see ``equal_epochs``.
        fine_tune: Fraction of all epochs that is fine-tuning.
        rate: Factor on the learning rate while fine-tuning.
        schedule: Whether the rate stays constant or follows a cosine while fine-tuning.
        equal_epochs: Whether the fine-tuning is part of ``epochs`` or comes in addition to them.

    Raises:
        InputError: If ``epochs`` must be divided but is 1.
    """
    if not equal_epochs:
        training, tuning = epochs, max(1, round(epochs * fine_tune / (1 - fine_tune)))
    elif epochs < 2:
        raise InputError(
            f"{caller}: trains, prunes and fine-tunes, which takes 2 epochs, not {epochs}; train "
            "longer (in your own loop, omit steps_per_epoch=) or set equal_epochs=False."
        )
    else:
        tuning = min(epochs - 1, max(1, round(epochs * fine_tune)))
        training = epochs - tuning
    return Phase("train", training), Phase("fine-tune", tuning, schedule, rate)


def prune_and_freeze_(
    masker: Masker,
    masked: Sequence[StoredWeight],
    active: Sequence[Tensor],
    optimizers: WeightOptimizers,
) -> None:
    """Make ``active`` the final masks and discard the optimizers' momentum."""
    activate_(masked, masker.weights, active)
    masker.freeze()
    optimizers.restart_all_()
