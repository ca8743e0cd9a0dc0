"""The step of ProbMask's released code, defects included: ``ProbMask(compat="official")``.

It differs from the paper and from `probmask.methods.probmask.learned` in its noise (two uniforms
and an epsilon), in its projection (21 bisections in fp32), in clipping the joint gradient to norm 3
and in scheduling everything per epoch. Two differences decide which pruned weights can return:

- At s = 1 the epsilon makes the slope exactly zero at every temperature, so a probability of 1
  would never change. But while the whole network is kept, the bisection does not notice that the
  constraint already holds, and it subtracts 2^-21. This moves every probability away from 1 once.
- At s = 0 the slope is that of s = 1e-20: heavy-tailed at temperature 1, zero below 0.5.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from probmask.core import schedules
from probmask.core.noise import uniform_
from probmask.masking.distributed import rank
from probmask.masking.masker import Histogram, Masker, Progress, Trainables
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.probmask.budget import Budget
from probmask.methods.probmask.probabilities import (
    COLLAPSE_ADVICE,
    prob_histogram,
    prob_metrics,
    sample_masks,
)

_RAMP = (0.16, 0.6)  # fractions of the training between which the budget falls
_CLIP_NORM = 3.0
_EPS = 1e-20
_TOLERANCE = 1e-3
_MAX_HALVINGS = 21


def official_noise(u0: Tensor, u1: Tensor) -> Tensor:
    """g = -ln(ln(u₀ + ε) / ln(u₁ + ε) + ε): the difference of two Gumbel variables."""
    return -torch.log(torch.log(u0 + _EPS) / torch.log(u1 + _EPS) + _EPS)


def official_mask(prob: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
    """m = σ((ln(s + ε) - ln(1 - s + ε) + g) / τ), differentiated by autograd."""
    logit = torch.log(prob + _EPS) - torch.log(1.0 - prob + _EPS)
    return torch.sigmoid((logit + noise) * temperature.reciprocal())


def official_project_(probs: Sequence[Tensor], keep: float) -> float:
    """s ← clip(s - v, 0, 1) in place, with v from at most 21 halvings of [0, max s]; return v.

    Sums are in fp32, and the search stops when Σ s is within 1e-3 of ``keep``.
    """
    with torch.no_grad():
        shift = _bisect(probs, keep)
        for prob in probs:
            prob.sub_(shift).clamp_(0, 1)
    return float(shift)


def _bisect(probs: Sequence[Tensor], keep: float) -> Tensor:
    def excess(v: Tensor) -> Tensor:
        total = torch.zeros_like(v)
        for prob in probs:
            total = total + (prob - v).clamp(0, 1).sum()
        return total - keep

    low = torch.zeros((), dtype=probs[0].dtype, device=probs[0].device)
    if excess(low) < 0:
        return low
    high = torch.stack([low, *(prob.max() for prob in probs)]).max()
    middle = (low + high) / 2
    for _ in range(1, _MAX_HALVINGS):
        gap = excess(middle)
        if abs(gap) < _TOLERANCE:
            break
        low, high = (low, middle) if gap < 0 else (middle, high)
        middle = (low + high) / 2
    return middle


class OfficialWeight(MaskedWeight):
    """One site: its probabilities, and the noise and temperature of the current draw."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.prob = nn.Parameter(torch.ones_like(site.weight, dtype=torch.float32))
        self.noise = torch.zeros_like(self.prob, requires_grad=False)
        self.temperature = torch.ones((), device=site.weight.device)

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the weight under the relaxed mask, differentiated by autograd."""
        return weight * official_mask(self.prob, self.noise, self.temperature).to(weight.dtype)


class OfficialMasker(Masker):
    """Masker with the arithmetic of the released code."""

    saved = ("seed", "_temperature", "_kept_fraction")
    collapse_advice = COLLAPSE_ADVICE
    masked: tuple[OfficialWeight, ...]

    def __init__(
        self,
        sites: Sequence[Site],
        budget: Budget,
        *,
        epochs: int,
        seed: int,
        prob_lr: float,
        draws: int,
        temperatures: tuple[float, float],
        sample: bool,
        kept_fraction: float,
    ) -> None:
        super().__init__(sites, [OfficialWeight(site) for site in sites], budget.keep)
        self.budget, self.seed, self.draws, self.sample = budget, seed, draws, sample
        self.prob_lr, self.temperatures = prob_lr, temperatures
        self.final_fraction = kept_fraction
        self.ramp = tuple(math.floor(fraction * epochs) / epochs for fraction in _RAMP)
        self._temperature = self._kept_fraction = 1.0

    @property
    def probs(self) -> list[Tensor]:
        """The probabilities of all sites."""
        return [masked.prob for masked in self.masked]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set temperature and budget of this epoch; sample the noise of this rank."""
        if self.frozen:
            return
        start, end = self.temperatures
        self._temperature = schedules.temperature(now.epoch_fraction, start=start, end=end)
        begin, stop = self.ramp
        self._kept_fraction = schedules.kept_fraction(
            now.epoch_fraction, self.final_fraction, begin=begin, end=stop
        )
        for index, masked in enumerate(self.masked):
            masked.temperature.fill_(self._temperature)
            counters = (rank(), now.step, draw, index)
            first = uniform_(torch.empty_like(masked.noise), self.seed, *counters, 0)
            second = uniform_(torch.empty_like(masked.noise), self.seed, *counters, 1)
            masked.noise.copy_(official_noise(first, second))

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Clip the joint gradient of weights and probabilities to norm 3."""
        if self.keep < self.size:
            nn.utils.clip_grad_norm_([*optimizers.parameters, *self.probs], _CLIP_NORM)

    def trainables(self) -> list[Trainables]:
        """Train the probabilities by Adam; its rate follows a cosine over epochs."""

        def learning_rate(now: Progress, _: float) -> float:
            return self.prob_lr * schedules.cosine(now.epoch_fraction)

        return [Trainables(torch.optim.Adam(self.probs, lr=self.prob_lr), learning_rate)]

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Project the probabilities of all layers, or those of each layer, onto the budget."""
        if self.frozen:
            return
        groups = [[prob] for prob in self.probs] if self.budget.per_layer else [self.probs]
        for probs in groups:
            amount = self._kept_fraction * sum(prob.numel() for prob in probs)
            official_project_(probs, amount)

    def choose(self) -> list[Tensor]:
        """Return masks of exactly the budget by probability (ties by magnitude), or a sample."""
        if self.sample:
            return sample_masks(self.probs, self.seed)
        ties = [weight.detach().abs() for weight in self.weights]
        return self.budget.select(self.probs, self.budget.final, ties=ties)

    def metrics(self) -> dict[str, float]:
        """Return temperature, budget, sparsity and undecided probabilities per kept weight."""
        return prob_metrics(self, self.probs, self._temperature, self._kept_fraction)

    def histograms(self) -> dict[str, Histogram]:
        """Return the histogram of the probabilities while they are trained."""
        return {} if self.frozen else prob_histogram(self, self.probs)
