"""Soft threshold reparameterization (STR): a learned threshold per layer.

Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity", ICML 2020.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_ramp, check_within
from probmask.core import schedules
from probmask.core.selection import select_top
from probmask.masking.budgets import checked_keep
from probmask.masking.gated import GatedWeight
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Masker, Method, Progress, Trainables
from probmask.masking.sites import Site

# Steering decays s up to this many times faster than the paper's recipe, or as fast backwards.
_STEERING = 5.0
# s < 0: a threshold at or above a half is beyond what decay towards 0 can reach.
_HIGHEST = -1e-3


@dataclass(frozen=True, kw_only=True)
class STR(Method):
    """Learn a threshold per layer that all its weights shrink by.

        w_e = sign(w) max(|w| - σ(s), 0)        ∂L/∂s = -σ'(s) Σ_{|w| > σ(s)} sign(w) ∂L/∂w_e

    s is trained as the weights are, at their rate. It starts at ``s_init``, so low that nothing is
    pruned; weight decay alone moves it towards 0, and the loss holds it back. ``decay`` is what
    that decay adds up to, s = s_init exp(-decay) without a gradient: 11.5 in the paper's ResNet-50
    recipe, whatever the length of the training. ``scope="global"`` learns one threshold for all.

    With ``steer`` the decay at each update is what brings the number of weights above their
    thresholds onto a cubic down to the budget, from ``ramp_begin`` to ``ramp_end`` of the
    training, up to five times the recipe's and possibly negative. At ``freeze_at`` of the training
    (None: at the end) exactly the budget is selected by |w_e|, and the weights that stay, w_e,
    train on without a threshold: the exact cut is not the paper's, so what it takes away can be
    made up for. With ``exact=False`` all that exceed their thresholds stay, as in the paper: the
    sparsity reached is what came of it.
    """

    name: ClassVar[str] = "str"
    summary: ClassVar[str] = "learns a soft threshold per layer"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "Kusupati, Ramanujan, Somani, Wortsman, Jain, Kakade, Farhadi: Soft Threshold Weight "
        "Reparameterization for Learnable Sparsity, ICML 2020"
    )

    s_init: float = -3200.0
    decay: float = 11.5
    momentum: float = 0.9
    scope: Literal["layer", "global"] = "layer"
    steer: bool = True
    ramp_begin: float = 0.25
    ramp_end: float = 0.6
    freeze_at: float | None = 0.8
    exact: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("STR", "s_init", self.s_init, -1e30, _HIGHEST, meaning="logit of a threshold")
        check_within("STR", "decay", self.decay, 0, math.inf, meaning="ln of how far s decays")
        check_within("STR", "momentum", self.momentum, 0, 0.999, meaning="of SGD on s")
        check_choice("STR", "scope", self.scope, ("layer", "global"))
        check_choice("STR", "steer", self.steer, (True, False))
        check_choice("STR", "exact", self.exact, (True, False))
        check_ramp(
            "STR", ramp_begin=self.ramp_begin, ramp_end=self.ramp_end, meaning="what is kept falls"
        )
        if self.freeze_at is not None:
            check_within("STR", "freeze_at", self.freeze_at, 0, 1, meaning="a part of the training")

    def begin(self, sites: Sequence[Site], context: Context) -> "STRMasker":
        """Start with thresholds of zero."""
        return STRMasker(self, sites, context)


def soft_threshold(weight: Tensor, threshold: Tensor) -> Tensor:
    """sign(w) max(|w| - T, 0), as w - clip(w, -T, T): exactly zero below T, never -0."""
    threshold = threshold.to(weight.dtype)
    return weight - torch.clamp(weight, -threshold, threshold)


class SoftThresholdedWeight(GatedWeight):
    """One site: its weights beyond the threshold σ(gate), shrunk by it."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """w_e."""
        return soft_threshold(weight, torch.sigmoid(self.gate))

    def settled_weight(self, weight: Tensor) -> Tensor:
        """w_e."""
        return self.training_weight(weight)


class STRMasker(Masker):
    """STR at work on one model."""

    masks: tuple[SoftThresholdedWeight, ...]

    def __init__(self, method: STR, sites: Sequence[Site], context: Context) -> None:
        start = torch.tensor(method.s_init)
        super().__init__(sites, [SoftThresholdedWeight(site, start.clone()) for site in sites])
        self.method = method
        self.size = sum(site.size for site in sites)
        self.keep = checked_keep(method, sites)
        self._decay = 0.0
        if self.keep == self.size:
            for mask in self.masks:
                mask.frozen = True  # everything is kept: no threshold to learn

    def trainables(self) -> list[Trainables]:
        """SGD on s, at the weights' rate."""
        thresholds = [mask.gate for mask in self.masks]
        optimizer = torch.optim.SGD(thresholds, lr=0.1, momentum=self.method.momentum)
        return [Trainables(optimizer, lambda _, rate: rate)]

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """One threshold for all has the sum of the gradients."""
        grads = [mask.gate.grad for mask in self.masks if mask.gate.grad is not None]
        if self.method.scope == "global" and grads:
            total = torch.stack(grads).sum()
            for mask in self.masks:
                mask.gate.grad = total.clone()

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Let s decay; freeze when it is time."""
        if self.frozen:
            return
        usual = 2 * self.method.decay * schedules.cosine(now.fraction) / now.total_steps
        self._decay = self._steered(now, usual) if self.method.steer else usual
        for mask in self.masks:
            mask.gate.mul_(math.exp(-self._decay)).clamp_(max=_HIGHEST)
        freeze_at = self.method.freeze_at
        if freeze_at is not None and (now.step + 1) / now.total_steps >= freeze_at:
            self.freeze()

    def _steered(self, now: Progress, usual: float) -> float:
        """The decay that leaves as many weights as wanted now, within what is allowed."""
        wanted = schedules.kept_fraction(
            now.fraction,
            self.keep / self.size,
            begin=self.method.ramp_begin,
            end=self.method.ramp_end,
        )
        count = round(wanted * self.size)
        if count >= self.size:
            return usual
        most = _STEERING * usual
        factor = decay_factor(self.weights, [mask.gate for mask in self.masks], count)
        return min(most, max(-most, -math.log(factor))) if factor > 0 else most

    def choose(self) -> list[Tensor]:
        """Exactly the budget by |w_e|, ties by |w|; or all that the thresholds leave."""
        pairs = list(zip(self.masks, self.weights, strict=True))
        values = [mask.settled_weight(weight).detach().abs() for mask, weight in pairs]
        if not self.method.exact:
            return [value > 0 for value in values]
        ties = [weight.detach().abs() for weight in self.weights]
        return select_top(values, self.keep, ties=ties, names=self.names)

    def metrics(self) -> dict[str, float]:
        """How sparse the thresholds have the network, and where they are."""
        if self.frozen:
            kept = sum(int(mask.hard.sum()) for mask in self.masks)
            return {"expected_sparsity": 1 - kept / self.size}
        above = sum(
            int((mask.training_weight(weight) != 0).sum())
            for mask, weight in zip(self.masks, self.weights, strict=True)
        )
        thresholds = torch.stack([torch.sigmoid(mask.gate) for mask in self.masks])
        return {
            "expected_sparsity": 1 - above / self.size,
            "mean_threshold": float(thresholds.mean()),
            "threshold_decay": self._decay,
        }

    def state_dict(self) -> dict[str, Any]:
        """The decay last used, and the masks once they are frozen."""
        return {**super().state_dict(), "decay": self._decay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self._decay = state["decay"]


def decay_factor(weights: Sequence[Tensor], logits: Sequence[Tensor], count: int) -> float:
    """f such that ``count`` of all weights satisfy |w| > σ(f s), where all s are negative.

    That is f > logit(|w|) / s, so f is the value of rank ``count`` (from 0) of these ratios. From
    |w| = 1 on a weight is above every threshold.
    """
    ratios = [
        torch.logit(weight.detach().abs().float().clamp(max=1.0)).flatten() / s
        for weight, s in zip(weights, logits, strict=True)
    ]
    return float(torch.cat(ratios).kthvalue(count + 1).values)
