"""Agreement of ranks that have the same weights: checksums that stop a training if they differ.

DDP gives all ranks the same gradients, so their weights, masks and probabilities stay the same to
the last bit. If a rank computes differently (another number of threads, another library, a faulty
device, a weight changed on one rank), the networks drift apart without any error. A checksum of 8
bytes per site, sent every hundred updates, finds it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from probmask.errors import RankMismatchError
from probmask.masking.distributed import stacked
from probmask.messages import listed

EVERY = 100  # updates between two checks; the first update is checked too
_CHUNK = 1 << 18  # entries per pass: intermediate results stay in the cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_due(step: int) -> bool:
    """Return whether the ranks are compared after this number of updates."""
    return step % EVERY == 1


def check_agreement(
    step: int, names: Sequence[str], tensors: Sequence[Iterable[Any]], group: Any = None
) -> None:
    """Raise unless all ranks of a group have the same tensors. All of them call this together.

    Args:
        step: The number of updates, for the message.
        names: The names of the sites.
        tensors: The tensors of each site; other values are ignored.
        group: The ranks to compare; by default all.

    Raises:
        RankMismatchError: With the ranks that differ from the majority, and the sites.
    """
    found = torch.stack([torch.stack([checksum(t) for t in each]).sum() for each in _only(tensors)])
    everywhere: list[list[int]] = stacked(found, group).tolist()
    usual = [Counter(sums).most_common(1)[0][0] for sums in zip(*everywhere, strict=True)]
    different = {
        rank: [name for name, mine, most in zip(names, sums, usual, strict=True) if mine != most]
        for rank, sums in enumerate(everywhere)
    }
    ranks = [rank for rank, sites in different.items() if sites]
    if ranks:
        sites = [name for name in names if any(name in different[rank] for rank in ranks)]
        raise RankMismatchError(
            f"after {step:,} updates, {_ranks(ranks)} from the other ranks in "
            f"{listed(sites, most=3)}: the masks are no longer the same on all ranks. Use the same "
            "number of threads and the same libraries on all ranks, change weights on all ranks or "
            "on none, and wrap the model in DDP. Continue from an earlier checkpoint."
        )


def _only(tensors: Sequence[Iterable[Any]]) -> list[list[Tensor]]:
    return [[value for value in each if isinstance(value, Tensor)] for each in tensors]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} differs"
    return f"ranks {', '.join(map(str, ranks))} differ"


def checksum(tensor: Tensor) -> Tensor:
    """Σ (2 i + 1) b_i modulo 2⁶⁴, with b_i the bits of the entry at the row-major position i."""
    flat = tensor.detach().reshape(-1)
    bits = flat.to(torch.uint8) if flat.dtype == torch.bool else flat
    bits = bits.view(_INTEGERS[bits.element_size()])
    factors = 2 * torch.arange(min(len(flat), _CHUNK), device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for index, chunk in enumerate(torch.split(bits, _CHUNK)):
        total += (chunk * (factors[: len(chunk)] + 2 * _CHUNK * index)).sum()
    return total.cpu()
