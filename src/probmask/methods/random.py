"""Random pruning: the mask is drawn before training. What every method has to beat."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from probmask.checks import check_choice
from probmask.core.allocation import Spread
from probmask.core.noise import uniform_
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Keep weights at random, chosen before training.

    Each layer keeps k weights, any k of them with equal probability: the same fraction of each
    (``allocation="uniform"``), by Erdős-Rényi (``"er"``) or with its kernel's size (``"erk"``);
    ``"global"`` draws from all layers together, so that k is random too. ``dense_first`` and
    ``dense_last`` leave those layers whole, at the cost of the others.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "keeps weights at random: the floor"
    group: ClassVar[str] = "floors"
    year: ClassVar[int | None] = 2022
    reference: ClassVar[str] = (
        "S. Liu et al., The Unreasonable Effectiveness of Random Pruning: Return of the Most Naive "
        "Baseline for Sparse Training, ICLR 2022"
    )

    allocation: Literal["uniform", "er", "erk", "global"] = "uniform"
    dense_first: bool = False
    dense_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("Random", "allocation", self.allocation, ("uniform", "er", "erk", "global"))
        for name in ("dense_first", "dense_last"):
            check_choice("Random", name, getattr(self, name), (True, False))

    def begin(self, sites: Sequence[Site], context: Context) -> StoredMasker:
        """Choose once, for good: a function of the seed alone."""
        spread = Spread(
            allocation=self.allocation, dense_first=self.dense_first, dense_last=self.dense_last
        )
        masker = StoredMasker(self, sites, spread=spread)
        order = [
            # On the CPU, as other devices have other generators; fp64, as fp32 has many ties.
            uniform_(torch.empty(site.shape, dtype=torch.float64), context.seed, index)
            for index, site in enumerate(sites)
        ]
        masker.activate(spread.select(order, masker.keep, masker.names))
        masker.freeze()
        return masker
