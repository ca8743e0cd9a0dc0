"""Slow, obvious references of `probmask.core.selection`: sort all entries, then take in order."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Entry = tuple[float, float, int, int]


def ordered(values: Sequence[Tensor], ties: Sequence[Tensor] | None) -> list[Entry]:
    """Return (-value, -tie, tensor, index) of all entries, sorted; -0.0 equals 0.0 in Python."""
    entries = []
    for i, v in enumerate(values):
        tie = [0.0] * v.numel() if ties is None else ties[i].flatten().tolist()
        entries += [(-x, -tie[j], i, j) for j, x in enumerate(v.flatten().tolist())]
    return sorted(entries)


def select_within(
    values: Sequence[Tensor],
    costs: Sequence[float],
    budget: float,
    ties: Sequence[Tensor] | None = None,
    minimum: Sequence[int] | None = None,
) -> list[Tensor]:
    masks = [torch.zeros(v.numel(), dtype=torch.bool) for v in values]
    kept = [0] * len(values)

    def cost_with(i: int) -> float:
        return math.fsum(c * (kept[j] + (i == j)) for j, c in enumerate(costs))

    order = ordered(values, ties)
    for _, _, i, j in order:
        if minimum is not None and kept[i] < minimum[i]:
            masks[i][j] = True
            kept[i] += 1
    for _, _, i, j in order:
        if not masks[i][j] and cost_with(i) <= budget:
            masks[i][j] = True
            kept[i] += 1
    return [m.reshape(v.shape) for m, v in zip(masks, values, strict=True)]


def select_top(
    values: Sequence[Tensor],
    keep: int,
    ties: Sequence[Tensor] | None = None,
    minimum: Sequence[int] | None = None,
) -> list[Tensor]:
    masks = [torch.zeros(v.numel(), dtype=torch.bool) for v in values]
    order = ordered(values, ties)
    if minimum is not None:
        for i, least in enumerate(minimum):
            for _, _, _, j in [e for e in order if e[2] == i][:least]:
                masks[i][j] = True
    rest = [(i, j) for _, _, i, j in order if not masks[i][j]]
    for i, j in rest[: keep - sum(int(m.sum()) for m in masks)]:
        masks[i][j] = True
    return [m.reshape(v.shape) for m, v in zip(masks, values, strict=True)]
