"""Weights that are in the network as long as they exceed a threshold, which all of them may cross.

Unlike under a stored mask, a weight outside goes on being trained: it gets the gradient of the
effective weight, or a part of it, and comes back when it has grown. Here everything is a function
of the weights and of the progress, so that nothing has to be saved for a resume.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probmask.core import schedules
from probmask.core.selection import cut_by_magnitude
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Masker, Progress
from probmask.masking.sites import Site

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
Back = Callable[[Tensor, Tensor], Tensor]

_EXTREME = 0.95


def usual_outside(sparsity: float) -> float:
    """The part of the gradient that removed weights get: beyond 0.95 half of it, else all.

    Feather (BMVC 2023): among so few that stay, the many outside would come and go too easily.
    """
    return 0.5 if sparsity > _EXTREME else 1.0


class ThresholdedWeight(MaskedWeight):
    """One site: which weights exceed the threshold, and what becomes of them.

    There are two thresholds: that of the moment, for training, and that of the final budget, for
    evaluation. While nothing is removed (``whole``) the effective weight is the weight itself.
    """

    def __init__(self, site: Site, *, outside: float = 1.0) -> None:
        super().__init__(site)
        self.outside = outside
        self.active = torch.ones_like(site.weight, dtype=torch.bool, requires_grad=False)
        self.threshold = torch.zeros((), device=site.weight.device)
        self.settled_threshold = torch.zeros((), device=site.weight.device)
        self.whole = self.settled_whole = True

    @abstractmethod
    def effective(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        """The weight that the network computes with, of the dtype given; 0 if not active."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """The effective weight at the threshold of the moment; its gradient goes straight."""
        if self.whole:
            return weight
        return self._apply_rule(weight, self.active, self.threshold)

    def settled_weight(self, weight: Tensor) -> Tensor:
        """The effective weight at the threshold of the final budget."""
        if self.settled_whole:
            return weight
        return self._apply_rule(weight, self.hard, self.settled_threshold)

    def cut(self, active: Tensor, threshold: float, *, whole: bool) -> None:
        """Train with these weights until the next cut."""
        if active is not self.active:
            self.active.copy_(active)
        self.threshold.fill_(threshold)
        self.whole = whole

    def settle(self, threshold: float, *, whole: bool) -> None:
        """Evaluate at this threshold."""
        self.settled_threshold.fill_(threshold)
        self.settled_whole = whole

    def passed_back(self, grad: Tensor, active: Tensor) -> Tensor:
        """What the weight gets of the gradient of the effective weight."""
        if self.outside == 1:
            return grad
        return torch.where(active, grad, self.outside * grad)

    def _apply_rule(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        result: Tensor = _StraightThrough.apply(  # type: ignore[no-untyped-call]
            weight, active, threshold, self._in_full_precision, self.passed_back
        )
        return result

    def _in_full_precision(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        wide = weight if weight.dtype == torch.float64 else weight.float()
        return self.effective(wide, active, threshold).to(weight.dtype)


class _StraightThrough(torch.autograd.Function):
    """rule(w); the gradient goes to w as it is, except for what ``passed_back`` does."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, active: Tensor, threshold: Tensor, rule: Rule, passed_back: Back
    ) -> Tensor:
        ctx.save_for_backward(active)
        ctx.passed_back = passed_back
        return rule(weight, active, threshold)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (active,) = ctx.saved_tensors
        return ctx.passed_back(grad, active), None, None, None, None


class ThresholdMasker(Masker):
    """Keeps the largest weights of a budget that falls cubically; cuts anew before each forward.

    ``scales`` multiply the magnitudes of each site before they are compared. From ``freeze_at`` on
    the effective weights of the final budget are the weights, and only they train on.
    ``clip_norm`` bounds the joint gradient of all that is trained.
    """

    masks: tuple[ThresholdedWeight, ...]

    def __init__(
        self,
        sites: Sequence[Site],
        masks: Sequence[ThresholdedWeight],
        keep: int,
        *,
        ramp: tuple[float, float] = (0.0, 0.0),
        freeze_at: float | None = None,
        scales: Sequence[float] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        super().__init__(sites, masks)
        self.keep = keep
        self.size = sum(site.size for site in sites)
        self.ramp, self.freeze_at = ramp, freeze_at
        self.clip_norm = clip_norm if keep < self.size else None  # nothing removed: dense training
        self.scales = tuple(scales) if scales is not None else (1.0,) * len(masks)
        self._kept = self.size
        if keep == self.size:
            self.freeze()  # everything is kept: there is nothing to cut

    def before_forward(self, now: Progress, draw: int) -> None:
        """Cut at the budget of this moment; freeze when it is time.

        Not before the first update: ranks may not have the same weights yet, and a checkpoint may
        still be loaded.
        """
        if self.frozen:
            return
        if self.freeze_at is not None and now.step > 0 and now.fraction >= self.freeze_at:
            self.freeze()
        else:
            self.cut(now)

    def cut(self, now: Progress) -> None:
        """Train with the largest weights of the budget of this moment."""
        self._kept = self.budget(now)
        masks, thresholds = self.select(self._kept, into=[mask.active for mask in self.masks])
        for mask, active, threshold in zip(self.masks, masks, thresholds, strict=True):
            mask.cut(active, threshold, whole=self._kept == self.size)

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Clip the joint gradient."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(optimizers.parameters, self.clip_norm)

    def budget(self, now: Progress) -> int:
        """How many weights are kept at this moment."""
        begin, end = self.ramp
        final = self.keep / self.size
        share = schedules.kept_fraction(self.progress(now), final, begin=begin, end=end)
        return round(share * self.size)

    def progress(self, now: Progress) -> float:
        """The part of the training that is done, for schedules."""
        return now.fraction

    def select(
        self, keep: int, *, into: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[float]]:
        """The largest weights of all sites, and the threshold of each site that they exceed.

        The masks may be those of ``into``, written anew.
        """
        masks, threshold = cut_by_magnitude(self.weights, self.scales, keep, self.names, into=into)
        return masks, [threshold / scale for scale in self.scales]

    def choose(self) -> list[Tensor]:
        """The largest weights of the final budget; evaluation is at their threshold."""
        masks, thresholds = self.select(self.keep)
        for mask, threshold in zip(self.masks, thresholds, strict=True):
            mask.settle(threshold, whole=self.keep == self.size)
        return masks

    def metrics(self) -> dict[str, float]:
        """How sparse the network is at the moment."""
        kept = self.keep if self.frozen else self._kept
        return {"expected_sparsity": 1 - kept / self.size}
