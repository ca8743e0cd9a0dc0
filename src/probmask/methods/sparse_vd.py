"""Sparse variational dropout: learn each weight's noise; drop those that drown in it.

Molchanov, Ashukha and Vetrov, "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from probmask.checks import check_ramp, check_within
from probmask.core.noise import normal_
from probmask.core.schedules import warm_up
from probmask.core.steering import travel_rate
from probmask.core.variational import kl_divergence, log_alpha
from probmask.masking.gated import GatedWeight
from probmask.masking.protocol import Context, Progress
from probmask.masking.ranks import rank
from probmask.masking.sites import Site
from probmask.masking.steered import SteeredMasker, SteeredMethod

_START = -10.0  # ln σ² of every weight at first
_LEAST_VARIANCE = 1e-8  # of an output, so that its square root has a slope


@dataclass(frozen=True, kw_only=True)
class SparseVD(SteeredMethod):
    """Give every weight θ Gaussian noise of learned variance σ² = αθ², paid for by a divergence.

        output = conv(x, θ) + √conv(x², αθ²) ε,  ε ~ N(0, 1)
        loss + λ Σ KL(α) / n,  KL(α) ≈ k₁ - k₁ sig(k₂ + k₃ ln α) + ½ ln(1 + 1/α)

    Noise is added to the outputs of convolutions and linear layers (local reparameterisation), and
    to the weights themselves where there is no such output. ``strength`` is λ, n the number of
    weights: in the papers λ/n is 1/N for N training examples. It comes in linearly from
    ``warm_begin`` to ``warm_end`` of the training. A weight counts as kept while ln α <
    ``threshold``; evaluation uses θ without noise.
    """

    name: ClassVar[str] = "sparse-vd"
    summary: ClassVar[str] = "drops weights whose learned noise exceeds them"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2017
    reference: ClassVar[str] = (
        "Molchanov, Ashukha, Vetrov: Variational Dropout Sparsifies Deep Neural Networks, ICML 2017"
    )

    strength: float = 10.0
    threshold: float = 3.0
    warm_begin: float = 0.025
    warm_end: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("SparseVD", "strength", self.strength, 0, math.inf, meaning="weight of the KL")
        check_within("SparseVD", "threshold", self.threshold, -7.9, 7.9, meaning="a value of ln α")
        check_ramp(
            "SparseVD",
            warm_begin=self.warm_begin,
            warm_end=self.warm_end,
            meaning="the divergence comes in",
        )

    def begin(self, sites: Sequence[Site], context: Context) -> "SparseVDMasker":
        """Start with hardly any noise."""
        return SparseVDMasker(self, sites, context)


class NoisyWeight(GatedWeight):
    """One site: ln σ² as its gate.

    ``counters`` name the noise of the coming passes. ``local`` tells that hooks add it to outputs;
    if not, ``drawn`` is added to the weights.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site, torch.full(site.shape, _START))
        self.local = all(_has_output(module, name) for module, name in site.holders)
        self.counters: tuple[int, ...] = (0,)

    def training_weight(self, weight: Tensor) -> Tensor:
        """θ, with noise where no hook adds it to the output."""
        if self.local:
            return weight
        return weight + (self.variance(weight).sqrt() * self.drawn).to(weight.dtype)

    def variance(self, weight: Tensor) -> Tensor:
        """αθ², with α within its limits."""
        return log_alpha(weight, self.gate).exp() * weight.to(self.gate.dtype).square()


class OutputNoise:
    """A forward hook that adds to a layer's output the noise of its weights.

    The same noise for the same update and shape: a recomputed forward pass sees the same network.
    """

    def __init__(self, mask: NoisyWeight, place: int) -> None:
        self.mask, self.place = mask, place

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """The noisy output, in training."""
        mask = self.mask
        if mask.frozen or not mask.training:
            return None
        inputs: Tensor = args[0] if args else kwargs["input"]
        weight: Tensor = module.weight  # type: ignore[assignment]
        variance = _apply(module, inputs.square(), mask.variance(weight).to(weight.dtype))
        noise = normal_(torch.empty_like(output, requires_grad=False), *mask.counters, self.place)
        return output + (variance + _LEAST_VARIANCE).sqrt() * noise


def _has_output(module: nn.Module, name: str) -> bool:
    """Whether the module's output is its input times this weight, and made by its forward."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False  # attention reads this weight past the module's forward
    return name == "weight" and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)


def _apply(module: nn.Module, inputs: Tensor, weight: Tensor) -> Tensor:
    """The layer without bias, with another weight."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(inputs, weight)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    output: Tensor = module._conv_forward(inputs, weight, None)
    return output


class SparseVDMasker(SteeredMasker):
    """Sparse variational dropout at work on one model."""

    def __init__(self, method: SparseVD, sites: Sequence[Site], context: Context) -> None:
        rate = travel_rate(40, context.total_steps, most=0.5)
        noisy = [NoisyWeight(site) for site in sites]
        super().__init__(method, sites, noisy, context, gate_lr=rate)
        self.method = method
        self.noisy = noisy
        self.warmth = 0.0
        self.hooks: list[RemovableHandle] = []
        for mask, site in zip(noisy, sites, strict=True):
            if mask.local and not mask.frozen:
                for place, (module, _) in enumerate(site.holders):
                    hook = OutputNoise(mask, place)
                    self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def release(self) -> None:
        """Take the hooks off the layers."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def before_forward(self, now: Progress, draw: int) -> None:
        """Name the noise of the coming passes, this rank's own; let the divergence come in."""
        if self.frozen:
            return
        begin, end = self.method.warm_begin, self.method.warm_end
        since = max(0.0, now.fraction - begin)
        self.warmth = warm_up(since, until=end - begin) if end > begin or since == 0 else 1.0
        for index, mask in enumerate(self.noisy):
            mask.counters = (self.seed, rank(), now.step, draw, index)
            if not mask.local:
                normal_(mask.drawn, *mask.counters)

    def penalty(self) -> Tensor | float:
        """λ Σ KL(α) / n; what the steering adds to it acts on ln σ² alone.

        On θ a factor of hundreds would be a force towards 0 or away from it that no learning rate
        of the weights is made for.
        """
        if self.frozen:
            return 0.0
        return self.term() + (self.pressure - 1) * self._divergence(
            [weight.detach() for _, weight in self.gated]
        )

    def term(self) -> Tensor:
        """λ Σ KL(α) / n."""
        return self._divergence([weight for _, weight in self.gated])

    def _divergence(self, weights: Sequence[Tensor]) -> Tensor:
        parts = [
            kl_divergence(log_alpha(weight, mask.gate)).sum()
            for (mask, _), weight in zip(self.gated, weights, strict=True)
        ]
        return self.method.strength * self.warmth * torch.stack(parts).sum() / self.size

    def kept_of(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """How many ln α are below the threshold."""
        return (log_alpha(weight, mask.gate) < self.method.threshold).sum()

    @property
    def border(self) -> float:
        """The threshold of ln α."""
        return -self.method.threshold

    def criterion(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """-ln α."""
        return -log_alpha(weight, mask.gate.detach())
