"""Lottery tickets: iterative magnitude pruning that rewinds the network to an early update.

Frankle and Carbin, "The Lottery Ticket Hypothesis", ICLR 2019; Frankle, Dziugaite, Roy and Carbin,
"Linear Mode Connectivity and the Lottery Ticket Hypothesis", ICML 2020, for rewinding to an early
update instead of the initialization.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Range
from probmask.core.allocation import Spread
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method, Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.rounds import RoundFraction, prune_round_, round_phases
from probmask.methods.families.stored import (
    StoredWeight,
    active_sparsity,
    largest_active,
    zero_inactive_,
)


@dataclass(frozen=True, kw_only=True)
class Lottery(Method):
    """Train, prune the smallest weights, rewind the others to update j, train again; repeat.

        m_r = 1[|w| > t_r] m_(r-1),  Σ m_r = K_r = n (K/n)^(r/R),  w_(r+1, 0) = m_r w_(1, j)

    After round r of R, K_r of n weights remain. The whole network is rewound: weights, biases,
    normalization and its statistics. Each training follows the whole learning-rate schedule.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        prune_per_round: The largest fraction of the remaining weights that a round prunes.
        scope: One threshold for all layers, or the same kept fraction in each.
        dense_first: Leave the first layer dense; its weights count as kept.
        dense_last: Leave the last layer dense. None: if it holds at most half of the budget.
        equal_epochs: Divide the configured epochs among all trainings. If there are fewer epochs
            than trainings, there are fewer rounds, which prune more each. False: each training has
            the configured epochs.
        rewind_to: j as a fraction of the updates of the first training; 0 is the initial network.
    """

    name: ClassVar[str] = "lottery"
    summary: ClassVar[str] = "prunes in rounds, rewinding the weights to an early update"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "J. Frankle, M. Carbin, The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural "
        "Networks, ICLR 2019"
    )

    prune_per_round: RoundFraction = 0.2
    scope: Literal["global", "layer"] = "global"
    dense_first: bool = False
    dense_last: bool | None = None
    equal_epochs: bool = True
    rewind_to: Annotated[float, Range(0, 0.99, "a fraction of the first training")] = 0.03

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return one training more than rounds; at sparsity 0, one dense training."""
        if self.sparsity == 0:
            return super().phases(epochs)
        return round_phases(
            "Lottery",
            self.sparsity,
            epochs,
            prune_per_round=self.prune_per_round,
            equal_epochs=self.equal_epochs,
        )

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "it rewinds to a copy of the whole network"

    def begin(self, sites: Sequence[Site], context: Context) -> "LotteryMasker":
        """Start dense."""
        return LotteryMasker(self, sites, context)


class LotteryMasker(Masker):
    """Masker of the search for lottery tickets."""

    saved = ("early",)
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: Lottery, sites: Sequence[Site], context: Context) -> None:
        self.spread = Spread.fitting(
            method.scope,
            [site.size for site in sites],
            method.keep_of(sites),
            dense_first=method.dense_first,
            dense_last=method.dense_last,
        )
        keep = method.keep_of(sites, self.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.model = context.model
        self.rounds = len(context.phase_ends) - 1
        first = context.phase_ends[0]
        self.rewind_step = min(round(method.rewind_to * first), max(0, first - 1))
        self.early: dict[str, Tensor] = {}

    def before_forward(self, now: Progress, draw: int) -> None:
        """Store the network at the update to which it will be rewound."""
        if now.step == self.rewind_step and not self.frozen:
            named = chain(self.model.named_parameters(), self.model.named_buffers())
            self.early = {name: tensor.detach().clone() for name, tensor in named}

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Store parameters that were set between `attach` and the first update."""
        # DDP copies the first rank's parameters; a checkpoint may have been loaded.
        if now.step == self.rewind_step == 0 and not self.frozen:
            for name, parameter in self.model.named_parameters():
                self.early[name] = parameter.detach().clone()

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep pruned weights at zero."""
        zero_inactive_(self.masked, self.weights)

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Prune the smallest weights and rewind the network; the last masks are final."""
        rounds, rewind_ = self.rounds, self._rewind_
        prune_round_(self, self.masked, self.spread, phase, rounds, optimizers, rewind_=rewind_)

    def choose(self) -> list[Tensor]:
        """Return the remaining weights, or the largest of them if they exceed the budget."""
        return largest_active(self, self.masked, self.spread)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    @torch.no_grad()
    def _rewind_(self) -> None:
        for name, tensor in chain(self.model.named_parameters(), self.model.named_buffers()):
            if name in self.early:
                tensor.copy_(self.early[name])
