"""OptG: scores learn the gradient-driven importance of weights, pruned around mid-training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_count, check_within
from probmask.masking.budgets import checked_keep
from probmask.masking.protocol import Context, Method, Progress, Trainables
from probmask.masking.scored import ScoredMasker
from probmask.masking.sites import Site

_PAPER_EPOCHS = 100  # the schedule counts in epochs: this many were a training


@dataclass(frozen=True, kw_only=True)
class OptG(Method):
    """Keep the weights with the highest scores; scores learn what weights would, were they free.

    w_e = w m, m = 1 for the highest scores s of all layers; dL/dw = g m and dL/ds = g w, g the
    gradient of w_e. Scores begin at 0 and are trained by SGD with momentum, at the rate of the
    weights times σ(``steepness`` (t - ½)), t the part of the training that is done; S_t = S times
    the same factor, so that pruning happens around mid-training. Masks are chosen anew every
    ``update_every`` updates (None: a hundredth of the training, what an epoch is in the paper).
    ``scope="layer"`` keeps the same fraction of each layer instead.
    """

    name: ClassVar[str] = "optg"
    summary: ClassVar[str] = "gradient-trained scores, pruned around mid-training"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2022
    reference: ClassVar[str] = (
        "Y. Zhang, M. Lin, M. Chen, F. Chao and R. Ji, OptG: Optimizing Gradient-driven Criteria "
        "in Network Sparsity, arXiv:2201.12826, 2022"
    )

    scope: Literal["global", "layer"] = "global"
    steepness: float = 100.0
    momentum: float = 0.9
    update_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("OptG", "scope", self.scope, ("global", "layer"))
        check_within("OptG", "steepness", self.steepness, 1, 1e6, meaning="a slope")
        check_within("OptG", "momentum", self.momentum, 0, 1, meaning="a momentum")
        if self.update_every is not None:
            check_count("OptG", "update_every", self.update_every, least=1, meaning="updates")

    def begin(self, sites: Sequence[Site], context: Context) -> "OptGMasker":
        """Start dense, all scores 0."""
        every = self.update_every or max(1, context.total_steps // _PAPER_EPOCHS)
        return OptGMasker(self, sites, every)

    def ramp(self, now: Progress) -> float:
        """σ(steepness (t - ½)): the part of the sparsity, and of the weights' learning rate."""
        return 1 / (1 + math.exp(min(700.0, self.steepness * (0.5 - now.fraction))))


class OptGMasker(ScoredMasker):
    """OptG at work on one model."""

    def __init__(self, method: OptG, sites: Sequence[Site], every: int) -> None:
        super().__init__(sites, checked_keep(method, sites), scope=method.scope)
        self.method, self.every = method, every

    def trainables(self) -> list[Trainables]:
        """SGD on the scores, without weight decay."""
        optimizer = torch.optim.SGD(self.scores, lr=0.0, momentum=self.method.momentum)

        def learning_rate(now: Progress, rate: float) -> float:
            return rate * self.method.ramp(now)

        return [Trainables(optimizer, learning_rate)]

    def budget(self, now: Progress) -> int:
        """How many weights are kept at this moment."""
        return self.size - round((self.size - self.keep) * self.method.ramp(now))

    def before_forward(self, now: Progress, draw: int) -> None:
        """Choose anew from time to time, but not at the very end: the last masks stay."""
        if now.step % self.every == 0 and now.step < now.total_steps:
            super().before_forward(now, draw)

    def choose(self) -> list[Tensor]:
        """The active weights if they are the budget, else the highest scores."""
        if self.active_count == self.keep:
            return [mask.active.clone() for mask in self.masks]
        return super().choose()
