"""TiedProbMask: ProbMask with probabilities that are a function of the weights.

The paper moves each probability s by -∂L/∂s and projects, which subtracts one v from all of them.
Without noise, and if the weight w receives the gradient g of the effective weight w ∘ m unchanged,
∂L/∂m = w g and Δw = -η g. The sum of all probability steps then telescopes:

    -Σ ∂L/∂m = (1/η) Σ w Δw = (w² - w₀²) / (2η) + O(η)

So w² - w₀² accumulates what the paper's Adam accumulates in s, without its noise. One threshold on
it for all layers is the paper's projection. The initial value w₀ is subtracted in one of two ways:
it fades out of w, or the growth sign(w) (|w|^p - c |w₀|^p)^(1/p) takes the place of w. The method
is ours; docs/methods/probmask-tied.md derives it and compares the two.

    s = (1 - (θ / |w|)^p)^(1/p)  where |w| > θ, else 0,   p = 1 / temperature

The network computes with w s, which is continuous at the threshold. For p = 2, (w s)² = w² - θ² is
Theorem 1's "subtract one v and clip at 0", applied to w²; p = 3, the default, is its neighbor.

One update: `TiedMasker.before_forward` sets c and θ so that the budget is met,
`TiedWeight.training_weight` computes w s, its backward pass returns the gradient straight to w, and
`TiedMasker.after_update` fades the initial values out, if they do fade. Near the end of the
training it also makes the final selection of weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import (
    GradientFraction,
    InitialFraction,
    Positive,
    Temperature,
    TrainingFraction,
    WeightCount,
)
from probmask.core import schedules
from probmask.core.selection import ThresholdForecast, cut_between, cut_by_magnitude
from probmask.core.shrinkage import kept_squares
from probmask.errors import InputError
from probmask.masking.masker import Histogram, Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.thresholds import clip_gradient, usual_outside
from probmask.methods.probmask.budget import Budget, warn_of_early_choice
from probmask.methods.probmask.initial_values import Origin, how_to_forget
from probmask.methods.probmask.probabilities import (
    COLLAPSE_ADVICE,
    count_undecided,
    prob_histogram,
)
from probmask.methods.probmask.tied_weight import TiedWeight

_FADES = 1250  # at most this many updates fade; longer trainings fade every n-th update
_LEAST = 2.0**-20  # least magnitude of a kept weight, as a fraction of the final threshold
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
        discount: How much less the initial values w₀ count as the budget falls: |w|^p - c |w₀|^p
            takes the place of |w|^p, where c is ``discount`` times a power of the present sparsity.
            None: 1 if ``forget_by`` is None and the initial values do not fade out, else 0.
        discount_power: The power. None: 1, or 20 if the initial values are known to be pretrained:
            ``attach`` says so, or the gains of most normalization layers differ between channels.
            They then count less only where hardly any weights are kept.
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
    discount: InitialFraction | None = None
    discount_power: Positive | None = None
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
        if self.forget_by and self.discount:
            raise InputError(
                f"TiedProbMask(forget_by={self.forget_by:g}, discount={self.discount:g}): initial "
                "values that fade out cannot be discounted too; pass one of the two."
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

    def refuses_shards(self) -> str:
        """Return the setting that needs whole weights, if there is one."""
        if self.cost == "flops":
            return "cost='flops' selects weights of different costs one by one"
        if self.min_keep_per_layer:
            return "min_keep_per_layer gives layers thresholds of their own"
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "TiedMasker":
        """Start dense."""
        if self.every == "epoch" and not context.epochs_known:
            raise InputError(
                "attach(TiedProbMask(every='epoch')): its schedules count epochs; pass "
                "steps_per_epoch= to attach."
            )
        return TiedMasker(self, sites, context)


class TiedMasker(Masker):
    """Masker of TiedProbMask."""

    saved = (
        "forgotten",
        "forget_by",
        "discount",
        "discount_power",
        "_undecided",
        "_temperature",
        "_thresholds_at_choice",
    )
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
        self.discount = method.discount
        self.discount_power = method.discount_power
        self.forgotten = 0.0  # the fraction of the initial values that has faded out
        self._origin = Origin(context.model, len(sites), pretrained=context.pretrained)
        self._thresholds_at_choice: list[float] | None = None  # thresholds of the final selection
        self._forecast = ThresholdForecast()
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

    def gradients_arrived(self, gradients: Mapping[int, Tensor]) -> None:
        """Compute the RMS of the gradients of kept weights, for the bound of the others."""
        pairs = [(self.masked[index], gradient) for index, gradient in gradients.items()]
        sums = [kept_squares(g, m.mask if m.frozen else m.active) for m, g in pairs]
        totals = self.shards.total(torch.stack(sums)).tolist()
        for (masked, _), (square, count) in zip(pairs, totals, strict=True):
            masked.rms = (square / max(1.0, count)) ** 0.5

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
        self._undecided = count_undecided(self, [m.prob(w, final=True) for m, w in pairs])
        # This changes the weights, so the base class selects again, at a threshold of zero.
        self._lower_thresholds(0.0)
        super().freeze()
        for masked in self.masked:
            masked.set_initial(None)
        self._warn_unless_protected([masked.mask for masked in self.masked])

    def metrics(self) -> dict[str, float]:
        """Return temperature, sparsity, undecided probabilities per kept weight, and the fading."""
        masks = [masked.mask if self.frozen else masked.active for masked in self.masked]
        kept = sum(self.shards.counts(masks))
        undecided = self._undecided if self.frozen else count_undecided(self, self.probs)
        return {
            "temperature": self._temperature,
            "expected_sparsity": 1 - kept / self.size,
            "undecided_per_kept": undecided / max(1, self.keep),
            "forgotten": self.forgotten,
        }

    def histograms(self) -> dict[str, Histogram]:
        """Return the histogram of the probabilities until the masks are frozen."""
        return {} if self.frozen else prob_histogram(self, self.probs)

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
        self._set_discount(keep)
        masks, thresholds = self._select(
            keep, into=[masked.active for masked in self.masked], near=self._forecast.next
        )
        for masked, active, threshold in zip(self.masked, masks, thresholds, strict=True):
            masked.set_active(active, threshold)
        self._forecast.record(thresholds[0])

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
        growths = [masked.growth for masked in self.masked]
        if budget.costs is None:
            masks, threshold = cut_by_magnitude(
                self.weights,
                self.scales,
                keep,
                self.names,
                into=into,
                near=near,
                growths=growths,
                shards=self.shards,
            )
            pairs = zip(masks, budget.least, strict=True)
            if all(least == 0 or int(mask.count_nonzero()) >= least for mask, least in pairs):
                return masks, [threshold] * len(masks)
        values = [
            masked.grown(weight.detach()).abs().float() * scale
            for masked, weight, scale in zip(self.masked, self.weights, self.scales, strict=True)
        ]
        masks = budget.select(values, amount)
        shared = cut_between(values, masks)
        return masks, [
            _threshold(value, mask, shared) / scale
            for value, mask, scale in zip(values, masks, self.scales, strict=True)
        ]

    def _select_in_each(self, counts: Sequence[int]) -> tuple[list[Tensor], list[float]]:
        cuts = [
            cut_by_magnitude(
                [weight], [1.0], count, [name], growths=[masked.growth], shards=self.shards
            )
            for masked, weight, count, name in zip(
                self.masked, self.weights, counts, self.names, strict=True
            )
        ]
        return [mask for (mask,), _ in cuts], [threshold for _, threshold in cuts]

    def _record_initial_values(self, optimizers: WeightOptimizers) -> None:
        """Copy the initial weights at the first update: all ranks have the same now."""
        self._decide_about_initial_values(optimizers)
        if not (self.forget_by or self.discount):
            return
        for masked, weight in zip(self.masked, self.weights, strict=True):
            # An optimizer with a closure may call this again after the weights have moved.
            if optimizers.trains(weight) and masked.initial is None:
                masked.set_initial(weight.detach().clone(), discounted=bool(self.discount))

    def _decide_about_initial_values(self, optimizers: WeightOptimizers) -> None:
        """Make the decisions that the user has left to the method."""
        self.forget_by, self.discount, self.discount_power = how_to_forget(
            self.forget_by,
            self.discount,
            self.discount_power,
            origin=self._origin,
            by_gradient=optimizers.move_by_gradient(self.weights),
        )

    def _set_discount(self, keep: int) -> None:
        """c is a power of the present sparsity, times the setting."""
        c = (self.discount or 0.0) * (1 - keep / self.size) ** (self.discount_power or 1.0)
        for masked in self.masked:
            masked.discount.fill_(c)

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
            for masked, weight in zip(self.masked, self.weights, strict=True):
                masked.fold_discount_(weight)
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
            self.warn_of_collapse(self.shards.counts(masks))


def _threshold(value: Tensor, mask: Tensor, shared: float) -> float:
    """Return the shared threshold, or the site's own if it keeps values below the shared one."""
    kept = value[mask]
    if not len(kept) or float(kept.amin()) > shared:
        return shared
    return cut_between([value], [mask])
