"""Train, prune once, fine-tune: what methods of that form have in common."""

import math
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.allocation import Spread
from probmask.errors import InputError
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Method, Phase
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker


@dataclass(frozen=True, kw_only=True)
class PruneOnce(Method, ABC):
    """Train all weights, remove some at once, train the others on at a small rate.

    Of all epochs the part ``fine_tune`` comes after the pruning, at ``fine_tune_rate`` times the
    learning rate, which stays (``"constant"``) or falls to zero (``"cosine"``). ``equal_epochs``:
    the epochs asked for are those of both phases together; otherwise those of the first, and the
    second comes on top. ``dense_first`` and ``dense_last`` leave a layer whole; its weights count
    as kept.
    """

    dense_first: bool = False
    dense_last: bool = False
    fine_tune: float = 0.2
    fine_tune_rate: float = 0.01
    fine_tune_schedule: Literal["constant", "cosine"] = "constant"
    equal_epochs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        caller = type(self).__name__
        for name in ("dense_first", "dense_last", "equal_epochs"):
            check_choice(caller, name, getattr(self, name), (True, False))
        check_within(
            caller, "fine_tune", self.fine_tune, 0, 0.99, meaning="a part of all the epochs"
        )
        check_within(caller, "fine_tune_rate", self.fine_tune_rate, 0, math.inf, meaning="a factor")
        check_choice(caller, "fine_tune_schedule", self.fine_tune_schedule, ("constant", "cosine"))

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Train and fine-tune, at least an epoch each; one dense training at sparsity 0."""
        if self.sparsity == 0:
            return super().phases(epochs)
        if not self.equal_epochs:
            tuning = max(1, round(epochs * self.fine_tune / (1 - self.fine_tune)))
            return self._phases(epochs, tuning)
        if epochs < 2:
            raise InputError(
                f"{type(self).__name__}: trains, prunes and fine-tunes, which takes 2 epochs, not "
                f"{epochs}; ask for more (in a loop of your own, leave steps_per_epoch= out) or "
                "set equal_epochs=False."
            )
        tuning = min(epochs - 1, max(1, round(epochs * self.fine_tune)))
        return self._phases(epochs - tuning, tuning)

    def _phases(self, training: int, tuning: int) -> tuple[Phase, ...]:
        return (
            Phase("train", training),
            Phase("fine-tune", tuning, self.fine_tune_schedule, self.fine_tune_rate),
        )


class PruneOnceMasker(StoredMasker, ABC):
    """Pruning once at work: all weights are active, then exactly the budget."""

    def __init__(self, method: PruneOnce, sites: Sequence[Site], *, by_layer: bool) -> None:
        self.spread = Spread.over(
            "layer" if by_layer else "global",
            dense_first=method.dense_first,
            dense_last=method.dense_last,
        )
        super().__init__(method, sites, spread=self.spread)
        if method.sparsity == 0:
            self.freeze()  # nothing to remove: dense training

    def magnitudes(self) -> list[Tensor]:
        """By what weights are ranked while nothing else is known: |w|."""
        return [weight.detach().abs().float() for weight in self.weights]

    def choose(self) -> list[Tensor]:
        """What was kept, or the largest weights as long as nothing is removed."""
        if self.active_count == self.keep:
            return [active.clone() for active in self.active]
        return self.spread.select(self.magnitudes(), self.keep, self.names)

    def prune_(self, active: Sequence[Tensor], optimizers: WeightOptimizers) -> None:
        """Remove all other weights for good, and forget past gradients."""
        self.activate(active)
        self.freeze()
        optimizers.restart_all_()
