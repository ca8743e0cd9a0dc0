"""Masks that a method stores and changes itself.

`StoredWeight` is one site with its active weights. The functions act on all sites of a masker. A
method whose masks never change uses `StoredMasker` or `keep_largest_scores` as they are; others
derive from `Masker` and call the functions.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from probmask.core.allocation import Spread
from probmask.core.selection import select_top
from probmask.core.shards import WHOLE
from probmask.masking.distributed import averaged
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.probe import check_measured
from probmask.masking.sites import Site


class StoredWeight(MaskedWeight):
    """One site with a stored boolean tensor of its active weights.

    ``outside`` is the fraction of the gradient that inactive weights get: 0, or 1 for an update in
    which the method needs the dense gradient.
    """

    saved = ("active",)

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.active = torch.ones_like(site.rows, dtype=torch.bool, requires_grad=False)
        self.outside = 0.0

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the active weights."""
        return keep_active(weight, self.active, outside=self.outside)


def keep_active(weight: Tensor, active: Tensor, *, outside: float = 0.0) -> Tensor:
    """Return w where active, else 0; the gradient is g where active, else outside·g."""
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


class ActiveWeight(Protocol):
    """Any masked weight with a boolean tensor of its active weights."""

    active: Tensor

    def invalidate(self) -> None:
        """Recompute the mask at its next use."""


def active_masks(masked: Sequence[ActiveWeight]) -> list[Tensor]:
    """Return the active weights of each site, not copied."""
    return [each.active for each in masked]


def count_active(masker: Masker, masked: Sequence[ActiveWeight]) -> int:
    """Return the number of active weights of all sites."""
    return sum(masker.shards.counts(active_masks(masked)))


def active_sparsity(masker: Masker, masked: Sequence[ActiveWeight]) -> dict[str, float]:
    """Return the metric ``expected_sparsity``."""
    return {"expected_sparsity": 1 - count_active(masker, masked) / masker.size}


def set_active(masked: Sequence[ActiveWeight], active: Sequence[Tensor]) -> None:
    """Make these the active weights. Inactive weights keep their values."""
    for each, chosen in zip(masked, active, strict=True):
        each.active.copy_(chosen)
        each.invalidate()


@torch.no_grad()
def activate_(
    masked: Sequence[ActiveWeight], weights: Sequence[Tensor], active: Sequence[Tensor]
) -> None:
    """Make these the active weights and set all others to zero."""
    set_active(masked, active)
    zero_inactive_(masked, weights)


@torch.no_grad()
def zero_inactive_(masked: Sequence[ActiveWeight], weights: Sequence[Tensor]) -> None:
    """Set inactive weights to zero, so that neither momentum nor weight decay moves them."""
    for each, weight in zip(masked, weights, strict=True):
        weight.masked_fill_(~each.active, 0.0)


def set_outside_gradient(masked: Sequence[StoredWeight], outside: float) -> None:
    """Set the fraction of the gradient that inactive weights get, from the next forward pass on."""
    for each in masked:
        each.outside = outside


def magnitude(weight: Tensor) -> Tensor:
    """|w| in fp32."""
    return weight.detach().abs().float()


def active_magnitudes(masked: Sequence[ActiveWeight], weights: Sequence[Tensor]) -> list[Tensor]:
    """|w| where active, else -1."""
    return [
        magnitude(weight).masked_fill(~each.active, -1.0)
        for each, weight in zip(masked, weights, strict=True)
    ]


def largest_active(
    masker: Masker, masked: Sequence[ActiveWeight], spread: Spread | None = None
) -> list[Tensor]:
    """Return the active weights, or the ``keep`` largest if there are more of them."""
    if count_active(masker, masked) == masker.keep:
        return [each.active.clone() for each in masked]
    values = active_magnitudes(masked, masker.weights)
    return select_by(masker, values, spread or Spread.over("global"))


def agreed(masker: Masker, values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the mean of each tensor over all ranks: before the first update they may differ.

    Shards are returned unchanged: every rank has other rows.
    """
    return averaged(values) if masker.shards is WHOLE else values


def select_by(
    masker: Masker,
    values: Sequence[Tensor],
    spread: Spread,
    *,
    keep: int | None = None,
    spare: float = 0.0,
    ties: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return masks of the ``keep`` largest values, by default of the masker's budget."""
    return spread.select(
        values,
        masker.keep if keep is None else keep,
        masker.names,
        spare=spare,
        ties=ties,
        shapes=masker.shapes,
        shards=masker.shards,
    )


class StoredMasker(Masker):
    """Stored masks that the method sets by `activate`, typically once before training.

    Example:
        def begin(self, sites, context):
            masker = StoredMasker(self, sites)
            masker.activate(my_masks(sites, masker.keep))
            return masker
    """

    masked: tuple[StoredWeight, ...]

    def __init__(
        self, method: Method, sites: Sequence[Site], *, spread: Spread | None = None
    ) -> None:
        super().__init__(sites, [StoredWeight(s) for s in sites], method.keep_of(sites, spread))

    def activate(self, active: Sequence[Tensor]) -> None:
        """Make these the active weights and set all others to zero."""
        activate_(self.masked, self.weights, active)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero."""
        zero_inactive_(self.masked, self.weights)

    def choose(self) -> list[Tensor]:
        """Return the active weights, or the largest of them if there are too many."""
        return largest_active(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)


def keep_largest_scores(
    method: Method, sites: Sequence[Site], scores: Callable[[], Sequence[Tensor]]
) -> StoredMasker:
    """Keep the weights with the largest scores of all layers.

    ``scores`` is not called if nothing is pruned.
    """
    masker = StoredMasker(method, sites)
    if masker.keep < masker.size:
        measured = scores()
        check_measured(f"attach({type(method).__name__})", masker.names, measured)
        masker.activate(select_top(measured, masker.keep, names=masker.names))
    masker.freeze()
    return masker
