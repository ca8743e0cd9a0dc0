"""Dynamic Network Surgery: weights are cut off, go on learning, and are spliced back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core import schedules
from probmask.core.allocation import Spread
from probmask.core.noise import uniform_
from probmask.errors import InputError
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Method, Progress
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker


@dataclass(frozen=True, kw_only=True)
class DNS(Method):
    """Cut and splice by two thresholds around τ = max(μ + c σ, 0) while all weights learn.

    μ and σ are mean and deviation of |w| in the layer when surgery begins. A weight is cut if
    |w| ≤ (1 - band) τ, spliced back if |w| > (1 + band) τ, and left as it is in between. The
    gradient of the effective weight reaches all weights, so what is cut can grow back.
    Surgery takes place after an update with the probability (1 + gamma t)^-power, t the part of the
    training since ``ramp_begin``, and ends at ``freeze_at``.

    With ``c=None`` c is found at each surgery, one for all layers or with ``scope="layer"`` one for
    each, so that the sparsity follows a cubic up to ``ramp_end``. A number is the paper's knob:
    sparsity is what comes of it until ``freeze_at``, where c is found for the budget.
    """

    name: ClassVar[str] = "dns"
    summary: ClassVar[str] = "cuts weights by layer statistics and splices them back"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2016
    reference: ClassVar[str] = (
        "Y. Guo, A. Yao and Y. Chen, Dynamic Network Surgery for Efficient DNNs, NeurIPS 2016"
    )

    c: float | None = None
    scope: Literal["global", "layer"] = "global"
    band: float = 0.1
    gamma: float = 2.6
    power: float = 1.0
    ramp_begin: float = 0.38
    ramp_end: float = 0.6
    freeze_at: float = 0.92

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("DNS", "scope", self.scope, ("global", "layer"))
        if self.c is not None:
            check_within("DNS", "c", self.c, -100, 100, meaning="deviations above the mean")
        check_within("DNS", "band", self.band, 0, 0.99, meaning="a part of the threshold")
        for name in ("gamma", "power"):
            value = getattr(self, name)
            check_within("DNS", name, value, 0, float("inf"), meaning="how fast surgery gets rarer")
        for name in ("ramp_begin", "ramp_end", "freeze_at"):
            check_within("DNS", name, getattr(self, name), 0, 1, meaning="a part of the training")
        if not self.ramp_begin <= self.ramp_end <= self.freeze_at:
            raise InputError(
                f"DNS(ramp_begin={self.ramp_begin}, ramp_end={self.ramp_end}, freeze_at="
                f"{self.freeze_at}): surgery begins, reaches the budget and ends in this order."
            )

    def begin(self, sites: Sequence[Site], context: Context) -> "DNSMasker":
        """Start dense."""
        return DNSMasker(self, sites, context)


class DNSMasker(StoredMasker):
    """Surgery on one model. ``statistics`` are μ and σ of each site, once surgery has begun."""

    def __init__(self, method: DNS, sites: Sequence[Site], context: Context) -> None:
        super().__init__(method, sites)
        self.method = method
        self.seed = context.seed
        self.spread = Spread.over(method.scope)
        self.statistics: list[tuple[float, float]] | None = None
        self.want_dense_gradient(True)
        if self.keep == self.size:
            self.freeze()  # there is nothing to cut

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Operate if it is time to; what is cut keeps its value and goes on learning."""
        if self.frozen:
            self.zero_inactive_()
            return
        done = (now.step + 1) / now.total_steps
        if done >= self.method.ramp_begin and self.statistics is None:
            self.statistics = self._measure()
        if done >= self.method.freeze_at:
            self.activate(self.choose())
            self.freeze()
        elif done >= self.method.ramp_begin and self._operates(now.step, done):
            self._operate(done)

    def choose(self) -> list[Tensor]:
        """What surgery with the c of the budget would leave."""
        return self._within(spare=0.0)

    def _operates(self, step: int, done: float) -> bool:
        since = done - self.method.ramp_begin
        chance: float = (1 + self.method.gamma * since) ** -self.method.power
        return float(uniform_(torch.empty(()), self.seed, step)) < chance

    def _operate(self, done: float) -> None:
        begin, end = self.method.ramp_begin, self.method.ramp_end
        if self.method.c is None:
            left = self._within(spare=schedules.kept_fraction(done, 0.0, begin=begin, end=end))
        else:
            left = self._above(self.method.c)
        for mask, active in zip(self.masks, left, strict=True):
            mask.active.copy_(active)
            mask.outdate()

    def _above(self, c: float) -> list[Tensor]:
        """The masks that the thresholds of c leave."""
        assert self.statistics is not None
        return [
            weight.detach().abs().float() > self._factor(active) * max(mean + c * deviation, 0.0)
            for weight, active, (mean, deviation) in zip(
                self.weights, self.active, self.statistics, strict=True
            )
        ]

    def _within(self, *, spare: float) -> list[Tensor]:
        """The masks of the c with which the budget and the part ``spare`` of the rest stay.

        A weight is in the mask as long as c is below (|w| / factor - μ) / σ, its factor 1 - band if
        it is active and 1 + band if not: the weights for which this is largest stay.
        """
        limits = [
            (weight.detach().abs().float() / self._factor(active) - mean) / max(deviation, 1e-12)
            for weight, active, (mean, deviation) in zip(
                self.weights, self.active, self.statistics or self._measure(), strict=True
            )
        ]
        return self.spread.select(limits, self.keep, self.names, spare=spare)

    def _factor(self, active: Tensor) -> Tensor:
        return torch.where(active, 1 - self.method.band, 1 + self.method.band)

    def _measure(self) -> list[tuple[float, float]]:
        magnitudes = [weight.detach().abs().float() for weight in self.weights]
        return [(float(x.mean()), float(x.std(correction=0))) for x in magnitudes]

    def state_dict(self) -> dict[str, Any]:
        """The active weights and the layers' statistics."""
        return {**super().state_dict(), "seed": self.seed, "statistics": self.statistics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.seed = state["seed"]
        self.statistics = state["statistics"]
