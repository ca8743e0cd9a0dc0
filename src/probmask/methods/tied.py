"""ProbMask with probabilities tied to the weights: nothing beside these is trained.

The probability that a weight is kept is a function of its magnitude, of a threshold for all layers,
set anew at every update so that the budget of the moment is kept, and of a temperature:
s = (1 - (θ / |w|)^(1/τ))^τ above the threshold, else 0. The loss moves the weights, also those that
are removed, and thereby the probabilities. Late in the training the choice becomes final, and the
threshold is taken back to zero: the probabilities of the chosen weights go to 1. A thousand
updates are enough for that: a magnitude carries all that the training has learned of a weight, a
probability of its own only what came through a noisy mask.

Three things make it work in a short training. The network computes with w s, which is continuous at
the threshold, and the gradient goes straight to w. The gradient of removed weights is bounded by
that of the kept ones: in a channel without weights, BatchNorm divides by a deviation of zero, and
what came back would push its removed weights through the threshold all at once. And the random
values that the weights began with fade out, for early in a training they are most of a magnitude,
and say nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probmask.core.selection import cut_between, cut_by_magnitude
from probmask.core.shrinkage import kept_part, power_grow, power_shrink, temper_removed
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Progress
from probmask.masking.sites import Site
from probmask.masking.thresholded import ThresholdedWeight, ThresholdMasker, usual_outside
from probmask.methods.deciding import DecidingMasker, count_undecided
from probmask.methods.forgetting import Freshness, fade_, squared_norm

if TYPE_CHECKING:
    from probmask.methods.probmask import ProbMask

_LOG = logging.getLogger("probmask")
_FORGET_BY = 0.5  # of the training, what a fresh network began with is gone
_FADES = 1250  # updates that forget some of it: in a long training not every one has to
_LEAST = 2.0**-20  # of the last threshold: what a weight that is kept has at least
_MOST = 3.0  # times the RMS gradient of a layer's kept weights: the most that a removed one gets


class TiedWeight(ThresholdedWeight):
    """One site: w s, s = (1 - (θ / |w|)^p)^(1/p); p is one over the temperature.

    ``start`` is what the weight began with, as long as some of that is left, and ``start_square``
    the sum of its squares. ``power`` is a buffer, which is not saved: an averaged copy has to take
    over the temperature with the weights.
    """

    power: Tensor

    def __init__(self, site: Site, power: float, outside: float) -> None:
        super().__init__(site, outside=outside)
        device = site.weight.device
        self.register_buffer("power", torch.full((), power, device=device), persistent=False)
        self.share_outside = torch.full((), outside, device=device)  # none once it is chosen
        self.start: Tensor | None = None
        self.start_square: Tensor | None = None

    def begin_with(self, start: Tensor | None) -> None:
        """Have begun with this, or have forgotten it."""
        self.start = start
        self.start_square = None if start is None else squared_norm(start)

    def forget_(self, weight: Tensor, left: float) -> None:
        """Leave at most this part of the start in the weight."""
        if self.start is not None and self.start_square is not None:
            fade_(weight, self.start, self.start_square, left)
        if left == 0:
            self.begin_with(None)

    def effective(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        """The weight as far as it is kept."""
        return power_shrink(weight, active, threshold, self.power)

    def passed_back(self, grad: Tensor, active: Tensor) -> Tensor:
        """The gradient of removed weights, in part, is bounded by that of the kept ones.

        Here, where it arrives: whoever clips the gradient in a training loop has to find it so.
        """
        return temper_removed(grad, active, self.share_outside, most=_MOST)

    def cut(self, active: Tensor, threshold: float, *, whole: bool) -> None:
        """Train with these weights until the next cut; by the same rule if they are all.

        Above a threshold of zero it gives the weight itself, and a graph is compiled once.
        """
        super().cut(active, threshold, whole=False)
        self.share_outside.fill_(self.outside)

    def choose(self, active: Tensor, threshold: float) -> None:
        """Train with these weights for good: the others get no gradient any more."""
        self.cut(active, threshold, whole=False)
        self.share_outside.zero_()

    def lower_threshold_(self, weight: Tensor, threshold: Tensor, least: float) -> None:
        """Let the weights that are kept give up what the threshold took: their w s stays.

        One that has fallen below the threshold goes down with it, but not below ``least``: what is
        kept is never zero, or the network would have fewer weights than it was asked to keep. And
        those that are removed stay below the threshold, so that the weights go on telling who is
        kept: an averaged copy has nothing else to go by.
        """
        kept = weight[self.active]  # few, so that the powers cost next to nothing
        wide = kept if kept.dtype == torch.float64 else kept.float()
        effective = self.effective(wide, self.active[self.active], self.threshold)
        least = max(least, torch.finfo(weight.dtype).tiny)  # or fp16 would round it to zero
        grown = power_grow(effective.abs(), threshold, self.power).clamp_min(least)
        weight.clamp_(-threshold, threshold)
        weight[self.active] = torch.where(wide < 0, -grown, grown).to(weight.dtype)
        self.threshold.copy_(threshold)

    def prob(self, weight: Tensor, *, settled: bool = False) -> Tensor:
        """The probability that each weight is kept: at this moment, or of the final budget."""
        wide = weight.detach().float()
        if settled:
            kept, threshold = self.hard, self.settled_threshold
        else:
            kept, threshold = self.active, self.threshold
        return torch.where(kept, kept_part(wide, threshold, self.power), 0.0)


class TiedMasker(DecidingMasker, ThresholdMasker):
    """ProbMask at work on one model whose weights are their own probabilities."""

    masks: tuple[TiedWeight, ...]

    def __init__(self, method: "ProbMask", sites: Sequence[Site], context: Context) -> None:
        self.method = method
        self.settings = method.resolved
        self.limits = method.budget(sites, context)
        outside = usual_outside(method.sparsity) if method.outside is None else method.outside
        self.forget_by = method.forget_by
        self._freshness = Freshness(context.model, len(sites))
        self.forgotten = 0.0  # of what the weights began with
        # The thresholds at which the choice became final; none as long as it is open.
        self._chosen_above: list[float] | None = None
        self._undecided = 0
        self._temperature = self.settings.temperature_start
        self._check_every = max(1, context.total_steps // 100)
        masks = [TiedWeight(site, 1 / self._temperature, outside) for site in sites]
        super().__init__(
            sites,
            masks,
            self.limits.keep,
            ramp=(self.settings.ramp_begin, self.settings.ramp_end),
            freeze_at=self.settings.freeze_at,
            scales=None if self.limits.costs is None else [c**-0.5 for c in self.limits.costs],
            clip_norm=method.clip_norm,
        )

    @property
    def probs(self) -> list[Tensor]:
        """The probabilities of all sites."""
        return [m.prob(weight) for m, weight in zip(self.masks, self.weights, strict=True)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set temperature and threshold; freeze when it is time."""
        if not self.frozen:
            self._temperature = self._scheduled_temperature(self.progress(now))
            for mask in self.masks:
                mask.power.fill_(1 / self._temperature)
        super().before_forward(now, draw)

    def cut(self, now: Progress) -> None:
        """Train with the largest weights of the budget of this moment, until they are chosen."""
        if self._chosen_above is None:
            super().cut(now)

    def choose(self) -> list[Tensor]:
        """The largest weights of the final budget, or those that have been chosen."""
        if self._chosen_above is None:
            return super().choose()
        for mask in self.masks:
            mask.settle(float(mask.threshold), whole=False)
        return [mask.active for mask in self.masks]

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Look at the network as its training begins; then clip."""
        if not self.frozen and now.step == 0:
            self._begin(optimizers)
        super().after_backward(now, optimizers)

    def _begin(self, optimizers: WeightOptimizers) -> None:
        """Look at the weights as training begins: only now all ranks have the same."""
        if self.forget_by is None:
            self.forget_by = self._usual_forget_by(optimizers)
        trained = {id(p) for p in optimizers.parameters if p.requires_grad}
        for mask, weight in zip(self.masks, self.weights, strict=True):
            # A closure may come here again, with weights that have moved.
            if self.forget_by and id(weight) in trained and mask.start is None:
                mask.begin_with(weight.detach().clone())

    def _usual_forget_by(self, optimizers: WeightOptimizers) -> float:
        """When to have forgotten the start, where the user did not say; 0 is not at all."""
        if not self._freshness.holds_still():
            _LOG.info("ProbMask keeps what the weights began with: they may have been trained.")
            return 0.0
        if not optimizers.move_by_gradient(self.weights):
            _LOG.info("ProbMask keeps what the weights began with: it is not SGD that trains them.")
            return 0.0
        _LOG.info(
            "ProbMask lets fade what the weights began with, by %g of the training: BatchNorm has "
            "seen no data, so they are random. forget_by=0 keeps it.",
            _FORGET_BY,
        )
        return _FORGET_BY

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Forget some more of what the weights began with; take the threshold back in the end."""
        if self.frozen:
            return
        done = (now.step + 1) / now.total_steps
        if self.forget_by and self.forgotten < 1:
            every = max(1, int(self.forget_by * now.total_steps / _FADES))
            if done >= self.forget_by or (now.step + 1) % every == 0:
                self._forget(min(1.0, done / self.forget_by))
        if now.step % self._check_every == 0:
            self.warn_of_collapse([float(mask.active.count_nonzero()) for mask in self.masks])
        begin, end = self.method.chosen_at, self.settings.freeze_at
        if done >= begin:
            self._take_threshold_back(max(0.0, 1 - (done - begin) / max(end - begin, 1e-9)))

    def select(
        self, keep: int, *, into: Sequence[Tensor] | None = None
    ) -> tuple[list[Tensor], list[float]]:
        """The largest weights of all sites, and the threshold of each site that they exceed."""
        limits = self.limits
        amount = limits.final if keep == self.keep else keep / self.size * limits.total
        if limits.per_layer:
            return self._select_in_each(limits.shares(amount))
        if limits.costs is None:
            masks, thresholds = super().select(keep, into=into)
            pairs = zip(masks, limits.least, strict=True)
            if all(least == 0 or int(mask.count_nonzero()) >= least for mask, least in pairs):
                return masks, thresholds
        values = [
            weight.detach().abs().float() * scale
            for weight, scale in zip(self.weights, self.scales, strict=True)
        ]
        masks = limits.select(values, amount)
        shared = cut_between(values, masks)
        return masks, [
            _threshold(value, mask, shared) / scale
            for value, mask, scale in zip(values, masks, self.scales, strict=True)
        ]

    def _select_in_each(self, shares: Sequence[int]) -> tuple[list[Tensor], list[float]]:
        """So many of the largest weights of each site, and the threshold that they exceed."""
        cuts = [
            cut_by_magnitude([weight], [1.0], share, [name])
            for weight, share, name in zip(self.weights, shares, self.names, strict=True)
        ]
        return [mask for (mask,), _ in cuts], [threshold for _, threshold in cuts]

    def freeze(self) -> None:
        """Fix the masks; a layer that has none of its weights left is named."""
        if self.frozen:
            return
        self.refresh_hard_masks()
        pairs = zip(self.masks, self.weights, strict=True)
        self._undecided = count_undecided([m.prob(weight, settled=True) for m, weight in pairs])
        if self.keep < self.size:
            self._take_threshold_back(0.0)
        super().freeze()
        for mask in self.masks:
            mask.begin_with(None)
        self.warn_of_collapse([float(mask.hard.count_nonzero()) for mask in self.masks])

    def metrics(self) -> dict[str, float]:
        """Budget, temperature, and how far the probabilities are from a decision."""
        masks = [mask.hard if self.frozen else mask.active for mask in self.masks]
        kept = sum(int(mask.count_nonzero()) for mask in masks)
        undecided = self._undecided if self.frozen else count_undecided(self.probs)
        return {
            "temperature": self._temperature,
            "expected_sparsity": 1 - kept / self.size,
            "undecided_per_kept": undecided / max(1, self.keep),
            "forgotten": self.forgotten,
        }

    def state_dict(self) -> dict[str, Any]:
        """What has not yet been forgotten, what has been chosen, the masks once they are frozen."""
        chosen = [mask.active.clone() for mask in self.masks]
        return {
            **super().state_dict(),
            "start": [mask.start for mask in self.masks],
            "forgotten": self.forgotten,
            "forget_by": self.forget_by,
            "undecided": self._undecided,
            "temperature": self._temperature,
            "chosen": None if self._chosen_above is None else chosen,
            "chosen_above": self._chosen_above,
            "thresholds": [float(mask.threshold) for mask in self.masks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        for mask, weight, start in zip(self.masks, self.weights, state["start"], strict=True):
            laid_out = None if start is None else torch.empty_like(weight, dtype=start.dtype)
            mask.begin_with(None if laid_out is None else laid_out.copy_(start))
        self.forgotten = state["forgotten"]
        if state["forget_by"] is not None:  # else it was saved before the training began
            self.forget_by = state["forget_by"]
        self._undecided = state["undecided"]
        self._temperature = state["temperature"]
        self._chosen_above = state["chosen_above"]
        if state["chosen"] is not None:
            self._kept = self.keep
            for mask, active, low in zip(
                self.masks, state["chosen"], state["thresholds"], strict=True
            ):
                mask.choose(active, low)
                mask.power.fill_(1 / self._temperature)
        for mask in self.masks:
            mask.outdate()  # it may have been made of the weights alone

    def _forget(self, forgotten: float) -> None:
        """Take away what the weights began with, up to this part of it."""
        for mask, weight in zip(self.masks, self.weights, strict=True):
            mask.forget_(weight, 1 - forgotten)
        self.forgotten = forgotten

    @torch.no_grad()
    def _take_threshold_back(self, left: float) -> None:
        """Choose, and lower the threshold to this part of what it was then.

        It has selected, and has no more to do. What it took from a weight that stays, the weight
        loses for good, so that the network computes what it did, and its probability goes to 1.
        """
        if self._chosen_above is None:
            masks, self._chosen_above = self.select(self.keep)
            self._kept = self.keep
            for mask, active, threshold in zip(self.masks, masks, self._chosen_above, strict=True):
                mask.choose(active, threshold)
        pairs = zip(self.masks, self.weights, self._chosen_above, strict=True)
        for mask, weight, threshold in pairs:
            lower = torch.full_like(mask.threshold, left * threshold)
            mask.lower_threshold_(weight, lower, least=_LEAST * threshold)

    def _scheduled_temperature(self, progress: float) -> float:
        """It stays while the budget falls, and then falls itself, evenly in its logarithm."""
        begin, end = self.settings.ramp_end, self.settings.freeze_at
        done = min(1.0, max(0.0, progress - begin) / max(end - begin, 1e-9))
        start = self.settings.temperature_start
        return float(start * (self.settings.temperature_end / start) ** done)


def _threshold(value: Tensor, mask: Tensor, shared: float) -> float:
    """That of all sites, unless this one keeps some below it."""
    kept = value[mask]
    if not len(kept) or float(kept.amin()) > shared:
        return shared
    return cut_between([value], [mask])
