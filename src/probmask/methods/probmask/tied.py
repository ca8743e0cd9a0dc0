"""TiedProbMask: ProbMask with probabilities that are a function of the weights.

The paper moves each probability s by -∂L/∂s and projects, which subtracts one v from all of them.
Without noise, and if the weight w receives the gradient g of the effective weight w ∘ m unchanged,
∂L/∂m = w g and Δw = -η g. The sum of all probability steps then telescopes:

    -Σ ∂L/∂m = (1/η) Σ w Δw = (w² - w₀²) / (2η) + O(η)

So w² accumulates what the paper's Adam accumulates in s, without its noise. One
threshold on |w| for all layers, after the initial value w₀ has faded out, is the paper's
projection. The method is ours; docs/methods/probmask-tied.md derives it and compares the two.

    s = (1 - (θ / |w|)^p)^(1/p)  where |w| > θ, else 0,   p = 1 / temperature

The network computes with w s, which is continuous at the threshold. For p = 2, (w s)² = w² - θ² is
Theorem 1's "subtract one v and clip at 0", applied to w²; p = 3, the default, is its neighbor.

One update: `TiedMasker.before_forward` sets θ so that the budget is met,
`TiedWeight.training_weight` computes w s, its backward pass returns the gradient straight to w, and
`TiedMasker.after_update` fades the initial values out. Near the end of the training it also makes
the final selection of weights.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import (
    GradientFraction,
    Positive,
    Temperature,
    TrainingFraction,
    WeightCount,
)
from probmask.core import schedules
from probmask.core.selection import cut_between, cut_by_magnitude
from probmask.core.shrinkage import bound_pruned_gradient, kept_part, power_grow, power_shrink
from probmask.errors import InputError
from probmask.masking.masker import Histogram, Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.thresholds import clip_gradient, straight_through, usual_outside
from probmask.methods.probmask.budget import Budget, warn_of_early_choice
from probmask.methods.probmask.initial_values import Freshness, fade_, squared_norm
from probmask.methods.probmask.probabilities import (
    COLLAPSE_ADVICE,
    count_undecided,
    prob_histogram,
)

_LOG = logging.getLogger("probmask")
_FORGET_BY = 0.5  # fraction of the training by which random initial values have faded out
_FADES = 1250  # at most this many updates fade; longer trainings fade every n-th update
_LEAST = 2.0**-20  # least magnitude of a kept weight, as a fraction of the final threshold
_MOST = 3.0  # bound on the gradients of pruned weights, in units of the RMS of kept weights
_CHOSEN_BEFORE = 0.05  # fraction of the training between the final selection and the freeze


@dataclass(frozen=True, kw_only=True)
class TiedProbMask(Method):
    """Tie each probability to its weight: only weights are trained, under one budget.

    It needs about a thousand updates. It is our method; `ProbMask` is the paper's.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: ``"global"`` uses one budget for all layers, ``"layer"`` the same kept fraction in
            each layer.
        cost: The unit of the budget. With ``"flops"``, sparsity is the fraction of multiplications
            pruned, and ``attach`` needs ``example_inputs``.
        temperature_start: The temperature τ = 1/p while the budget falls.
        temperature_end: τ at ``freeze_at``; it falls exponentially from ``ramp_end`` on.
        ramp_begin: Fraction of the training at which the budget begins to fall.
        ramp_end: Fraction of the training at which it reaches ``sparsity``.
        every: Whether budget and temperature change per update or per epoch. All other times
            count updates.
        outside: Fraction of the gradient that pruned weights get. None: 0.5 above 95 % sparsity,
            else 1.
        forget_by: Fraction of the training by which the initial values have faded out; 0 keeps
            them. None: 0.5 if the network is fresh (its BatchNorm has seen no data) and SGD trains
            it, else 0. The decision is logged once (logger ``probmask``, level INFO).
        choose_at: Fraction of the training at which the final selection of weights is made. The
            threshold then falls to zero until ``freeze_at``, so that the probabilities of the kept
            weights go to 1. None: 0.05 before ``freeze_at``.
        freeze_at: Fraction of the training at which the masks are frozen; 1 is the end.
        min_keep_per_layer: The least number of weights that each layer keeps.
        clip_norm: Clip the joint gradient to this norm.

    Raises:
        InputError: If a setting breaks its rule, or two settings contradict each other.

    Example:
        >>> probmask.TiedProbMask(sparsity=0.98).ramp_end
        0.5
    """

    name: ClassVar[str] = "probmask-tied"
    summary: ClassVar[str] = "ProbMask with probabilities tied to the weights (ours)"
    group: ClassVar[str] = "ours"
    year: ClassVar[int | None] = 2026
    reference: ClassVar[str] = "probmask, docs/methods/probmask-tied.md"

    scope: Literal["global", "layer"] = "global"
    cost: Literal["params", "flops"] = "params"
    temperature_start: Temperature = 1 / 3
    temperature_end: Temperature = 1 / 3
    ramp_begin: TrainingFraction = 0.0
    ramp_end: TrainingFraction = 0.5
    every: Literal["step", "epoch"] = "step"
    outside: GradientFraction | None = None
    forget_by: TrainingFraction | None = None
    choose_at: TrainingFraction | None = None
    freeze_at: TrainingFraction = 0.95
    min_keep_per_layer: WeightCount = 0
    clip_norm: Positive | None = None

    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature_end > self.temperature_start:
            raise InputError(
                f"TiedProbMask(temperature_start={self.temperature_start:g}, temperature_end="
                f"{self.temperature_end:g}): the temperature must not rise."
            )
        if self.choose_at is not None and self.choose_at > self.freeze_at:
            raise InputError(
                f"TiedProbMask(choose_at={self.choose_at:g}, freeze_at={self.freeze_at:g}): the "
                "weights are selected before the masks are frozen; choose_at must not exceed "
                "freeze_at."
            )

    @property
    def chosen_at(self) -> float:
        """Fraction of the training at which the final selection of weights is made."""
        if self.choose_at is not None:
            return self.choose_at
        return max(0.0, self.freeze_at - _CHOSEN_BEFORE)

    def begin(self, sites: Sequence[Site], context: Context) -> "TiedMasker":
        """Start dense."""
        if self.every == "epoch" and not context.epochs_known:
            raise InputError(
                "attach(TiedProbMask(every='epoch')): its schedules count epochs; pass "
                "steps_per_epoch= to attach."
            )
        return TiedMasker(self, sites, context)


class TiedWeight(MaskedWeight):
    """One site: the effective weight w s, and the gradient that w receives.

    Thresholds and powers are tensors, so that a compiled graph does not depend on their values.
    """

    saved = ("active", "threshold", "power", "outside", "initial")

    def __init__(self, site: Site, power: float, outside: float) -> None:
        super().__init__(site)
        device = site.weight.device
        self.active = torch.ones_like(site.weight, dtype=torch.bool, requires_grad=False)
        self.threshold = torch.zeros((), device=device)  # of the current budget, for training
        self.final_threshold = torch.zeros((), device=device)  # of the final one, for evaluation
        self.power = torch.full((), power, device=device)
        self.outside = torch.full((), outside, device=device)  # 0 after the final selection
        self.initial: Tensor | None = None  # the initial value, until it has faded out
        self._initial_square: Tensor | None = None

    def training_weight(self, weight: Tensor) -> Tensor:
        """w s at the current threshold."""
        return straight_through(
            weight, self.active, self.threshold, self._shrunk, self._bounded_gradient
        )

    def final_weight(self, weight: Tensor) -> Tensor:
        """w s at the threshold of the final budget."""
        return straight_through(
            weight, self.mask, self.final_threshold, self._shrunk, self._bounded_gradient
        )

    def _shrunk(self, weight: Tensor, active: Tensor, threshold: Tensor) -> Tensor:
        return power_shrink(weight, active, threshold, self.power)

    def _bounded_gradient(self, grad: Tensor, active: Tensor) -> Tensor:
        """Return the gradient, bounded for pruned weights by the RMS of the kept ones.

        In a channel without weights BatchNorm divides by a standard deviation of zero, and an
        unbounded gradient would lift all of its pruned weights beyond the threshold at once. The
        bound is applied here, so that a training loop that clips gradients sees it applied.
        """
        return bound_pruned_gradient(grad, active, self.outside, most=_MOST)

    def prob(self, weight: Tensor, *, final: bool = False) -> Tensor:
        """Return s at the current threshold, or at that of the final budget."""
        kept = self.mask if final else self.active
        threshold = self.final_threshold if final else self.threshold
        return torch.where(kept, kept_part(weight.detach().float(), threshold, self.power), 0.0)

    def set_active(self, active: Tensor, threshold: float) -> None:
        """Compute with these weights in training until the next call."""
        if active is not self.active:
            self.active.copy_(active)
        self.threshold.fill_(threshold)

    def set_initial(self, initial: Tensor | None) -> None:
        """Set the initial value to fade out, or None once it has faded."""
        self.initial, self._initial_square = initial, None

    def fade_initial_(self, weight: Tensor, left: float) -> None:
        """Leave at most this fraction of the initial value in the weight."""
        if self.initial is not None:
            if self._initial_square is None:
                self._initial_square = squared_norm(self.initial)
            fade_(weight, self.initial, self._initial_square, left)
        if left == 0:
            self.set_initial(None)

    def lower_threshold_(self, weight: Tensor, threshold: Tensor, least: float) -> None:
        """Lower θ, and shrink the kept weights so that w s stays the same.

        A kept weight below the threshold falls with it, but not below ``least``: a kept weight is
        never zero, or the network would keep fewer weights than requested. Pruned weights stay
        below the threshold, so that a copy with averaged weights (EMA) selects the same weights
        by their magnitudes.
        """
        if not self.trained:
            self.threshold.copy_(threshold)
            return
        kept = weight[self.active]  # few weights, whose powers are cheap
        wide = kept if kept.dtype == torch.float64 else kept.float()
        effective = power_shrink(wide, self.active[self.active], self.threshold, self.power)
        least = max(least, torch.finfo(weight.dtype).tiny)  # fp16 would round it to zero
        grown = power_grow(effective.abs(), threshold, self.power).clamp_min(least)
        weight.clamp_(-threshold, threshold)
        weight[self.active] = torch.where(wide < 0, -grown, grown).to(weight.dtype)
        self.threshold.copy_(threshold)


class TiedMasker(Masker):
    """Masker of TiedProbMask."""

    saved = ("forgotten", "forget_by", "_undecided", "_temperature", "_thresholds_at_choice")
    collapse_advice = COLLAPSE_ADVICE
    masked: tuple[TiedWeight, ...]

    def __init__(self, method: TiedProbMask, sites: Sequence[Site], context: Context) -> None:
        self.method = method
        self.budget = Budget(
            method,
            sites,
            context,
            per_layer=method.scope == "layer",
            flops=method.cost == "flops",
            least_per_layer=method.min_keep_per_layer,
        )
        outside = usual_outside(method.sparsity) if method.outside is None else method.outside
        self._temperature = method.temperature_start
        masked = [TiedWeight(site, 1 / self._temperature, outside) for site in sites]
        super().__init__(sites, masked, self.budget.keep)
        costs = self.budget.costs
        self.scales = (1.0,) * len(sites) if costs is None else tuple(c**-0.5 for c in costs)
        self.clip_norm = method.clip_norm
        self.forget_by = method.forget_by
        self.forgotten = 0.0  # the fraction of the initial values that has faded out
        self._freshness = Freshness(context.model, len(sites), pretrained=context.pretrained)
        self._thresholds_at_choice: list[float] | None = None  # thresholds of the final selection
        self._last_thresholds = 0.0, 0.0  # of the last two updates
        self._undecided = 0
        self._check_every = max(1, context.total_steps // 100)
        name = "freeze_at" if method.choose_at is None else "choose_at"
        warn_of_early_choice(
            "TiedProbMask",
            f"{name}={getattr(method, name):g}",
            method.chosen_at,
            (method.ramp_begin, method.ramp_end),
            final=1 - method.sparsity,
        )

    @property
    def probs(self) -> list[Tensor]:
        """The probabilities of all sites."""
        return [m.prob(weight) for m, weight in zip(self.masked, self.weights, strict=True)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set temperature and threshold; freeze from ``freeze_at`` on.

        No mask is frozen before the first update: ranks may not have the same weights yet, and a
        checkpoint may still be loaded.
        """
        if self.frozen:
            return
        done = now.epoch_fraction if self.method.every == "epoch" else now.fraction
        self._temperature = self._temperature_at(done)
        for masked in self.masked:
            masked.power.fill_(1 / self._temperature)
        if now.step > 0 and now.fraction >= self.method.freeze_at:
            self.freeze()
        elif self._thresholds_at_choice is None:
            self._cut(self._keep_at(done))

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Record the initial values before the first update; clip the joint gradient."""
        if now.step == 0 and not self.frozen:
            self._record_initial_values(optimizers)
        clip_gradient(self, optimizers, self.clip_norm)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Fade the initial values; from ``choose_at`` on, lower the thresholds."""
        if self.frozen:
            return
        done = now.next_fraction
        if self.forget_by and self.forgotten < 1:
            every = max(1, int(self.forget_by * now.total_steps / _FADES))
            if done >= self.forget_by or (now.step + 1) % every == 0:
                self._fade(min(1.0, done / self.forget_by))
        if now.step % self._check_every == 0:
            self._warn_unless_protected([masked.active for masked in self.masked])
        begin, end = self.method.chosen_at, self.method.freeze_at
        if done >= begin:
            self._lower_thresholds(max(0.0, 1 - (done - begin) / max(end - begin, 1e-9)))

    def choose(self) -> list[Tensor]:
        """Return masks of the final selection; before it, of the largest weights of the budget.

        This also sets the thresholds that evaluation uses.
        """
        if self._thresholds_at_choice is None:
            masks, thresholds = self._select(self.keep)
        else:
            masks = [masked.active for masked in self.masked]
            thresholds = [float(masked.threshold) for masked in self.masked]
        for masked, threshold in zip(self.masked, thresholds, strict=True):
            masked.final_threshold.fill_(threshold)
        return masks

    def freeze(self) -> None:
        """Make the masks final; warn about layers that keep no weight."""
        if self.frozen:
            return
        self.refresh_masks()
        pairs = zip(self.masked, self.weights, strict=True)
        self._undecided = count_undecided([m.prob(weight, final=True) for m, weight in pairs])
        # This changes the weights, so the base class selects again, at a threshold of zero.
        self._lower_thresholds(0.0)
        super().freeze()
        for masked in self.masked:
            masked.set_initial(None)
        self._warn_unless_protected([masked.mask for masked in self.masked])

    def metrics(self) -> dict[str, float]:
        """Return temperature, sparsity, undecided probabilities per kept weight, and the fading."""
        masks = [masked.mask if self.frozen else masked.active for masked in self.masked]
        kept = sum(int(mask.count_nonzero()) for mask in masks)
        undecided = self._undecided if self.frozen else count_undecided(self.probs)
        return {
            "temperature": self._temperature,
            "expected_sparsity": 1 - kept / self.size,
            "undecided_per_kept": undecided / max(1, self.keep),
            "forgotten": self.forgotten,
        }

    def histograms(self) -> dict[str, Histogram]:
        """Return the histogram of the probabilities until the masks are frozen."""
        return {} if self.frozen else prob_histogram(self.probs)

    def _temperature_at(self, done: float) -> float:
        """τ is constant while the budget falls; then ln τ falls linearly."""
        begin, end = self.method.ramp_end, self.method.freeze_at
        fraction = min(1.0, max(0.0, done - begin) / max(end - begin, 1e-9))
        start = self.method.temperature_start
        return float(start * (self.method.temperature_end / start) ** fraction)

    def _keep_at(self, done: float) -> int:
        """Return the number of weights kept at this fraction of the training."""
        begin, end = self.method.ramp_begin, self.method.ramp_end
        final = self.keep / self.size
        return round(schedules.kept_fraction(done, final, begin=begin, end=end) * self.size)

    def _cut(self, keep: int) -> None:
        """Compute with the ``keep`` largest weights in training."""
        earlier, last = self._last_thresholds
        near = last * last / earlier if earlier > 0 else last  # if it continues to change as it did
        masks, thresholds = self._select(
            keep, into=[masked.active for masked in self.masked], near=near
        )
        for masked, active, threshold in zip(self.masked, masks, thresholds, strict=True):
            masked.set_active(active, threshold)
        self._last_thresholds = last, thresholds[0]

    def _select(
        self, keep: int, *, into: Sequence[Tensor] | None = None, near: float = 0.0
    ) -> tuple[list[Tensor], list[float]]:
        """Return the masks of the largest weights, and the threshold of each site.

        The masks may be those of ``into``, overwritten. ``near`` predicts the threshold.
        """
        budget = self.budget
        amount = budget.final if keep == self.keep else keep / self.size * budget.total
        if budget.per_layer:
            return self._select_in_each(budget.shares(amount))
        if budget.costs is None:
            masks, threshold = cut_by_magnitude(
                self.weights, self.scales, keep, self.names, into=into, near=near
            )
            pairs = zip(masks, budget.least, strict=True)
            if all(least == 0 or int(mask.count_nonzero()) >= least for mask, least in pairs):
                return masks, [threshold] * len(masks)
        values = [
            weight.detach().abs().float() * scale
            for weight, scale in zip(self.weights, self.scales, strict=True)
        ]
        masks = budget.select(values, amount)
        shared = cut_between(values, masks)
        return masks, [
            _threshold(value, mask, shared) / scale
            for value, mask, scale in zip(values, masks, self.scales, strict=True)
        ]

    def _select_in_each(self, counts: Sequence[int]) -> tuple[list[Tensor], list[float]]:
        cuts = [
            cut_by_magnitude([weight], [1.0], count, [name])
            for weight, count, name in zip(self.weights, counts, self.names, strict=True)
        ]
        return [mask for (mask,), _ in cuts], [threshold for _, threshold in cuts]

    def _record_initial_values(self, optimizers: WeightOptimizers) -> None:
        """Copy the weights that will fade out, at the first update: all ranks have the same now."""
        if self.forget_by is None:
            self.forget_by = self._usual_forget_by(optimizers)
        trained = {id(p) for p in optimizers.parameters if p.requires_grad}
        for masked, weight in zip(self.masked, self.weights, strict=True):
            # An optimizer with a closure may call this again after the weights have moved.
            if self.forget_by and id(weight) in trained and masked.initial is None:
                masked.set_initial(weight.detach().clone())

    def _usual_forget_by(self, optimizers: WeightOptimizers) -> float:
        if not self._freshness.still_holds():
            _LOG.info("TiedProbMask keeps the initial values: the weights may be pretrained.")
            return 0.0
        if not optimizers.move_by_gradient(self.weights):
            _LOG.info("TiedProbMask keeps the initial values: the optimizer is not SGD.")
            return 0.0
        _LOG.info(
            "TiedProbMask fades the initial values out by %g of the training: BatchNorm has seen "
            "no data, so they are random. Pass forget_by=0 to keep them.",
            _FORGET_BY,
        )
        return _FORGET_BY

    def _fade(self, forgotten: float) -> None:
        """Fade the initial values out up to this fraction."""
        for masked, weight in zip(self.masked, self.weights, strict=True):
            masked.fade_initial_(weight, 1 - forgotten)
        self.forgotten = forgotten

    @torch.no_grad()
    def _lower_thresholds(self, left: float) -> None:
        """Lower the thresholds to this fraction of those of the final selection.

        The first call makes the selection. The threshold's shrinkage is folded into the kept
        weights, so the network's output does not change, and their probabilities go to 1.
        """
        if self._thresholds_at_choice is None:
            masks, self._thresholds_at_choice = self._select(self.keep)
            for masked, active, threshold in zip(
                self.masked, masks, self._thresholds_at_choice, strict=True
            ):
                masked.set_active(active, threshold)
                masked.outside.zero_()  # pruned weights cannot return
        for masked, weight, threshold in zip(
            self.masked, self.weights, self._thresholds_at_choice, strict=True
        ):
            lower = torch.full_like(masked.threshold, left * threshold)
            masked.lower_threshold_(weight, lower, least=_LEAST * threshold)

    def _warn_unless_protected(self, masks: Sequence[Tensor]) -> None:
        if not any(self.budget.least):  # otherwise every layer keeps some weights
            self.warn_of_collapse([float(mask.count_nonzero()) for mask in masks])


def _threshold(value: Tensor, mask: Tensor, shared: float) -> float:
    """Return the shared threshold, or the site's own if it keeps values below the shared one."""
    kept = value[mask]
    if not len(kept) or float(kept.amin()) > shared:
        return shared
    return cut_between([value], [mask])
