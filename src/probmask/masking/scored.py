"""Weights that are in the network as long as their scores are high enough; scores are trained."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from probmask.core.allocation import uniform
from probmask.core.selection import select_top
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Masker, Progress
from probmask.masking.sites import Site


class ScoredWeight(MaskedWeight):
    """One site: w_e = w m. Weights learn where m = 1, scores everywhere: dL/ds = g w.

    g is the gradient of the effective weight. Scores begin at 0 and are fp32 whatever the weight
    is.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.score = nn.Parameter(torch.zeros_like(site.weight, dtype=torch.float32))
        self.active = torch.ones_like(site.weight, dtype=torch.bool, requires_grad=False)

    def training_weight(self, weight: Tensor) -> Tensor:
        """The active weights."""
        masked: Tensor = _Scored.apply(weight, self.score, self.active)  # type: ignore[no-untyped-call]
        return masked


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, score: Tensor, active: Tensor) -> Tensor:
        ctx.save_for_backward(weight, active)
        ctx.score_dtype = score.dtype
        return torch.where(active, weight, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, active = ctx.saved_tensors
        return torch.where(active, grad, 0.0), (grad * weight).to(ctx.score_dtype), None


class ScoredMasker(Masker):
    """Keeps the weights with the highest scores; among equal scores the largest.

    ``scope="layer"`` keeps the same fraction of each layer, ``"global"`` compares all scores.
    """

    masks: tuple[ScoredWeight, ...]

    def __init__(
        self, sites: Sequence[Site], keep: int, *, scope: Literal["global", "layer"]
    ) -> None:
        super().__init__(sites, [ScoredWeight(site) for site in sites])
        self.keep, self.scope = keep, scope
        self.size = sum(site.size for site in sites)
        if keep == self.size:
            self.freeze()  # everything is kept: there is nothing to learn

    @property
    def scores(self) -> list[Tensor]:
        """The scores of all sites."""
        return [mask.score for mask in self.masks]

    @property
    def active_count(self) -> int:
        """How many weights are in the network at the moment."""
        return sum(int(mask.active.sum()) for mask in self.masks)

    @abstractmethod
    def budget(self, now: Progress) -> int:
        """How many weights are kept at this moment."""

    def before_forward(self, now: Progress, draw: int) -> None:
        """Take the highest scores within the budget of this moment."""
        if not self.frozen:
            self.activate(self.highest(self.budget(now)))

    def highest(self, keep: int) -> list[Tensor]:
        """Masks of the ``keep`` highest scores."""
        ties = [weight.detach().abs() for weight in self.weights]
        if self.scope == "global":
            return select_top(self.scores, keep, ties=ties, names=self.names)
        counts = uniform([score.numel() for score in self.scores], keep)
        rows = zip(self.scores, counts, ties, self.names, strict=True)
        return [
            select_top([score], count, ties=[tie], names=[name])[0]
            for score, count, tie, name in rows
        ]

    def activate(self, active: Sequence[Tensor]) -> None:
        """Make these the active weights."""
        for mask, chosen in zip(self.masks, active, strict=True):
            mask.active.copy_(chosen)
            mask.outdate()

    def choose(self) -> list[Tensor]:
        """The highest scores of the final budget."""
        return self.highest(self.keep)

    def metrics(self) -> dict[str, float]:
        """How sparse the network is at the moment."""
        kept = self.keep if self.frozen else self.active_count
        return {"expected_sparsity": 1 - kept / self.size}

    def state_dict(self) -> dict[str, Any]:
        """The active weights, and the masks once they are frozen; scores are the model's own."""
        return {**super().state_dict(), "active": [mask.active.clone() for mask in self.masks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.activate(state["active"])
