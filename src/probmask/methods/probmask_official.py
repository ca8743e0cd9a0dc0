"""ProbMask's step as the released code takes it, accidents included: ``compat="official"``."""

import math

import torch
from torch import Tensor

from probmask.core import schedules
from probmask.core.noise import uniform_
from probmask.core.released import official_mask, official_noise, official_project_
from probmask.masking.protocol import Progress
from probmask.masking.sites import Site
from probmask.methods.probabilities import PAPER_RATE, ProbMaskedWeight, ProbMasker

# Between which parts of the training the budget falls.
_RAMP = (0.16, 0.6)


class OfficialMaskedWeight(ProbMaskedWeight):
    """One site, its noise from two uniforms, its mask with the release's epsilon."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.drawn = torch.zeros_like(site.weight, dtype=torch.float32, requires_grad=False)

    @property
    def noise(self) -> Tensor:
        """The noise of the current draw."""
        return self.drawn

    def draw(self, seed: int, *counters: int) -> None:
        """The difference of two Gumbel variables, of a uniform variable each."""
        first = uniform_(torch.empty_like(self.drawn), seed, *counters, 0)
        second = uniform_(torch.empty_like(self.drawn), seed, *counters, 1)
        self.drawn.copy_(official_noise(first, second))

    def training_weight(self, weight: Tensor) -> Tensor:
        """The relaxed network, differentiated by autograd."""
        return weight * official_mask(self.prob, self.drawn, self.temperature).to(weight.dtype)


class OfficialProbMasker(ProbMasker):
    """The release at work: where it differs from `ProbMasker`, and nothing else."""

    clip_norm = 3.0
    freeze_at = 1.0
    site_mask = OfficialMaskedWeight
    fused = False

    def usual_rate(self, total_steps: int) -> float:
        """The paper's, however long the training."""
        return PAPER_RATE

    def progress(self, now: Progress) -> float:
        """In whole epochs."""
        return now.epoch_fraction

    def scheduled_budget(self, now: Progress) -> float:
        """The cubic between whole epochs, down to 1 - S, which need be no whole number."""
        begin, end = (math.floor(part * now.epochs) / now.epochs for part in _RAMP)
        final = 1 - self.method.sparsity
        return schedules.kept_fraction(self.progress(now), final, begin=begin, end=end)

    def project_(self, which: slice, fraction: float) -> None:
        """21 bisections in fp32."""
        probs = self.probs[which]
        official_project_(probs, fraction * sum(prob.numel() for prob in probs))
