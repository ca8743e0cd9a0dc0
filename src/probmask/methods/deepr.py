"""Deep R: weights with fixed signs walk at random; who reaches zero makes room for another.

Bellec et al., "Deep Rewiring: Training very sparse deep networks", ICLR 2018.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.noise import uniform_
from probmask.core.selection import select_top
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Progress
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMask
from probmask.methods.exchange import Allocation, ExchangeMasker, SparseStart, at_random

_REVIVED = 1e-12
_EDGE = 2.0**-24  # the least step of an fp32 uniform away from 0 and from 1
_WALK, _REVIVAL, _SIGN = 0, 1, 2  # counters that keep the noises apart


@dataclass(frozen=True, kw_only=True)
class DeepR(SparseStart):
    """Train a sparse network by noisy gradient descent that rewires itself.

    Every connection has a fixed sign s and a parameter θ; w = s θ where θ ≥ 0, else it is dormant.
    After every update by the optimizer, η its learning rate and ν standard normal noise:

        θ ← θ - η l1 + √(2 η temperature) ν   for the active
        θ < 0: dormant; as many, drawn at random among the dormant, become active at θ = 1e-12

    The temperature falls geometrically to ``temperature_end``. The number of active weights is
    constant: of each layer (``scope="layer"``), or of all together (``"global"``).
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
    l1: float = 1e-4
    temperature: float = 1e-5
    temperature_end: float = 1e-15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("DeepR", "scope", self.scope, ("layer", "global"))
        check_within("DeepR", "l1", self.l1, 0, math.inf, meaning="a strength")
        for name in ("temperature", "temperature_end"):
            check_within("DeepR", name, getattr(self, name), 0, math.inf, meaning="a temperature")

    def begin(self, sites: Sequence[Site], context: Context) -> "DeepRMasker":
        """Draw the sparse network that training begins with, and the signs of all others."""
        return DeepRMasker(self, sites, context)

    def temperature_at(self, fraction: float) -> float:
        """The temperature when this part of the training is done."""
        if self.temperature == 0:
            return 0.0
        return self.temperature * math.pow(self.temperature_end / self.temperature, fraction)


class SignedMask(StoredMask):
    """One site whose connections have signs, for good."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.positive = torch.ones_like(self.active)

    @property
    def sign(self) -> Tensor:
        """+1 or -1 for each connection."""
        return self.positive.float() * 2 - 1


class DeepRMasker(ExchangeMasker):
    """Deep R at work."""

    masks: tuple[SignedMask, ...]

    def __init__(self, method: DeepR, sites: Sequence[Site], context: Context) -> None:
        masks = [SignedMask(site) for site in sites]
        super().__init__(method, sites, context, method.spread, masks=masks)
        self.method = method

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Before the first update, when all ranks have the same weights, take note of the signs.

        Active weights keep the sign they have; all others are zero, and draw one.
        """
        if now.step > 0:
            return
        for index, (mask, weight) in enumerate(zip(self.masks, self.weights, strict=True)):
            drawn = self._uniform(index, now.step, _SIGN) < 0.5
            mask.positive.copy_(torch.where(weight == 0, drawn, weight > 0))

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Let the active weights drift and walk; replace those that have reached zero."""
        super().after_update(now, optimizers)
        if self.frozen:
            return
        signs = [mask.sign for mask in self.masks]
        alive = [
            active.clone()
            if index in self.dense
            else self._walk(index, signs[index], now, optimizers)
            for index, active in enumerate(self.active)
        ]
        revived = self._revived(alive, now.step)
        self.activate(alive)
        self.switch_([old | new for old, new in zip(alive, revived, strict=True)], optimizers)
        for weight, sign, new in zip(self.weights, signs, revived, strict=True):
            weight.copy_(torch.where(new, sign * _REVIVED, weight))

    def _walk(
        self, index: int, sign: Tensor, now: Progress, optimizers: WeightOptimizers
    ) -> Tensor:
        """Move θ of one layer by drift and noise, and say which of its weights are still active."""
        weight, active = self.weights[index], self.masks[index].active
        rate = optimizers.rate
        spread = math.sqrt(2 * rate * self.method.temperature_at(now.fraction))
        uniform = self._uniform(index, now.step, _WALK).clamp_(_EDGE, 1 - _EDGE)
        theta: Tensor = (
            sign * weight - rate * self.method.l1 + spread * torch.special.ndtri(uniform)
        )
        weight.copy_(torch.where(active, sign * theta, 0.0))
        return active & (theta >= 0)

    def _revived(self, alive: Sequence[Tensor], step: int) -> list[Tensor]:
        """As many dormant connections as have just become so, at random."""
        lost = [int(old.sum() - new.sum()) for old, new in zip(self.active, alive, strict=True)]
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

    def state_dict(self) -> dict[str, Any]:
        """The signs, beside the active weights and the seed."""
        return {**super().state_dict(), "positive": [mask.positive.clone() for mask in self.masks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        for mask, positive in zip(self.masks, state["positive"], strict=True):
            mask.positive.copy_(positive)
