"""VRPGE: each channel has a probability of being kept, trained from the losses alone.

Zhou et al., "Efficient Neural Network Training via Forward and Backward Propagation
Sparsification", NeurIPS 2021: the variance reduced policy gradient estimator.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from probmask.checks import Positive, Range, TrainingFraction
from probmask.core.allocation import Spread
from probmask.core.noise import uniform_
from probmask.core.projection import project_
from probmask.errors import InputError
from probmask.masking.distributed import averaged
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.dense import DenseWeight
from probmask.methods.families.gates import (
    BernoulliWeight,
    adam_on_gates,
    keep_highest,
    output_shape,
)

# Adam's rate in the released code, and the number of updates it was tuned for (CIFAR, 300 epochs).
_PAPER_RATE = 12e-3
_PAPER_UPDATES = 58_800
_EDGE = 1e-6  # the least s (1 - s) under the square root


@dataclass(frozen=True, kw_only=True)
class VRPGE(Method):
    """Learn the probability of each output channel by a policy gradient with two masks.

        ∇s = 1/(J-1) Σ_j (L_j - mean L) (m_j - s) / √(s (1 - s)),  m_j ~ Bernoulli(s) per channel

    No gradient passes through the masks. After each update s is projected onto Σ c·s ≤ K, where
    the cost c of a channel is its number of weights.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        draws: Number of masks J sampled per update.
        prob_lr: Adam's rate for the probabilities. None: 12e-3 as in the released code, and more
            for trainings shorter than its own.
        freeze_at: Fraction of the training at which the masks become final; then the kept weights
            are fine-tuned, by default as in the released code (20 of 320 epochs). None: the end.
        dense_last: Leave the last layer dense. None: if it holds at most half of the kept weights.
    """

    name: ClassVar[str] = "vrpge"
    summary: ClassVar[str] = "probabilities of channels by a policy gradient"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2021
    reference: ClassVar[str] = (
        "Zhou, Zhang, Chen, Diao, Zhang: Efficient Neural Network Training via Forward and "
        "Backward Propagation Sparsification, NeurIPS 2021"
    )

    draws: Annotated[int, Range(2, meaning="a number of masks to compare per update")] = 2
    prob_lr: Positive | None = None
    freeze_at: TrainingFraction | None = 300 / 320
    dense_last: bool | None = None

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "its gates and their penalty are those of whole layers"

    def begin(self, sites: Sequence[Site], context: Context) -> "VRPGEMasker":
        """Start with the same probability for every channel."""
        return VRPGEMasker(self, sites, context)


def policy_gradient(losses: Tensor, masks: Sequence[Tensor], prob: Tensor) -> Tensor:
    """1/(J-1) Σ_j (L_j - mean L) (m_j - s) / √(s (1 - s)).

    Zero if a loss is not finite, as in a step that a scaler will skip: one such gradient would make
    the probabilities NaN permanently.
    """
    if not torch.isfinite(losses).all():
        return torch.zeros_like(prob)
    above = (losses - losses.mean()) / (len(masks) - 1)
    scores = torch.stack([value * (mask - prob) for value, mask in zip(above, masks, strict=True)])
    return scores.sum(0) / (prob * (1 - prob)).clamp(min=_EDGE).sqrt()


class VRPGEMasker(Masker):
    """Masker of VRPGE. Layers without probabilities stay dense."""

    saved = ("seed",)

    def __init__(self, method: VRPGE, sites: Sequence[Site], context: Context) -> None:
        spread = Spread.fitting(
            "global",
            [site.size for site in sites],
            method.keep_of(sites),
            dense_first=False,
            dense_last=method.dense_last,
        )
        keep = method.keep_of(sites, spread)
        whole = spread.dense(len(sites))
        self.left = keep - sum(sites[index].size for index in whole)
        among = sum(site.size for index, site in enumerate(sites) if index not in whole)
        masked = [
            DenseWeight(site)
            if index in whole
            else BernoulliWeight(site, torch.full(output_shape(site), self.left / among))
            for index, site in enumerate(sites)
        ]
        super().__init__(sites, masked, keep)
        self.method = method
        self.seed = context.seed
        shortage = max(1.0, _PAPER_UPDATES / context.total_steps)
        self.prob_lr = method.prob_lr or _PAPER_RATE * math.cbrt(shortage)
        self.losses: dict[int, Tensor] = {}
        self.drawn: dict[int, list[Tensor]] = {}

    @property
    def gated(self) -> list[tuple[BernoulliWeight, Tensor]]:
        """The sites with probabilities: masked weight and weight."""
        pairs = zip(self.masked, self.weights, strict=True)
        return [(each, weight) for each, weight in pairs if isinstance(each, BernoulliWeight)]

    def trainables(self) -> list[Trainables]:
        """Train the probabilities by Adam."""
        return adam_on_gates([masked.gate for masked, _ in self.gated], self.prob_lr)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Draw the channels, the same on every rank. Frozen masks need one draw per update."""
        self.draws = 1 if self.frozen else self.method.draws
        if self.frozen:
            return
        for index, (masked, _) in enumerate(self.gated):
            noise = uniform_(masked.drawn, self.seed, now.step, draw, index)
            masked.drawn.copy_(noise < masked.gate)
        self.drawn[draw] = [masked.drawn.clone() for masked, _ in self.gated]

    def observe(self, loss: Tensor, draw: int) -> None:
        """Add to the loss of a draw; accumulated batches contribute one after the other."""
        self.losses[draw] = self.losses.get(draw, torch.zeros(())) + loss.float().cpu()

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Replace the gradient of the probabilities by the policy gradient."""
        if self.frozen:
            self.losses.clear()
            return
        if len(self.losses) < self.draws:
            raise InputError(
                f"VRPGE(draws={self.draws}): it learns from losses, and this update has seen "
                f"{len(self.losses)}; call sparsifier.observe(loss) after each backward pass."
            )
        (losses,) = averaged([torch.stack([self.losses[draw] for draw in range(self.draws)])])
        for index, (masked, _) in enumerate(self.gated):
            masks = [self.drawn[draw][index] for draw in range(self.draws)]
            masked.gate.grad = policy_gradient(losses.to(masked.gate.device), masks, masked.gate)
        self.losses.clear()

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Project the probabilities onto the budget; freeze at ``freeze_at``."""
        if self.frozen:
            return
        probs = [masked.gate for masked, _ in self.gated]
        costs = [float(weight.numel() // masked.gate.numel()) for masked, weight in self.gated]
        project_(probs, self.left, costs=costs)
        if self.method.freeze_at is not None and now.fraction >= self.method.freeze_at:
            self.freeze()

    def choose(self) -> list[Tensor]:
        """Return whole channels in the order of their probability.

        Of the last channel, only the largest weights may fit. Among equal probabilities, the
        channel with the larger mean magnitude comes first.
        """
        ranks = iter(_ranks(self.gated))
        values = [
            next(ranks).expand_as(weight)
            if isinstance(masked, BernoulliWeight)
            else torch.full_like(weight, math.inf, dtype=torch.float32)
            for masked, weight in zip(self.masked, self.weights, strict=True)
        ]
        return keep_highest(self, values)

    def metrics(self) -> dict[str, float]:
        """Return the expected sparsity and the number of undecided channels."""
        expected = sum(
            float(masked.gate.mean(dtype=torch.float64)) * weight.numel()
            for masked, weight in self.gated
        )
        undecided = sum(
            int(((masked.gate > 0.05) & (masked.gate < 0.95)).sum()) for masked, _ in self.gated
        )
        kept = self.keep if self.frozen else self.keep - self.left + expected
        return {"expected_sparsity": 1 - kept / self.size, "undecided_channels": undecided}


@torch.no_grad()
def _ranks(gated: Sequence[tuple[BernoulliWeight, Tensor]]) -> list[Tensor]:
    """Return the rank of each channel by probability, then by mean magnitude; no two are equal."""
    probs = torch.cat([masked.gate.flatten() for masked, _ in gated])
    sizes = torch.cat([_mean_magnitude(masked, weight).flatten() for masked, weight in gated])
    by_size = torch.argsort(sizes, stable=True)
    order = by_size[torch.argsort(probs[by_size], stable=True)]
    places = torch.empty_like(probs)
    places[order] = torch.arange(len(order), device=probs.device, dtype=probs.dtype)
    shapes = [masked.gate.shape for masked, _ in gated]
    parts = torch.split(places, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _mean_magnitude(masked: BernoulliWeight, weight: Tensor) -> Tensor:
    """Return the mean |w| of each channel, in the shape of the gate."""
    kept = masked.gate.shape
    others = [axis for axis, size in enumerate(kept) if size != weight.shape[axis]]
    magnitude = weight.detach().abs().float()
    return magnitude.mean(others, keepdim=True) if others else magnitude
