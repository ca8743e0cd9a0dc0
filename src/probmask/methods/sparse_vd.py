"""Sparse variational dropout: learn the noise of each weight; prune weights below their noise.

Molchanov, Ashukha and Vetrov, "Variational Dropout Sparsifies Deep Neural Networks", ICML 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.hooks import RemovableHandle

from probmask.checks import Positive, Range, TrainingFraction, check_order
from probmask.core.noise import normal_
from probmask.core.schedules import warm_up
from probmask.core.steering import travel_rate
from probmask.masking.distributed import rank
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.gates import (
    adam_on_gates,
    gate_parameter,
    keep_highest,
    penalty_metrics,
    steer_or_freeze,
)

# The logarithm of alpha is clipped to plus or minus _LIMIT; _FLOOR is added to the squared weight.
_FLOOR, _LIMIT = 1e-8, 8.0
_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695  # of the approximated divergence
_START = -10.0  # the initial ln σ² of every weight
_LEAST_VARIANCE = 1e-8  # of an output, so that its square root has a derivative


@dataclass(frozen=True, kw_only=True)
class SparseVD(Method):
    """Add Gaussian noise of learned variance σ² = αθ² to every weight θ; penalize a divergence.

        output = conv(x, θ) + √conv(x², αθ²) ε,  ε ~ N(0, 1)
        loss + λ Σ KL(α) / n,  KL(α) ≈ k₁ - k₁ sig(k₂ + k₃ ln α) + ½ ln(1 + 1/α)

    n is the number of weights; in the papers λ/n is 1/N for N training examples. Noise is added to
    the outputs of convolutions and linear layers (local reparameterization), and to the weights
    where there is no such output. Evaluation uses θ without noise.

    In the paper, λ determines the sparsity only indirectly. Here λ is multiplied by a factor that
    is adapted during training, so that the number of kept weights falls cubically to the budget. At
    ``freeze_at`` exactly the budget is selected by -ln α; then only the kept weights are trained.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        strength: The weight λ of the divergence.
        threshold: A weight counts as kept while ln α is below this.
        warm_begin: Fraction of the training at which the divergence is added to the loss.
        warm_end: Fraction of the training at which it has its full weight; it rises linearly.
        steer: Adapt the factor on the divergence. False keeps it at 1.
        ramp_begin: Fraction of the training at which the number of kept weights begins to fall.
        ramp_end: Fraction of the training at which it reaches the budget.
        freeze_at: Fraction of the training at which the masks become final. None: the end.
        exact: False keeps all weights with ln α < threshold, as in the paper, whatever their
            number.
        gate_lr: Adam's rate for ln σ². None: high enough in a training of any length.
    """

    name: ClassVar[str] = "sparse-vd"
    summary: ClassVar[str] = "drops weights whose learned noise exceeds them"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2017
    reference: ClassVar[str] = (
        "Molchanov, Ashukha, Vetrov: Variational Dropout Sparsifies Deep Neural Networks, ICML 2017"
    )
    ordered: ClassVar[tuple[str, ...]] = ("ramp_begin", "ramp_end")

    strength: Annotated[float, Range(0, meaning="the weight of the divergence")] = 10.0
    threshold: Annotated[float, Range(-7.9, 7.9, "a value of ln α")] = 3.0
    warm_begin: TrainingFraction = 0.025
    warm_end: TrainingFraction = 0.1
    steer: bool = True
    ramp_begin: TrainingFraction = 0.1
    ramp_end: TrainingFraction = 0.6
    freeze_at: TrainingFraction | None = 0.8
    exact: bool = True
    gate_lr: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "warm_begin", "warm_end")

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its gates and their penalty are those of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "SparseVDMasker":
        """Start with almost no noise."""
        return SparseVDMasker(self, sites, context)


def log_alpha(weight: Tensor, log_variance: Tensor) -> Tensor:
    """ln α = ln σ² - ln θ², clipped to ±8: the noise of a weight relative to its size.

    Args:
        weight: θ, the mean of each weight.
        log_variance: ln σ², the variance of its noise.

    Returns:
        ln α, in the dtype of ``log_variance``.
    """
    square = weight.to(log_variance.dtype).square()
    return (log_variance - torch.log(square + _FLOOR)).clamp(-_LIMIT, _LIMIT)


def kl_divergence(log_alpha: Tensor) -> Tensor:
    """KL ≈ k₁ - k₁ σ(k₂ + k₃ ln α) + ½ ln(1 + 1/α)  (Molchanov et al., eq. 14).

    The divergence of N(θ, αθ²) from the log-uniform prior. The constant is chosen so that it goes
    to 0 for α → ∞. The approximation is accurate to 0.02.

    Args:
        log_alpha: ln α of each weight.

    Returns:
        The divergence for each weight.
    """
    fit = _K1 * torch.sigmoid(_K2 + _K3 * log_alpha)
    return _K1 - fit + 0.5 * torch.nn.functional.softplus(-log_alpha)


class NoisyWeight(MaskedWeight):
    """One site: ln σ² as its gate.

    ``counters`` identify the noise of the next passes. If ``local``, hooks add it to the outputs;
    else ``drawn`` is added to the weights.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gate = gate_parameter(site, torch.full(site.shape, _START))
        self.drawn = torch.zeros_like(self.gate, requires_grad=False)
        self.local = all(_has_output(module, name) for module, name in site.holders)
        self.counters: tuple[int, ...] = (0,)

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return θ, with noise where no hook adds it to the output."""
        if self.local:
            return weight
        return weight + (self.variance(weight).sqrt() * self.drawn).to(weight.dtype)

    def variance(self, weight: Tensor) -> Tensor:
        """αθ², with α within its limits."""
        return log_alpha(weight, self.gate).exp() * weight.to(self.gate.dtype).square()


class OutputNoise:
    """A forward hook that adds the noise of a layer's weights to its output.

    The noise depends on the update and the shape only: a recomputed forward pass gets the same.
    """

    def __init__(self, masked: NoisyWeight, place: int) -> None:
        self.masked, self.place = masked, place

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Return the noisy output in training, else None."""
        masked = self.masked
        if masked.frozen or not masked.training:
            return None
        inputs: Tensor = args[0] if args else kwargs["input"]
        weight: Tensor = module.weight  # type: ignore[assignment]
        variance = _apply(module, inputs.square(), masked.variance(weight).to(weight.dtype))
        noise = normal_(torch.empty_like(output, requires_grad=False), *masked.counters, self.place)
        return output + (variance + _LEAST_VARIANCE).sqrt() * noise


