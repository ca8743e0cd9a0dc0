"""Soft threshold reparameterization (STR): a learned threshold per layer.

Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity", ICML 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Momentum, Range, TrainingFraction
from probmask.core import schedules
from probmask.core.selection import nth_largest
from probmask.core.shards import WHOLE, Shards
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.gates import gate_parameter, keep_highest, number_in_masks

# Steering decays s at most this many times faster than the paper's recipe, or lets it grow as fast.
_STEERING = 5.0
# s < 0: decay towards 0 cannot reach a threshold of ½ or more.
_HIGHEST = -1e-3


@dataclass(frozen=True, kw_only=True)
class STR(Method):
    """Learn a threshold per layer that shrinks all weights of the layer.

        w_e = sign(w) max(|w| - σ(s), 0)        ∂L/∂s = -σ'(s) Σ_{|w| > σ(s)} sign(w) ∂L/∂w_e

    s is trained like the weights, at their rate. It starts so low that nothing is pruned; weight
    decay moves it towards 0, against the gradient of the loss.

    In the paper, the decay determines the sparsity only indirectly. With ``steer``, the decay of
    each update is chosen so that the number of weights above their thresholds falls cubically to
    the budget; it is at most five times the recipe's and may be negative. At ``freeze_at`` exactly
    the budget is selected by |w_e|; then only the kept weights w_e are trained, without a
    threshold.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        s_init: The initial s.
        decay: The total decay: without a gradient s ends at s_init exp(-decay). It is 11.5 in the
            paper's ResNet-50 recipe, and here in a training of any length.
        momentum: The momentum of SGD on s.
        scope: ``"layer"`` learns a threshold per layer, ``"global"`` one for all layers.
        steer: Adapt the decay. False uses the recipe's.
        ramp_begin: Fraction of the training at which the number of kept weights begins to fall.
        ramp_end: Fraction of the training at which it reaches the budget.
        freeze_at: Fraction of the training at which the masks become final. None: the end.
        exact: False keeps all weights above their thresholds, as in the paper, whatever their
            number.
    """

    name: ClassVar[str] = "str"
    summary: ClassVar[str] = "learns a soft threshold per layer"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "Kusupati, Ramanujan, Somani, Wortsman, Jain, Kakade, Farhadi: Soft Threshold Weight "
        "Reparameterization for Learnable Sparsity, ICML 2020"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    s_init: Annotated[float, Range(-1e30, _HIGHEST, "the logit of a threshold")] = -3200.0
    decay: Annotated[float, Range(0, meaning="the logarithm of the total decay")] = 11.5
    momentum: Momentum = 0.9
    scope: Literal["layer", "global"] = "layer"
    steer: bool = True
    ramp_begin: TrainingFraction = 0.25
    ramp_end: TrainingFraction = 0.6
    freeze_at: TrainingFraction | None = 0.8
    exact: bool = True

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "STRMasker":
        """Start with thresholds of zero."""
        return STRMasker(self, sites)


def soft_threshold(weight: Tensor, threshold: Tensor) -> Tensor:
    """sign(w) max(|w| - T, 0), as w - clip(w, -T, T): exactly zero below T, never -0."""
    threshold = threshold.to(weight.dtype)
    return weight - torch.clamp(weight, -threshold, threshold)


class SoftThresholdedWeight(MaskedWeight):
    """One site: its weights shrunk by the threshold σ(s), s the gate."""

    def __init__(self, site: Site, s_init: float) -> None:
        super().__init__(site)
        self.gate = gate_parameter(site, torch.tensor(s_init))

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return w_e."""
        return soft_threshold(weight, torch.sigmoid(self.gate))

    def final_weight(self, weight: Tensor) -> Tensor:
        """Return w_e."""
        return self.training_weight(weight)


class STRMasker(Masker):
    """Masker of STR."""

    saved = ("_decay",)
    masked: tuple[SoftThresholdedWeight, ...]

    def __init__(self, method: STR, sites: Sequence[Site]) -> None:
        masked = [SoftThresholdedWeight(site, method.s_init) for site in sites]
        super().__init__(sites, masked, method.keep_of(sites))
        self.method = method
        self._decay = 0.0  # of the last update

    @property
    def gates(self) -> list[Tensor]:
        """The parameters s of all sites."""
        return [masked.gate for masked in self.masked]

    def trainables(self) -> list[Trainables]:
        """Train s by SGD, at the rate of the weights."""
        optimizer = torch.optim.SGD(self.gates, lr=0.1, momentum=self.method.momentum)
        return [Trainables(optimizer, lambda _, rate: rate)]

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Sum the gradients over all layers if they share one threshold."""
        grads = [gate.grad for gate in self.gates if gate.grad is not None]
        if self.method.scope == "global" and grads:
            total = torch.stack(grads).sum()
            for gate in self.gates:
                gate.grad = total.clone()

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Decay s; freeze at ``freeze_at``."""
        if self.frozen:
            return
        usual = 2 * self.method.decay * schedules.cosine(now.fraction) / now.total_steps
        self._decay = self._steered(now, usual) if self.method.steer else usual
        for gate in self.gates:
            gate.mul_(math.exp(-self._decay)).clamp_(max=_HIGHEST)
        if self.method.freeze_at is not None and now.next_fraction >= self.method.freeze_at:
            self.freeze()

    def _steered(self, now: Progress, usual: float) -> float:
        """Return the decay that leaves the wanted number of weights, within its limits."""
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
        factor = decay_factor(self.weights, self.gates, count, self.size, self.shards)
        return min(most, max(-most, -math.log(factor))) if factor > 0 else most

    def choose(self) -> list[Tensor]:
        """Return the weights with the largest |w_e|; ties are decided by |w|."""
        pairs = zip(self.masked, self.weights, strict=True)
        values = [masked.final_weight(weight).detach().abs() for masked, weight in pairs]
        return keep_highest(self, values, border=None if self.method.exact else 0.0)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity; until the masks are frozen, threshold and decay too."""
        if self.frozen:
            return {"expected_sparsity": 1 - number_in_masks(self) / self.size}
        pairs = zip(self.masked, self.weights, strict=True)
        above = sum(self.shards.counts([masked.training_weight(w) for masked, w in pairs]))
        thresholds = torch.stack([torch.sigmoid(gate) for gate in self.gates])
        return {
            "expected_sparsity": 1 - above / self.size,
            "mean_threshold": float(thresholds.mean()),
            "threshold_decay": self._decay,
        }


def decay_factor(
    weights: Sequence[Tensor],
    logits: Sequence[Tensor],
    count: int,
    size: int | None = None,
    shards: Shards = WHOLE,
) -> float:
    """Return f such that ``count`` of all weights satisfy |w| > σ(f s); all s are negative.

    That is f > logit(|w|) / s, so f is the value of rank ``count`` (from 0) of these ratios. A
    weight with |w| ≥ 1 is above every threshold.
    """
    ratios = [
        torch.logit(weight.detach().abs().float().clamp(max=1.0)).flatten() / s
        for weight, s in zip(weights, logits, strict=True)
    ]
    if shards.count > 1:
        assert size is not None
        return nth_largest(ratios, size - count, shards, [""] * len(ratios))
    return float(torch.cat(ratios).kthvalue(count + 1).values)
