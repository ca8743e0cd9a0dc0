"""Exchange of active weights for inactive ones: random initial masks, drop and grow.

The methods that train a sparse network from the start (RigL, SET, SNFS, GraNet, DSR, Deep R) draw
its masks at random, drop some weights and grow the same number. They differ in these numbers and in
the scores by which weights are grown.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from probmask.core.allocation import Spread
from probmask.core.noise import Stream, uniform_
from probmask.core.schedules import cosine
from probmask.core.selection import select_top
from probmask.core.shards import WHOLE, Shards
from probmask.masking.masker import Masker
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.stored import StoredWeight, activate_, active_masks, magnitude

Allocation = Literal["uniform", "er", "erk"]


def interval(given: int | None, paper: int, total_steps: int, *, parts: int = 20) -> int:
    """Return the updates between exchanges: given, or the paper's, at most total_steps / parts."""
    return given if given is not None else max(1, min(paper, total_steps // parts))


def is_due(step: int, every: int) -> bool:
    """Return whether ``step`` is a positive multiple of ``every``."""
    return step > 0 and step % every == 0


def cosine_decay(progress: float, start: float, end: float = 0.0) -> float:
    """end + (start - end) (1 + cos(π progress)) / 2."""
    return end + (start - end) * cosine(min(1.0, progress))


def gradient_magnitude(weight: Tensor) -> Tensor:
    """|g| in fp32; zero for a weight without a gradient."""
    return torch.zeros_like(magnitude(weight)) if weight.grad is None else magnitude(weight.grad)


def largest(scores: Tensor, among: Tensor, count: int, shards: Shards = WHOLE) -> Tensor:
    """Return the mask of the ``count`` largest scores (≥ 0) in ``among``; ties by lower index."""
    if count == 0:
        return torch.zeros_like(among)
    values = [torch.where(among, scores.float(), -1.0)]
    (chosen,) = select_top(values, count, shards=shards)
    return chosen


def at_random(
    among: Tensor,
    count: int,
    seed: int,
    *counters: int,
    shape: tuple[int, ...] | None = None,
    shards: Shards = WHOLE,
) -> Tensor:
    """Return the mask of ``count`` uniformly drawn entries of ``among``.

    ``among`` may be a shard of a tensor of this ``shape``. The noise is that of the whole tensor,
    so that the result does not depend on the number of ranks.
    """
    noise = torch.empty(among.shape if shape is None else shape, device=among.device)
    return largest(shards.part(uniform_(noise, seed, *counters)), among, count, shards)


def random_masks(
    sites: Sequence[Site], counts: Sequence[int], seed: int, shards: Shards = WHOLE
) -> list[Tensor]:
    """Return masks of ``counts`` uniformly drawn weights of each layer, to start training with."""
    return [
        at_random(
            torch.ones_like(site.rows, dtype=torch.bool),
            count,
            seed,
            Stream.SPARSE_START,
            index,
            shape=site.shape,
            shards=shards,
        )
        for index, (site, count) in enumerate(zip(sites, counts, strict=True))
    ]


def activate_at_random_(
    masker: Masker,
    masked: Sequence[StoredWeight],
    sites: Sequence[Site],
    spread: Spread,
    keep: int,
    seed: int,
) -> None:
    """Start training with ``keep`` random weights, distributed over the layers by ``spread``."""
    counts = spread.counts([site.shape for site in sites], keep)
    activate_(masked, masker.weights, random_masks(sites, counts, seed, masker.shards))


def drop_smallest(sizes: Tensor, active: Tensor, count: int, shards: Shards = WHOLE) -> Tensor:
    """Return ``active`` without its ``count`` smallest entries."""
    return largest(sizes, active, shards.counts([active])[0] - count, shards)


def exchange(
    sizes: Tensor, active: Tensor, scores: Tensor, count: int, shards: Shards = WHOLE
) -> Tensor:
    """Replace the ``count`` smallest entries of ``active`` by the ``count`` best-scored others.

    The others include the dropped weights, which can return immediately.
    """
    survivors = drop_smallest(sizes, active, count, shards)
    return survivors | largest(scores, ~survivors, count, shards)


def switch_(
    masked: Sequence[StoredWeight],
    weights: Sequence[Tensor],
    active: Sequence[Tensor],
    optimizers: WeightOptimizers,
) -> None:
    """Make these the active weights; grown weights start at zero without momentum."""
    for weight, before, after in zip(weights, active_masks(masked), active, strict=True):
        optimizers.restart_(weight, after & ~before)
    activate_(masked, weights, active)


def regrow_by_gradient_(
    masked: Sequence[StoredWeight],
    weights: Sequence[Tensor],
    counts: Sequence[int],
    optimizers: WeightOptimizers,
    shards: Shards,
) -> None:
    """Exchange the smallest weights of each layer for those with the largest gradients.

    The current update then moves only weights that were active before and still are.
    """
    before = [active.clone() for active in active_masks(masked)]
    after = [
        exchange(magnitude(weight), active, gradient_magnitude(weight), count, shards)
        for weight, active, count in zip(weights, before, counts, strict=True)
    ]
    switch_(masked, weights, after, optimizers)
    for weight, old, new in zip(weights, before, after, strict=True):
        if weight.grad is not None:
            weight.grad.masked_fill_(~(old & new), 0.0)
