"""VRPGE: channels are kept by probabilities that learn from losses alone.

Zhou et al., "Efficient Neural Network Training via Forward and Backward Propagation
Sparsification", NeurIPS 2021: the variance reduced policy gradient estimator.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from probmask.checks import check_choice, check_count, check_within
from probmask.core import schedules
from probmask.core.noise import uniform_
from probmask.core.projection import project_
from probmask.core.selection import select_top
from probmask.errors import InputError
from probmask.masking.budgets import checked_keep, whole_layers
from probmask.masking.gated import GatedWeight, output_shape, straight_through
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.probing import averaged
from probmask.masking.protocol import Context, Masker, Method, Progress, Trainables
from probmask.masking.sites import Site
from probmask.methods.dense import DenseWeight

# Adam's rate in the release, and the updates it was found for: 300 epochs of CIFAR.
_PAPER_RATE = 12e-3
_PAPER_UPDATES = 58_800
_EDGE = 1e-6  # √(s(1-s)) is at least the root of this


@dataclass(frozen=True, kw_only=True)
class VRPGE(Method):
    """Learn the probability of each output channel by a policy gradient with two masks.

        ∇s = 1/(J-1) Σ_j (L_j - mean L) (m_j - s) / √(s (1 - s)),  m_j ~ Bernoulli(s) per channel

    No gradient passes through the masks. After each update s is projected onto Σ c·s ≤ K, where a
    channel costs its weights. ``draws`` is J. ``prob_lr`` is Adam's rate; None takes the release's
    12e-3 and raises it for trainings shorter than its. From ``freeze_at`` on the masks are fixed
    and their weights fine-tuned (None: never), by default the release's 20 of 320 epochs.
    ``dense_last`` keeps the classifier whole; None does so where it takes at most half the budget.
    """

    name: ClassVar[str] = "vrpge"
    summary: ClassVar[str] = "probabilities of channels by a policy gradient"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2021
    reference: ClassVar[str] = (
        "Zhou, Zhang, Chen, Diao, Zhang: Efficient Neural Network Training via Forward and "
        "Backward Propagation Sparsification, NeurIPS 2021"
    )

    draws: int = 2
    prob_lr: float | None = None
    freeze_at: float | None = 300 / 320
    dense_last: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("VRPGE", "draws", self.draws, least=2, meaning="masks to compare per update")
        check_choice("VRPGE", "dense_last", self.dense_last, (None, True, False))
        if self.prob_lr is not None:
            check_within("VRPGE", "prob_lr", self.prob_lr, 1e-9, math.inf, meaning="Adam's rate")
        if self.freeze_at is not None:
            check_within(
                "VRPGE", "freeze_at", self.freeze_at, 0, 1, meaning="a part of the training"
            )

    def begin(self, sites: Sequence[Site], context: Context) -> "VRPGEMasker":
        """Give every channel the probability of the budget."""
        keep = checked_keep(self, sites)
        whole = whole_layers(self, sites, first=False, last=self.dense_last)
        left = keep - sum(sites[index].size for index in whole)
        among = sum(site.size for index, site in enumerate(sites) if index not in whole)
        masks = [
            DenseWeight(site)
            if index in whole
            else ChannelMask(site, torch.full(output_shape(site), left / among))
            for index, site in enumerate(sites)
        ]
        return VRPGEMasker(self, sites, masks, context, keep, left)


class ChannelMask(GatedWeight):
    """One site: probabilities of its output channels as the gate, their mask as ``drawn``."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """W m. The gradient that the gate gets this way is replaced by the policy gradient."""
        return weight * straight_through(self.drawn, self.gate).to(weight.dtype)


def policy_gradient(losses: Tensor, masks: Sequence[Tensor], prob: Tensor) -> Tensor:
    """1/(J-1) Σ_j (L_j - mean L) (m_j - s) / √(s (1 - s)).

    Zero where a loss is not finite, as with a scaler whose step is going to be skipped: one such
    gradient would make NaN of the probabilities for good.
    """
    if not torch.isfinite(losses).all():
        return torch.zeros_like(prob)
    above = (losses - losses.mean()) / (len(masks) - 1)
    scores = torch.stack([value * (mask - prob) for value, mask in zip(above, masks, strict=True)])
    return scores.sum(0) / (prob * (1 - prob)).clamp(min=_EDGE).sqrt()


class VRPGEMasker(Masker):
    """VRPGE at work on one model."""

    def __init__(
        self,
        method: VRPGE,
        sites: Sequence[Site],
        masks: Sequence[MaskedWeight],
        context: Context,
        keep: int,
        left: int,
    ) -> None:
        super().__init__(sites, masks)
        self.method = method
        self.draws = method.draws
        self.seed = context.seed
        self.keep, self.left = keep, left
        self.size = sum(site.size for site in sites)
        shortage = max(1.0, _PAPER_UPDATES / context.total_steps)
        self.prob_lr = method.prob_lr or _PAPER_RATE * math.cbrt(shortage)
        self.losses: dict[int, Tensor] = {}
        self.drawn: dict[int, list[Tensor]] = {}
        if keep == self.size:
            self.draws = 1
            for mask in self.masks:
                mask.frozen = True  # everything is kept: dense training

    @property
    def gated(self) -> list[tuple[ChannelMask, Tensor]]:
        """The sites with probabilities: mask and weight."""
        pairs = zip(self.masks, self.weights, strict=True)
        return [(mask, weight) for mask, weight in pairs if isinstance(mask, ChannelMask)]

    def trainables(self) -> list[Trainables]:
        """Adam on the probabilities, its rate on a cosine."""
        optimizer = torch.optim.Adam([mask.gate for mask, _ in self.gated], lr=self.prob_lr)
        return [Trainables(optimizer, lambda now, _: self.prob_lr * schedules.cosine(now.fraction))]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Draw the channels, the same on every rank."""
        if self.frozen:
            return
        for index, (mask, _) in enumerate(self.gated):
            noise = uniform_(mask.drawn, self.seed, now.step, draw, index)
            mask.drawn.copy_(noise < mask.gate)
        self.drawn[draw] = [mask.drawn.clone() for mask, _ in self.gated]

    def observe(self, loss: Tensor, draw: int) -> None:
        """Add to the loss of a draw, which may come in several parts."""
        self.losses[draw] = self.losses.get(draw, torch.zeros(())) + loss.float().cpu()

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Replace the gradient of the probabilities by the policy gradient."""
        if self.frozen:
            self.losses.clear()
            return
        if len(self.losses) < self.draws:
            raise InputError(
                f"VRPGE(draws={self.draws}): learns from losses, {len(self.losses)} were seen in "
                "this update; call sparsifier.observe(loss) after each backward pass."
            )
        (losses,) = averaged([torch.stack([self.losses[draw] for draw in range(self.draws)])])
        for index, (mask, _) in enumerate(self.gated):
            masks = [self.drawn[draw][index] for draw in range(self.draws)]
            mask.gate.grad = policy_gradient(losses.to(mask.gate.device), masks, mask.gate)
        self.losses.clear()

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Project the probabilities onto the budget; freeze when it is time."""
        if self.frozen:
            return
        probs = [mask.gate for mask, _ in self.gated]
        costs = [float(weight.numel() // mask.gate.numel()) for mask, weight in self.gated]
        project_(probs, self.left, costs=costs)
        if self.method.freeze_at is not None and now.fraction >= self.method.freeze_at:
            self.freeze()

    def freeze(self) -> None:
        """Fix the masks; from here on one pass per update is enough."""
        super().freeze()
        self.draws = 1

    def choose(self) -> list[Tensor]:
        """Whole channels in the order of their probability, and of the last one the largest part.

        Equal probabilities are decided by the channels' mean magnitude.
        """
        ranks = _ranks(self.gated)
        values = [torch.full_like(weight, math.inf, dtype=torch.float32) for weight in self.weights]
        for value, mask in zip(values, self.masks, strict=True):
            if isinstance(mask, ChannelMask):
                value.copy_(ranks.pop(0).expand_as(value))
        ties = [weight.detach().abs() for weight in self.weights]
        return select_top(values, self.keep, ties=ties, names=self.names)

    def metrics(self) -> dict[str, float]:
        """The expected sparsity, and how many channels are undecided."""
        expected = sum(
            float(mask.gate.mean(dtype=torch.float64)) * weight.numel()
            for mask, weight in self.gated
        )
        undecided = sum(
            int(((mask.gate > 0.05) & (mask.gate < 0.95)).sum()) for mask, _ in self.gated
        )
        kept = self.keep if self.frozen else self.keep - self.left + expected
        return {"expected_sparsity": 1 - kept / self.size, "undecided_channels": undecided}

    def state_dict(self) -> dict[str, Any]:
        """The seed of the draws, and the masks once they are frozen."""
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.seed = state["seed"]
        self.draws = 1 if self.frozen else self.method.draws


@torch.no_grad()
def _ranks(gated: Sequence[tuple[ChannelMask, Tensor]]) -> list[Tensor]:
    """The place of each channel in the order of probability, then of mean magnitude; all differ."""
    probs = torch.cat([mask.gate.flatten() for mask, _ in gated])
    sizes = torch.cat([_mean_size(mask, weight).flatten() for mask, weight in gated])
    by_size = torch.argsort(sizes, stable=True)
    order = by_size[torch.argsort(probs[by_size], stable=True)]
    places = torch.empty_like(probs)
    places[order] = torch.arange(len(order), device=probs.device, dtype=probs.dtype)
    shapes = [mask.gate.shape for mask, _ in gated]
    parts = torch.split(places, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _mean_size(mask: ChannelMask, weight: Tensor) -> Tensor:
    kept = mask.gate.shape
    others = [axis for axis, size in enumerate(kept) if size != weight.shape[axis]]
    magnitude = weight.detach().abs().float()
    return magnitude.mean(others, keepdim=True) if others else magnitude
