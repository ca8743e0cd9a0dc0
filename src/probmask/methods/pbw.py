"""Pruning by weight: train, remove the smallest weights under one threshold, fine-tune.

Han, Pool, Tran and Dally, "Learning both Weights and Connections for Efficient Neural Networks",
NeurIPS 2015; in one step and with one threshold for all layers, as ProbMask's paper compares it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Progress
from probmask.masking.sites import Site
from probmask.methods.fine_tuning import PruneOnce, PruneOnceMasker

# Divides by the deviation of a layer whose weights are all the same.
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class PBW(PruneOnce):
    """Train, keep the K largest weights, fine-tune.

        m = 1[|w| > t],  Σ m = K

    ``scope="global"``: one threshold t for all layers. ``"std"``: Han's t_l = q std(w_l) in layer
    l, with the one quality q that meets the budget; the same as ranking |w| / std(w_l).
    ``"layer"``: the same fraction of each layer.
    """

    name: ClassVar[str] = "pbw"
    summary: ClassVar[str] = "trains, removes the smallest weights at once, fine-tunes"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int] = 2015
    reference: ClassVar[str] = (
        "S. Han, J. Pool, J. Tran, W. J. Dally, Learning both Weights and Connections for "
        "Efficient Neural Networks, NeurIPS 2015"
    )

    scope: Literal["global", "std", "layer"] = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("PBW", "scope", self.scope, ("global", "std", "layer"))

    def begin(self, sites: Sequence[Site], context: Context) -> "PBWMasker":
        """Train densely at first."""
        return PBWMasker(self, sites)


class PBWMasker(PruneOnceMasker):
    """Pruning by weight at work."""

    def __init__(self, method: PBW, sites: Sequence[Site]) -> None:
        self._in_deviations = method.scope == "std"
        super().__init__(method, sites, by_layer=method.scope == "layer")

    def magnitudes(self) -> list[Tensor]:
        """|w|, or |w| / std(w) of its layer."""
        sizes = super().magnitudes()
        if not self._in_deviations:
            return sizes
        deviations = [
            torch.std(weight.detach().float(), correction=0).clamp_min(_TINY)
            for weight in self.weights
        ]
        return [size / deviation for size, deviation in zip(sizes, deviations, strict=True)]

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Remove the smallest weights."""
        self.prune_(self.choose(), optimizers)
