"""Train, prune a little, train again, round after round: what iterative methods have in common.

After round r of R, K_r = n (K/n)^(r/R) of n weights are left: every round removes the same fraction
of what is left, and the last one ends at exactly K.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.allocation import Spread
from probmask.errors import InputError
from probmask.masking.budgets import whole_layers
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Method, Phase, Progress
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker


@dataclass(frozen=True, kw_only=True)
class IterativePruning(Method, ABC):
    """Train and prune by magnitude in rounds until the budget is met, then train once more.

    So many rounds are taken that each removes at most ``prune_per_round`` of the weights left.
    ``equal_epochs``: the epochs asked for are split over all trainings; if there are fewer than
    trainings, fewer rounds remove more each, but there is at least one. Otherwise each training
    has the epochs asked for. ``scope`` is one threshold for all layers or the same fraction of
    each. ``dense_first`` and ``dense_last`` leave a layer whole; its weights count as kept. None
    leaves the last one whole where it takes at most half of the budget.
    """

    prune_per_round: float = 0.2
    scope: Literal["global", "layer"] = "global"
    dense_first: bool = False
    dense_last: bool | None = None
    equal_epochs: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        caller = type(self).__name__
        check_within(
            caller,
            "prune_per_round",
            self.prune_per_round,
            0.001,
            0.999,
            meaning="the fraction of the weights left that a round removes",
        )
        check_choice(caller, "scope", self.scope, ("global", "layer"))
        check_choice(caller, "dense_last", self.dense_last, (None, True, False))
        for name in ("dense_first", "equal_epochs"):
            check_choice(caller, name, getattr(self, name), (True, False))

    def rounds(self, epochs: int) -> int:
        """How many times weights are removed in a training of so many epochs."""
        # Not one round more because a logarithm is rounded up: 0.2 of 1 leaves 0.8 after one.
        exact = math.log(1 - self.sparsity) / math.log(1 - self.prune_per_round)
        wanted = max(1, math.ceil(exact - 1e-9))
        if not self.equal_epochs:
            return wanted
        if epochs < 2:
            raise InputError(
                f"{type(self).__name__}: trains, prunes and trains again, which takes 2 epochs, "
                f"not {epochs}; ask for more (in a loop of your own, leave steps_per_epoch= "
                "out) or set equal_epochs=False."
            )
        return min(wanted, epochs - 1)

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """One training more than rounds, the longer ones last; just one at sparsity 0."""
        if self.sparsity == 0:
            return super().phases(epochs)
        trainings = self.rounds(epochs) + 1
        total = epochs if self.equal_epochs else epochs * trainings
        return tuple(
            Phase(f"training {index + 1}", (total + index) // trainings)
            for index in range(trainings)
        )


class IterativeMasker(StoredMasker, ABC):
    """Iterative pruning at work: at the end of each training the smallest weights go."""

    def __init__(self, method: IterativePruning, sites: Sequence[Site], context: Context) -> None:
        whole = whole_layers(method, sites, first=method.dense_first, last=method.dense_last)
        self.spread = Spread.over(
            method.scope, dense_first=method.dense_first, dense_last=len(sites) - 1 in whole
        )
        super().__init__(method, sites, spread=self.spread)
        self.rounds = len(context.phase_ends) - 1
        if method.sparsity == 0:
            self.freeze()  # nothing to remove: dense training

    @abstractmethod
    def rewind_(self) -> None:
        """Set what a new training begins with; removed weights are set to zero afterwards."""

    def kept_after(self, done: int) -> int:
        """How many weights are left after so many rounds."""
        return round(self.size * math.pow(self.keep / self.size, done / self.rounds))

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Remove the smallest weights and begin anew; the last time, for good."""
        active = self._largest(self.kept_after(phase))
        self.rewind_()
        self.activate(active)
        optimizers.restart_all_()
        if phase == self.rounds:
            self.freeze()

    def choose(self) -> list[Tensor]:
        """What is left, or the largest of it as long as that is more than the budget."""
        if self.active_count == self.keep:
            return [active.clone() for active in self.active]
        return self._largest(self.keep)

    def _largest(self, keep: int) -> list[Tensor]:
        values = [
            torch.where(mask.active, weight.detach().abs().float(), -1.0)
            for mask, weight in zip(self.masks, self.weights, strict=True)
        ]
        # Said as a part of what is to go, the masks of a round lie within those of the last one,
        # layer by layer.
        spare = (keep - self.keep) / max(1, self.size - self.keep)
        return self.spread.select(values, self.keep, self.names, spare=spare)
