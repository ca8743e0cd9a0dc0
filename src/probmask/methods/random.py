"""Random pruning: the masks are drawn before training. Every method should beat it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from probmask.core.allocation import Spread
from probmask.core.noise import uniform_
from probmask.masking.method import Context, Method
from probmask.masking.sites import Site
from probmask.methods.families.stored import (
    StoredMasker,
    select_by,
)


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Keep weights at random, chosen before training.

    Layer l keeps k_l of its weights; all sets of k_l weights have equal probability.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        allocation: The numbers k_l: the same fraction of each layer, Erdős-Rényi (-kernel), or
            ``"global"``, which draws from all layers together, so that k_l is random.
        dense_first: Leave the first layer dense; the other layers keep fewer weights.
        dense_last: Leave the last layer dense.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "keeps weights at random"
    group: ClassVar[str] = "baselines"
    year: ClassVar[int | None] = 2022
    reference: ClassVar[str] = (
        "S. Liu et al., The Unreasonable Effectiveness of Random Pruning: Return of the Most Naive "
        "Baseline for Sparse Training, ICLR 2022"
    )

    allocation: Literal["uniform", "er", "erk", "global"] = "uniform"
    dense_first: bool = False
    dense_last: bool = False

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> StoredMasker:
        """Draw the final masks, which are a function of the seed alone."""
        spread = Spread(
            allocation=self.allocation, dense_first=self.dense_first, dense_last=self.dense_last
        )
        masker = StoredMasker(self, sites, spread=spread)
        order = [
            # On the CPU: other devices have other generators. In fp64: fp32 has many ties.
            uniform_(torch.empty(site.shape, dtype=torch.float64), context.seed, index)
            for index, site in enumerate(sites)
        ]
        masker.activate(select_by(masker, [masker.shards.part(each) for each in order], spread))
        masker.freeze()
        return masker
