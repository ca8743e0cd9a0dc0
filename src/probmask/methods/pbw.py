"""Pruning by weight: train, prune the smallest weights under one threshold, fine-tune.

Han, Pool, Tran and Dally, "Learning both Weights and Connections for Efficient Neural Networks",
NeurIPS 2015; in one step and with one threshold for all layers, as in ProbMask's paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.core.allocation import Spread
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method, Phase
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.fine_tuning import (
    EpochFraction,
    RateFactor,
    prune_and_freeze_,
    tuning_phases,
)
from probmask.methods.families.stored import (
    StoredWeight,
    active_magnitudes,
    active_masks,
    active_sparsity,
    count_active,
    select_by,
    zero_inactive_,
)

_TINY = 1e-30  # least standard deviation, for layers whose weights are all equal


@dataclass(frozen=True, kw_only=True)
class PBW(Method):
    """Train, keep the K largest weights, fine-tune.

        m = 1[|w| > t],  Σ m = K

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: ``"global"`` uses one threshold t for all layers. ``"std"`` is Han's t_l = q std(w_l)
            in layer l, with the q that meets the budget; this is the order of |w| / std(w_l).
            ``"layer"`` keeps the same fraction of each layer.
        dense_first: Leave the first layer dense; its weights count as kept.
        dense_last: Leave the last layer dense.
        fine_tune: Fraction of all epochs that comes after the pruning.
        fine_tune_rate: Factor on the learning rate while fine-tuning.
        fine_tune_schedule: Whether that rate stays constant or falls to zero along a cosine.
        equal_epochs: The configured epochs are those of both phases together. False: they are
            those of the first phase, and fine-tuning comes in addition.
    """

    name: ClassVar[str] = "pbw"
    summary: ClassVar[str] = "trains, prunes the smallest weights at once, fine-tunes"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2015
    reference: ClassVar[str] = (
        "S. Han, J. Pool, J. Tran, W. J. Dally, Learning both Weights and Connections for "
        "Efficient Neural Networks, NeurIPS 2015"
    )

    scope: Literal["global", "std", "layer"] = "global"
    dense_first: bool = False
    dense_last: bool = False
    fine_tune: EpochFraction = 0.2
    fine_tune_rate: RateFactor = 0.01
    fine_tune_schedule: Literal["constant", "cosine"] = "constant"
    equal_epochs: bool = True

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return the training and the fine-tuning, or one dense training at sparsity 0."""
        if self.sparsity == 0:
            return super().phases(epochs)
        return tuning_phases(
            "PBW",
            epochs,
            fine_tune=self.fine_tune,
            rate=self.fine_tune_rate,
            schedule=self.fine_tune_schedule,
            equal_epochs=self.equal_epochs,
        )

    def refuses_shards(self) -> str:
        """Return an empty text, unless the deviation of whole layers is needed."""
        return "scope='std' needs the deviation of whole layers" if self.scope == "std" else ""

    def begin(self, sites: Sequence[Site], context: Context) -> "PBWMasker":
        """Start dense."""
        return PBWMasker(self, sites)


class PBWMasker(Masker):
    """Masker of pruning by weight."""

    masked: tuple[StoredWeight, ...]

    def __init__(self, method: PBW, sites: Sequence[Site]) -> None:
        self.spread = Spread.over(
            "layer" if method.scope == "layer" else "global",
            dense_first=method.dense_first,
            dense_last=method.dense_last,
        )
        keep = method.keep_of(sites, self.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self._in_deviations = method.scope == "std"

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep pruned weights at zero."""
        zero_inactive_(self.masked, self.weights)

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Prune the smallest weights before the fine-tuning."""
        prune_and_freeze_(self, self.masked, self.choose(), optimizers)

    def choose(self) -> list[Tensor]:
        """Return the kept weights; before the pruning, the largest weights."""
        if count_active(self, self.masked) == self.keep:
            return [active.clone() for active in active_masks(self.masked)]
        return select_by(self, self._sizes(), self.spread)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _sizes(self) -> list[Tensor]:
        """|w|, or |w| / std(w) of the layer."""
        sizes = active_magnitudes(self.masked, self.weights)
        if not self._in_deviations:
            return sizes
        return [
            size / torch.std(weight.detach().float(), correction=0).clamp_min(_TINY)
            for size, weight in zip(sizes, self.weights, strict=True)
        ]
