"""Dynamic Network Surgery: pruned weights are still trained, and return if they grow large."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Range, TrainingFraction
from probmask.core import schedules
from probmask.core.allocation import Spread
from probmask.core.noise import uniform_
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_sparsity,
    magnitude,
    set_active,
    set_outside_gradient,
    zero_inactive_,
)

Decay = Annotated[float, Range(0, meaning="a rate at which surgery becomes rarer")]


@dataclass(frozen=True, kw_only=True)
class DNS(Method):
    """Prune and restore weights by two thresholds around τ = max(μ + c σ, 0); train all weights.

        prune if |w| ≤ (1 - band) τ,  restore if |w| > (1 + band) τ,  else leave unchanged

    μ and σ are mean and standard deviation of |w| in the layer when surgery begins. Pruned weights
    get the gradient of the effective weight, so that they can grow again. Surgery takes place after
    an update with probability (1 + gamma t)^-power, t being the fraction of the training since
    ``ramp_begin``.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        c: None finds c at each surgery, so that the sparsity follows a cubic ramp. A number is the
            paper's setting: the sparsity results from it until ``freeze_at``, where c is found for
            the budget.
        scope: One c for all layers, or one per layer that keeps the same fraction of it.
        band: Half the relative width of the band between the two thresholds.
        gamma: How fast surgery becomes rarer.
        power: The exponent with which surgery becomes rarer.
        ramp_begin: Fraction of the training at which surgery begins.
        ramp_end: Fraction of the training at which the ramp reaches ``sparsity``.
        freeze_at: Fraction of the training at which surgery ends and the masks become final.
    """

    name: ClassVar[str] = "dns"
    summary: ClassVar[str] = "prunes weights by layer statistics and restores them"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2016
    reference: ClassVar[str] = (
        "Y. Guo, A. Yao and Y. Chen, Dynamic Network Surgery for Efficient DNNs, NeurIPS 2016"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end", "freeze_at")

    c: Annotated[float, Range(-100, 100, "a number of standard deviations")] | None = None
    scope: Literal["global", "layer"] = "global"
    band: Annotated[float, Range(0, 0.99, "a fraction of the threshold")] = 0.1
    gamma: Decay = 2.6
    power: Decay = 1.0
    ramp_begin: TrainingFraction = 0.38
    ramp_end: TrainingFraction = 0.6
    freeze_at: TrainingFraction = 0.92

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its rule needs the statistics of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "DNSMasker":
        """Start dense."""
        return DNSMasker(self, sites, context)


class DNSMasker(Masker):
    """Masker of DNS. ``statistics`` has μ and σ of each site, from the first surgery on."""

    saved = ("seed", "statistics")
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: DNS, sites: Sequence[Site], context: Context) -> None:
        super().__init__(sites, [StoredWeight(site) for site in sites], method.keep_of(sites))
        self.method = method
        self.seed = context.seed
        self.spread = Spread.over(method.scope)
        self.statistics: list[tuple[float, float]] | None = None
        set_outside_gradient(self.masked, 1.0)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Prune and restore weights if surgery takes place; pruned weights keep their values."""
        if self.frozen:
            zero_inactive_(self.masked, self.weights)
            return
        done = now.next_fraction
        if done >= self.method.ramp_begin and self.statistics is None:
            self.statistics = self._measure()
        if done >= self.method.freeze_at:
            activate_(self.masked, self.weights, self.choose())
            self.freeze()
        elif done >= self.method.ramp_begin and self._operates(now.step, done):
            set_active(self.masked, self._after_surgery(done))

    def choose(self) -> list[Tensor]:
        """Return the masks after surgery with the c that meets the budget."""
        return self._within(spare=0.0)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _operates(self, step: int, done: float) -> bool:
        since = done - self.method.ramp_begin
        chance: float = (1 + self.method.gamma * since) ** -self.method.power
        return float(uniform_(torch.empty(()), self.seed, step)) < chance

    def _after_surgery(self, done: float) -> list[Tensor]:
        if self.method.c is not None:
            return self._above(self.method.c)
        begin, end = self.method.ramp_begin, self.method.ramp_end
        return self._within(spare=schedules.kept_fraction(done, 0.0, begin=begin, end=end))

    def _above(self, c: float) -> list[Tensor]:
        """Return the masks of the weights above the thresholds of c."""
        assert self.statistics is not None
        return [
            magnitude(weight) > self._factor(each) * max(mean + c * deviation, 0.0)
            for weight, each, (mean, deviation) in zip(
                self.weights, self.masked, self.statistics, strict=True
            )
        ]

    def _within(self, *, spare: float) -> list[Tensor]:
        """Return the masks of the c that keeps the budget and the fraction ``spare`` of the rest.

        A weight is kept while c is below (|w| / factor - μ) / σ, its factor being 1 - band if it is
        active, else 1 + band. So the weights for which this is largest are kept.
        """
        limits = [
            (magnitude(weight) / self._factor(each) - mean) / max(deviation, 1e-12)
            for weight, each, (mean, deviation) in zip(
                self.weights, self.masked, self.statistics or self._measure(), strict=True
            )
        ]
        return self.spread.select(limits, self.keep, self.names, spare=spare)

    def _factor(self, masked: StoredWeight) -> Tensor:
        return torch.where(masked.active, 1 - self.method.band, 1 + self.method.band)

    def _measure(self) -> list[tuple[float, float]]:
        magnitudes = [magnitude(weight) for weight in self.weights]
        return [(float(x.mean()), float(x.std(correction=0))) for x in magnitudes]
