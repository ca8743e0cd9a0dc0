"""The sparse network that a training begins with: how many weights of each layer, and which."""

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import Tensor

from probmask.checks import check_choice
from probmask.core.allocation import erdos_renyi, uniform
from probmask.errors import InputError
from probmask.masking.sites import Site
from probmask.methods.exchange import at_random

Allocation = Literal["uniform", "er", "erk"]
ALLOCATIONS = ("uniform", "er", "erk")

_START = -1  # no update has this number: the noise of the start is nobody else's


def check_start(
    caller: str, allocation: Allocation, dense_first: bool | None, dense_last: bool
) -> None:
    """Refuse settings of the start that mean nothing; None leaves the first layer to the method."""
    check_choice(caller, "allocation", allocation, ALLOCATIONS)
    check_choice(caller, "dense_first", dense_first, (None, True, False))
    check_choice(caller, "dense_last", dense_last, (True, False))


def dense_layers(count: int, *, first: bool, last: bool) -> frozenset[int]:
    """Which of ``count`` layers are kept dense."""
    return frozenset(({0} if first else set()) | ({count - 1} if last else set()))


def layer_counts(
    caller: str,
    sites: Sequence[Site],
    keep: int,
    allocation: Allocation,
    dense: Collection[int] = (),
) -> list[int]:
    """The number of weights of each layer, ``keep`` together: the dense ones full, then the rest.

    "uniform" gives the other layers the same fraction, "er" and "erk" the density of an Erdős-Rényi
    graph, without and with the size of the kernels.
    """
    others = [index for index in range(len(sites)) if index not in dense]
    left = keep - sum(sites[index].size for index in dense)
    if dense and (left < 0 or (left == 0 and others)):
        names = ", ".join(sites[index].name for index in sorted(dense))
        raise InputError(
            f"{caller}: {keep} weights are kept, but the layers that stay dense ({names}) have "
            f"{keep - left}; lower sparsity, or pass dense_first=False and dense_last=False."
        )
    shapes = [sites[index].shape for index in others]
    if allocation == "uniform":
        counts = uniform([sites[index].size for index in others], left)
    else:
        counts = erdos_renyi(shapes, left, kernel=allocation == "erk")
    given = dict(zip(others, counts, strict=True))
    return [given.get(index, site.size) for index, site in enumerate(sites)]


def random_masks(sites: Sequence[Site], counts: Sequence[int], seed: int) -> list[Tensor]:
    """So many weights of each layer, drawn at random."""
    return [
        at_random(torch.ones_like(site.weight, dtype=torch.bool), count, seed, _START, index)
        for index, (site, count) in enumerate(zip(sites, counts, strict=True))
    ]