def _has_output(module: nn.Module, name: str) -> bool:
    """Return whether the forward of the module returns its input times this weight."""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False  # attention reads this weight without calling the module's forward
    return name == "weight" and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)


def _apply(module: nn.Module, inputs: Tensor, weight: Tensor) -> Tensor:
    """Apply the layer without bias and with another weight."""
    if isinstance(module, nn.Linear):
        return nn.functional.linear(inputs, weight)
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    output: Tensor = module._conv_forward(inputs, weight, None)
    return output


class SparseVDMasker(Masker):
    """Masker of sparse variational dropout."""

    saved = ("seed", "knob", "pressure")
    masked: tuple[NoisyWeight, ...]

    def __init__(self, method: SparseVD, sites: Sequence[Site], context: Context) -> None:
        super().__init__(sites, [NoisyWeight(site) for site in sites], method.keep_of(sites))
        self.method = method
        self.seed = context.seed
        self.gate_lr = method.gate_lr or travel_rate(40, context.total_steps, most=0.5)
        self.knob = self.pressure = 1.0
        self.warmth = 0.0  # the fraction of its weight that the divergence has
        self.hooks: list[RemovableHandle] = []
        if self.keep < self.size:
            for masked, site in zip(self.masked, sites, strict=True):
                self._add_hooks(masked, site)

    def _add_hooks(self, masked: NoisyWeight, site: Site) -> None:
        if masked.local:
            for place, (module, _) in enumerate(site.holders):
                hook = OutputNoise(masked, place)
                self.hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def release(self) -> None:
        """Remove the hooks from the layers."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def trainables(self) -> list[Trainables]:
        """Train ln σ² by Adam."""
        return adam_on_gates([masked.gate for masked in self.masked], self.gate_lr)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set the noise of the next passes, different on each rank, and the divergence's weight."""
        if self.frozen:
            return
        begin, end = self.method.warm_begin, self.method.warm_end
        since = max(0.0, now.fraction - begin)
        self.warmth = warm_up(since, until=end - begin) if end > begin or since == 0 else 1.0
        for index, masked in enumerate(self.masked):
            masked.counters = (self.seed, rank(), now.step, draw, index)
            if not masked.local:
                normal_(masked.drawn, *masked.counters)

    def penalty(self) -> Tensor | float:
        """λ Σ KL(α) / n. The factor of the steering acts on ln σ² only.

        Applied to θ, a factor of several hundred would move the weights too fast, because their
        learning rate is not chosen for it.
        """
        if self.frozen:
            return 0.0
        steering = self._divergence([weight.detach() for weight in self.weights])
        return self._divergence(self.weights) + (self.pressure - 1) * steering

    def _divergence(self, weights: Sequence[Tensor]) -> Tensor:
        values = [
            kl_divergence(log_alpha(weight, masked.gate)).sum()
            for masked, weight in zip(self.masked, weights, strict=True)
        ]
        return self.method.strength * self.warmth * torch.stack(values).sum() / self.size

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Steer the divergence; freeze at ``freeze_at``."""
        if self.frozen:
            return
        steer_or_freeze(self, self.method, now)

    @torch.no_grad()
    def log_alphas(self) -> list[Tensor]:
        """Return ln α of all sites."""
        pairs = zip(self.masked, self.weights, strict=True)
        return [log_alpha(weight, masked.gate) for masked, weight in pairs]

    def kept_now(self) -> int:
        """Return the number of weights with ln α below the threshold."""
        threshold = self.method.threshold
        return int(torch.stack([(noise < threshold).sum() for noise in self.log_alphas()]).sum())

    def choose(self) -> list[Tensor]:
        """Return the weights with the lowest ln α."""
        values = [-noise for noise in self.log_alphas()]
        border = None if self.method.exact else -self.method.threshold
        return keep_highest(self, values, border=border)

    def metrics(self) -> dict[str, float]:
        """Return the current sparsity and the factor on the divergence."""
        return penalty_metrics(self, self.kept_now, self.pressure)
