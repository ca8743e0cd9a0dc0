"""Movement pruning: weights that move away from zero are kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Range, TrainingFraction
from probmask.core import schedules
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

_WARM_UP = 0.1  # fraction of the training: 5,400 of about 55,000 updates in the paper
_LEAST = 0.005  # fraction of the weights that the soft variant always keeps


@dataclass(frozen=True, kw_only=True)
class Movement(Method):
    """Keep the weights with the highest scores; a score sums a weight's moves away from zero.

        w_e = w m,  m = 1 for the highest scores s of each layer
        dL/dw = g m,  dL/ds = g w,  g the gradient of w_e

    s falls where a step would shrink |w| and rises where it would increase it. Scores start at 0
    and are trained by Adam, whose rate warms up over a tenth of the training and then falls
    linearly to zero. Masks are recomputed from the scores at every update.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: ``"layer"`` keeps the same fraction of each layer, ``"global"`` compares the scores
            of all layers.
        score_lr: Adam's rate for the scores.
        ramp_begin: Fraction of the training at which the budget begins to fall, cubically.
        ramp_end: Fraction of the training at which it reaches ``sparsity``.
        soft: Use the paper's soft variant. Until ``ramp_end``, m = 1[σ(s) > τ_t] and the loss has
            the term λ_t mean σ(s). This variant has no budget: from ``ramp_end`` on, exactly the
            requested number of highest scores of all layers is kept.
        threshold: The final τ of the soft variant; τ_t rises cubically to it.
        strength: The final λ of the soft variant; λ_t rises in proportion to τ_t.
    """

    name: ClassVar[str] = "movement"
    summary: ClassVar[str] = "keeps weights that move away from zero: for fine-tuning"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "V. Sanh, T. Wolf and A. Rush, Movement Pruning: Adaptive Sparsity by Fine-Tuning, "
        "NeurIPS 2020"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    scope: Literal["global", "layer"] = "layer"
    score_lr: Annotated[float, Range(1e-9, 1e9, "a learning rate")] = 1e-2
    ramp_begin: TrainingFraction = 0.1
    ramp_end: TrainingFraction = 0.8
    soft: bool = False
    threshold: Annotated[float, Range(0, 1, "a value of a sigmoid")] = 0.1
    strength: Annotated[float, Range(0, 1e9, "the weight of the penalty")] = 400.0

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "MovementMasker":
        """Start dense, with all scores at 0."""
        return MovementMasker(self, sites)


class MovementMasker(Masker):
    """Masker of movement pruning."""

    masked: tuple[ScoredWeight, ...]

    def __init__(self, method: Movement, sites: Sequence[Site]) -> None:
        super().__init__(sites, [ScoredWeight(site) for site in sites], method.keep_of(sites))
        self.method = method
        self.spread = Spread.over("global" if method.soft else method.scope)
        self.ramped = 0.0  # the fraction of threshold and strength that the soft variant has

    def trainables(self) -> list[Trainables]:
        """Train the scores by Adam."""
        scores = [masked.score for masked in self.masked]
        optimizer = torch.optim.Adam(scores, lr=self.method.score_lr)

        def learning_rate(now: Progress, _: float) -> float:
            rise = schedules.warm_up(now.next_fraction, until=_WARM_UP)
            fall = (1 - now.fraction) / (1 - _WARM_UP)
            return self.method.score_lr * min(rise, fall)

        return [Trainables(optimizer, learning_rate)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Activate the highest scores within the budget, or those above the soft threshold."""
        self.ramped = 1 - self._ramp(now, 0.0)
        if self.frozen:
            return
        if self.method.soft and self.ramped < 1:
            active = self._above(self.ramped * self.method.threshold)
        else:
            keep = round(self._ramp(now, self.keep / self.size) * self.size)
            active = highest_scores(self, self.masked, keep, self.spread)
        set_active_scores(self.masked, active)

    def penalty(self) -> Tensor | float:
        """λ_t mean σ(s), for the soft variant."""
        if self.frozen or not self.method.soft or self.ramped == 0:
            return 0.0
        total = torch.stack([torch.sigmoid(masked.score).sum() for masked in self.masked]).sum()
        return self.ramped * self.method.strength * total / self.size

    def choose(self) -> list[Tensor]:
        """Return masks of the highest scores of the final budget."""
        return highest_scores(self, self.masked, self.keep, self.spread)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity."""
        return score_metrics(self, self.masked)

    def _ramp(self, now: Progress, final: float) -> float:
        begin, end = self.method.ramp_begin, self.method.ramp_end
        return schedules.kept_fraction(now.fraction, final, begin=begin, end=end)

    def _above(self, threshold: float) -> list[Tensor]:
        above = [torch.sigmoid(masked.score) > threshold for masked in self.masked]
        least = math.ceil(_LEAST * self.size)
        if sum(self.shards.counts(above)) >= least:
            return above
        return highest_scores(self, self.masked, least, self.spread)
