"""Several rounds of training, pruning some weights and training again.

After round r of R, K_r = n (K/n)^(r/R) of n weights remain: every round prunes the same fraction of
the remaining weights, and the last round ends at exactly K. Lottery tickets and learning-rate
rewinding share this. They differ in the weights that a round starts with.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from torch import Tensor

from probmask.checks import Range
from probmask.core.allocation import Spread
from probmask.errors import InputError
from probmask.masking.masker import Masker
from probmask.masking.method import Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_magnitudes,
    select_by,
)

RoundFraction = Annotated[
    float, Range(0.001, 0.999, "the fraction of the remaining weights that a round prunes")
]


def round_phases(
    caller: str, sparsity: float, epochs: int, *, prune_per_round: float, equal_epochs: bool
) -> tuple[Phase, ...]:
    """Return the phases: one training more than rounds; the longer trainings come last.

    Args:
        caller: Name of the method, for the error message.
        sparsity: The final sparsity.
        epochs: Epochs of all trainings together, or of each; see ``equal_epochs``.
        prune_per_round: The largest fraction of the remaining weights that a round may prune.
        equal_epochs: Whether ``epochs`` are divided among the trainings. If there are fewer epochs
            than trainings, there are fewer rounds, which prune more each.

    Raises:
        InputError: If ``epochs`` must be divided but is 1.
    """
    # 0.2 of 1 leaves 0.8 after one round; rounding errors of the logarithms must not add a second.
    exact = math.log(1 - sparsity) / math.log(1 - prune_per_round)
    rounds = max(1, math.ceil(exact - 1e-9))
    if not equal_epochs:
        return tuple(Phase(f"training {index + 1}", epochs) for index in range(rounds + 1))
    if epochs < 2:
        raise InputError(
            f"{caller}: trains, prunes and trains again, which takes 2 epochs, not {epochs}; train "
            "longer (in your own loop, omit steps_per_epoch=) or set equal_epochs=False."
        )
    trainings = min(rounds, epochs - 1) + 1
    return tuple(
        Phase(f"training {index + 1}", (epochs + index) // trainings) for index in range(trainings)
    )


def prune_round_(
    masker: Masker,
    masked: Sequence[StoredWeight],
    spread: Spread,
    round_: int,
    rounds: int,
    optimizers: WeightOptimizers,
    *,
    rewind_: Callable[[], None] = lambda: None,
) -> None:
    """Select the weights that survive this round, rewind, prune the others; freeze after the last.

    Optimizers restart without state, as every round is a new training.
    """
    active = largest_after_round(masker, masked, spread, round_, rounds)
    rewind_()
    activate_(masked, masker.weights, active)
    optimizers.restart_all_()
    if round_ == rounds:
        masker.freeze()


def largest_after_round(
    masker: Masker, masked: Sequence[StoredWeight], spread: Spread, round_: int, rounds: int
) -> list[Tensor]:
    """Return masks of the K_r largest active weights, r = ``round_``."""
    kept = round(masker.size * math.pow(masker.keep / masker.size, round_ / rounds))
    # As a fraction of the weights to prune, so that the masks of a round are subsets of those of
    # the round before, layer by layer.
    spare = (kept - masker.keep) / max(1, masker.size - masker.keep)
    values = active_magnitudes(masked, masker.weights)
    return select_by(masker, values, spread, spare=spare)
