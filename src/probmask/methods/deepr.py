"""Deep R: weights with fixed signs and noise; a weight that reaches zero is replaced by another.

Bellec et al., "Deep Rewiring: Training very sparse deep networks", ICLR 2018.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Range
from probmask.core.allocation import Spread
from probmask.core.noise import uniform_
from probmask.core.selection import select_top
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.exchange import Allocation, activate_at_random_, at_random, switch_
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_masks,
    active_sparsity,
    largest_active,
    zero_inactive_,
)

_REVIVED = 1e-12
_EDGE = 2.0**-24  # distance of the uniforms from 0 and 1: the smallest step of an fp32 uniform
_WALK, _REVIVAL, _SIGN = 0, 1, 2  # counters of the random streams within an update

Temperature = Annotated[float, Range(0, meaning="a temperature")]


@dataclass(frozen=True, kw_only=True)
class DeepR(Method):
    """Train a sparse network by noisy gradient descent that rewires itself.

    Every connection has a fixed sign s and a parameter θ; w = s θ if θ ≥ 0, else it is dormant.
    After every update by the optimizer, with η its learning rate, T the temperature and ν standard
    normal noise:

        θ ← θ - η l1 + √(2 η T) ν   for active connections
        θ < 0: dormant; the same number of dormant ones, drawn at random, become active at 1e-12

    The signs of dense layers are not fixed.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: Whether the number of active weights is constant in each layer or in all together.
        allocation: The number of weights per layer: the same fraction, or Erdős-Rényi (-kernel).
        dense_first: Leave the first layer dense.
        dense_last: Leave the last layer dense.
        l1: Strength of the drift towards zero.
        temperature: The initial temperature, which falls geometrically.
        temperature_end: The final temperature.
    """

    name: ClassVar[str] = "deepr"
    summary: ClassVar[str] = "fixed signs, noise, random rewiring at zero"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2018
    reference: ClassVar[str] = (
        "Bellec, Kappel, Maass, Legenstein: Deep Rewiring: Training very sparse deep networks. "
        "ICLR 2018"
    )

    scope: Literal["layer", "global"] = "layer"
    allocation: Allocation = "uniform"
    dense_first: bool = False
    dense_last: bool = False
    l1: Annotated[float, Range(0, meaning="a strength")] = 1e-4
    temperature: Temperature = 1e-5
    temperature_end: Temperature = 1e-15

    @property
    def spread(self) -> Spread:
        """The number of weights of each layer at the start."""
        return Spread(
            allocation=self.allocation, dense_first=self.dense_first, dense_last=self.dense_last
        )

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its rule needs the statistics of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "DeepRMasker":
        """Draw the sparse network that training starts with."""
        return DeepRMasker(self, sites, context)

    def temperature_at(self, fraction: float) -> float:
        """Return the temperature when this fraction of the training is done."""
        if self.temperature == 0:
            return 0.0
        return self.temperature * math.pow(self.temperature_end / self.temperature, fraction)


class DeepRMasker(Masker):
    """Masker of Deep R. ``positive`` is True where a connection's sign is +1."""

    saved = ("seed", "positive")
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: DeepR, sites: Sequence[Site], context: Context) -> None:
        keep = method.keep_of(sites, method.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.method = method
        self.seed = context.seed
        self.dense = method.spread.dense(len(sites))
        activate_at_random_(self, self.masked, sites, method.spread, keep, context.seed)
        self.positive = [torch.ones_like(active) for active in active_masks(self.masked)]

    def sign(self, index: int) -> Tensor:
        """Return +1 or -1 for each connection of a site."""
        return self.positive[index].to(self.weights[index].device).float() * 2 - 1

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Fix the signs before the first update, when all ranks have the same weights.

        Active weights keep their sign. All others are zero and get a random sign.
        """
        if now.step > 0:
            return
        for index, weight in enumerate(self.weights):
            drawn = self._uniform(index, now.step, _SIGN) < 0.5
            self.positive[index] = torch.where(weight == 0, drawn, weight > 0)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Apply drift and noise to the active weights; replace those that have reached zero."""
        zero_inactive_(self.masked, self.weights)
        if self.frozen:
            return
        alive = [
            active.clone() if index in self.dense else self._walk(index, now, optimizers)
            for index, active in enumerate(active_masks(self.masked))
        ]
        revived = self._revived(alive, now.step)
        activate_(self.masked, self.weights, alive)
        after = [old | new for old, new in zip(alive, revived, strict=True)]
        switch_(self.masked, self.weights, after, optimizers)
        for index, (weight, new) in enumerate(zip(self.weights, revived, strict=True)):
            weight.copy_(torch.where(new, self.sign(index) * _REVIVED, weight))

    def choose(self) -> list[Tensor]:
        """Return the active weights."""
        return largest_active(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _walk(self, index: int, now: Progress, optimizers: WeightOptimizers) -> Tensor:
        """Move θ of one layer by drift and noise; return the mask of its still active weights."""
        weight, active, sign = self.weights[index], self.masked[index].active, self.sign(index)
        rate = optimizers.rate
        deviation = math.sqrt(2 * rate * self.method.temperature_at(now.fraction))
        uniform = self._uniform(index, now.step, _WALK).clamp_(_EDGE, 1 - _EDGE)
        theta: Tensor = (
            sign * weight - rate * self.method.l1 + deviation * torch.special.ndtri(uniform)
        )
        weight.copy_(torch.where(active, sign * theta, 0.0))
        return active & (theta >= 0)

    def _revived(self, alive: Sequence[Tensor], step: int) -> list[Tensor]:
        """Return masks of random dormant connections, one for each that has just become dormant."""
        lost = [
            int(old.sum() - new.sum())
            for old, new in zip(active_masks(self.masked), alive, strict=True)
        ]
        if self.method.scope == "layer":
            return [
                at_random(~mask, count, self.seed, step, index, _REVIVAL)
                for index, (mask, count) in enumerate(zip(alive, lost, strict=True))
            ]
        values = [
            torch.where(mask, -1.0, self._uniform(index, step, _REVIVAL))
            for index, mask in enumerate(alive)
        ]
        return select_top(values, sum(lost), names=self.names)

    def _uniform(self, index: int, step: int, purpose: int) -> Tensor:
        weight = self.weights[index]
        out = torch.empty(weight.shape, device=weight.device)
        return uniform_(out, self.seed, step, index, purpose)
