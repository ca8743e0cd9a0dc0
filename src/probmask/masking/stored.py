"""Masks that a method holds and changes itself: which weights are active at the moment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from probmask.core.allocation import Spread
from probmask.core.selection import select_top
from probmask.masking.budgets import checked_keep
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Masker, Method, Progress
from probmask.masking.sites import Site


def kept(weight: Tensor, active: Tensor, *, outside: float = 0.0) -> Tensor:
    """w where active, else 0; the gradient passes where active, and ``outside`` of it elsewhere.

    ``outside=1`` is the straight-through gradient: that of the effective weight, everywhere.
    """
    masked: Tensor = _Kept.apply(weight, active, outside)  # type: ignore[no-untyped-call]
    return masked


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, active: Tensor, outside: float) -> Tensor:
        ctx.save_for_backward(active)
        ctx.outside = outside
        return torch.where(active, weight, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.outside == 1:
            return grad, None, None
        (active,) = ctx.saved_tensors
        elsewhere = 0.0 if ctx.outside == 0 else ctx.outside * grad
        return torch.where(active, grad, elsewhere), None, None


class StoredMask(MaskedWeight):
    """One site whose active weights the method says.

    ``gradient_outside`` is the part of the gradient that inactive weights get: 0, or 1 for an
    update in which the method wants to see the dense gradient.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.active = torch.ones_like(site.weight, dtype=torch.bool, requires_grad=False)
        self.gradient_outside = 0.0

    def training_weight(self, weight: Tensor) -> Tensor:
        """The active weights."""
        return kept(weight, self.active, outside=self.gradient_outside)


class StoredMasker(Masker):
    """A method that holds its masks.

    Inactive weights are set to zero after every update, so that neither momentum nor weight decay
    moves them. If training ended before the masks have come down to the budget, the largest active
    weights would stay. A budget that ``spread`` cannot meet is refused.
    """

    masks: tuple[StoredMask, ...]

    def __init__(
        self,
        method: Method,
        sites: Sequence[Site],
        *,
        spread: Spread | None = None,
        masks: Sequence[StoredMask] = (),
    ) -> None:
        super().__init__(sites, masks or [StoredMask(site) for site in sites])
        self.size = sum(site.size for site in sites)
        self.keep = checked_keep(method, sites, spread)

    @property
    def active(self) -> list[Tensor]:
        """Which weights are in the network at the moment, site by site."""
        return [mask.active for mask in self.masks]

    @property
    def active_count(self) -> int:
        """How many weights are in the network at the moment."""
        return sum(int(mask.active.sum()) for mask in self.masks)

    @torch.no_grad()
    def activate(self, active: Sequence[Tensor]) -> None:
        """Make these the active weights; all others become zero."""
        for mask, chosen in zip(self.masks, active, strict=True):
            mask.active.copy_(chosen)
            mask.outdate()
        self.zero_inactive_()

    @torch.no_grad()
    def zero_inactive_(self) -> None:
        """Set all weights to zero that are not in the network."""
        for mask, weight in zip(self.masks, self.weights, strict=True):
            weight.masked_fill_(~mask.active, 0.0)

    def want_dense_gradient(self, wanted: bool) -> None:
        """Let inactive weights get their gradient too, or no more; from the next forward pass."""
        for mask in self.masks:
            mask.gradient_outside = 1.0 if wanted else 0.0

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero."""
        self.zero_inactive_()

    def choose(self) -> list[Tensor]:
        """The active weights, or the largest of them if there are more than the budget."""
        if self.active_count == self.keep:
            return [active.clone() for active in self.active]
        values = [
            torch.where(mask.active, weight.detach().abs().float(), -1.0)
            for mask, weight in zip(self.masks, self.weights, strict=True)
        ]
        return select_top(values, self.keep, names=self.names)

    def metrics(self) -> dict[str, float]:
        """How sparse the network is at the moment."""
        return {"expected_sparsity": 1 - self.active_count / self.size}

    def state_dict(self) -> dict[str, Any]:
        """The active weights, and the masks once they are frozen."""
        return {**super().state_dict(), "active": [active.clone() for active in self.active]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        for mask, active in zip(self.masks, state["active"], strict=True):
            mask.active.copy_(active)
            mask.outdate()


def chosen_at_once(
    method: Method, sites: Sequence[Site], scores: Callable[[], Sequence[Tensor]]
) -> StoredMasker:
    """Keep the weights with the largest scores of all layers, for good; 0 needs no scores."""
    masker = StoredMasker(method, sites)
    if masker.keep < masker.size:
        masker.activate(select_top(scores(), masker.keep, names=masker.names))
    masker.freeze()
    return masker
