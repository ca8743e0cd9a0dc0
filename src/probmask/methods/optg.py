"""OptG: scores learn the gradient-driven importance of weights, pruned around mid-training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Range, Updates
from probmask.core.allocation import Spread
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.sites import Site
from probmask.methods.families.scores import (
    ScoredWeight,
    highest_scores,
    score_metrics,
    set_active_scores,
)
from probmask.methods.families.stored import count_active

_PAPER_EPOCHS = 100  # of a training; the paper updates masks once per epoch


@dataclass(frozen=True, kw_only=True)
class OptG(Method):
    """Keep the weights with the highest scores, which are trained by the gradients of the mask.

        w_e = w m,  m = 1 for the highest scores s of all layers
        dL/dw = g m,  dL/ds = g w,  g the gradient of w_e
        sparsity_t = sparsity · σ(steepness (t - ½)),  t the fraction of the training done

    Scores start at 0 and are trained by SGD with momentum, at the rate of the weights times the
    same σ. Pruning therefore happens around mid-training.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: ``"global"`` compares the scores of all layers, ``"layer"`` keeps the same fraction
            of each layer.
        steepness: The slope of the schedule.
        momentum: The momentum of SGD on the scores.
        update_every: Updates between changes of the masks. None: a hundredth of the training, the
            paper's epoch.
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
    steepness: Annotated[float, Range(1, 1e6, "a slope")] = 100.0
    momentum: Annotated[float, Range(0, 1, "the momentum of SGD")] = 0.9
    update_every: Updates | None = None

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "OptGMasker":
        """Start dense, with all scores at 0."""
        every = self.update_every or max(1, context.total_steps // _PAPER_EPOCHS)
        return OptGMasker(self, sites, every)

    def ramp(self, now: Progress) -> float:
        """σ(steepness (t - ½)): the factor on the sparsity and on the rate of the scores."""
        return 1 / (1 + math.exp(min(700.0, self.steepness * (0.5 - now.fraction))))


class OptGMasker(Masker):
    """Masker of OptG."""

    masked: tuple[ScoredWeight, ...]

    def __init__(self, method: OptG, sites: Sequence[Site], every: int) -> None:
        super().__init__(sites, [ScoredWeight(site) for site in sites], method.keep_of(sites))
        self.method, self.every = method, every
        self.spread = Spread.over(method.scope)

    def trainables(self) -> list[Trainables]:
        """Train the scores by SGD, without weight decay."""
        scores = [masked.score for masked in self.masked]
        optimizer = torch.optim.SGD(scores, lr=0.0, momentum=self.method.momentum)
        return [Trainables(optimizer, lambda now, rate: rate * self.method.ramp(now))]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Recompute the masks after every interval, but not at the end of the training."""
        if not self.frozen and now.step % self.every == 0 and now.step < now.total_steps:
            keep = self.size - round((self.size - self.keep) * self.method.ramp(now))
            set_active_scores(self.masked, highest_scores(self, self.masked, keep, self.spread))

    def choose(self) -> list[Tensor]:
        """Return the active weights if their number is the budget, else the highest scores."""
        if count_active(self, self.masked) == self.keep:
            return [masked.active.clone() for masked in self.masked]
        return highest_scores(self, self.masked, self.keep, self.spread)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity."""
        return score_metrics(self, self.masked)
