"""Movement pruning: weights that move away from zero stay."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_ramp, check_within
from probmask.core import schedules
from probmask.masking.budgets import checked_keep
from probmask.masking.protocol import Context, Method, Progress, Trainables
from probmask.masking.scored import ScoredMasker
from probmask.masking.sites import Site

_WARM_UP = 0.1  # of the rate of the scores: 5,400 of about 55,000 updates
_LEAST = 0.005  # of the weights: what the soft rule leaves in any case


@dataclass(frozen=True, kw_only=True)
class Movement(Method):
    """Keep the weights with the highest scores; a score sums up how a weight would have moved.

    w_e = w m, m = 1 for the highest scores s of each layer; dL/dw = g m and dL/ds = g w, g the
    gradient of w_e: s falls where a step would shrink |w|, and rises where it would grow. Scores
    begin at 0. Adam trains them at the rate ``score_lr``, after a linear warm-up over a tenth of
    the training falling linearly to zero. The budget falls cubically from ``ramp_begin`` to
    ``ramp_end``, and masks follow the scores at every update. ``scope="global"`` compares the
    scores of all layers.

    ``soft`` is the paper's soft variant: until ``ramp_end`` m = 1[σ(s) > τ_t], and the loss has the
    term λ_t mean σ(s); τ_t rises cubically to ``threshold`` and λ_t with it to ``strength``. It has
    no budget: from ``ramp_end`` on the highest scores of all layers are taken, as many as asked.
    """

    name: ClassVar[str] = "movement"
    summary: ClassVar[str] = "keeps weights that move away from zero: for fine-tuning"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "V. Sanh, T. Wolf and A. Rush, Movement Pruning: Adaptive Sparsity by Fine-Tuning, "
        "NeurIPS 2020"
    )

    scope: Literal["global", "layer"] = "layer"
    score_lr: float = 1e-2
    ramp_begin: float = 0.1
    ramp_end: float = 0.8
    soft: bool = False
    threshold: float = 0.1
    strength: float = 400.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("Movement", "scope", self.scope, ("global", "layer"))
        check_choice("Movement", "soft", self.soft, (True, False))
        check_within("Movement", "score_lr", self.score_lr, 1e-9, 1e9, meaning="a rate")
        check_within("Movement", "threshold", self.threshold, 0, 1, meaning="a sigmoid's value")
        check_within("Movement", "strength", self.strength, 0, 1e9, meaning="a factor")
        check_ramp(
            "Movement",
            ramp_begin=self.ramp_begin,
            ramp_end=self.ramp_end,
            meaning="the budget falls",
        )

    def begin(self, sites: Sequence[Site], context: Context) -> "MovementMasker":
        """Start dense, all scores 0."""
        return MovementMasker(self, sites)


class MovementMasker(ScoredMasker):
    """Movement pruning at work on one model."""

    def __init__(self, method: Movement, sites: Sequence[Site]) -> None:
        scope = "global" if method.soft else method.scope
        super().__init__(sites, checked_keep(method, sites), scope=scope)
        self.method = method
        self.ramped = 0.0  # how far threshold and strength of the soft variant have risen

    def trainables(self) -> list[Trainables]:
        """Adam on the scores."""
        optimizer = torch.optim.Adam(self.scores, lr=self.method.score_lr)

        def learning_rate(now: Progress, _: float) -> float:
            rise = schedules.warm_up((now.step + 1) / now.total_steps, until=_WARM_UP)
            fall = (1 - now.fraction) / (1 - _WARM_UP)
            return self.method.score_lr * min(rise, fall)

        return [Trainables(optimizer, learning_rate)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Take the highest scores within the budget, or those above the soft threshold."""
        self.ramped = 1 - self._share(now, 0.0)
        if self.frozen or not self.method.soft or self.ramped == 1:
            super().before_forward(now, draw)
        else:
            self.activate(self._above(self.ramped * self.method.threshold))

    def penalty(self) -> Tensor | float:
        """λ_t mean σ(s), of the soft variant."""
        if self.frozen or not self.method.soft or self.ramped == 0:
            return 0.0
        total = torch.stack([torch.sigmoid(score).sum() for score in self.scores]).sum()
        return self.ramped * self.method.strength * total / self.size

    def budget(self, now: Progress) -> int:
        """How many weights are kept at this moment."""
        return round(self._share(now, self.keep / self.size) * self.size)

    def _share(self, now: Progress, final: float) -> float:
        begin, end = self.method.ramp_begin, self.method.ramp_end
        return schedules.kept_fraction(now.fraction, final, begin=begin, end=end)

    def _above(self, threshold: float) -> list[Tensor]:
        above = [torch.sigmoid(score) > threshold for score in self.scores]
        least = math.ceil(_LEAST * self.size)
        return above if sum(int(mask.sum()) for mask in above) >= least else self.highest(least)
