"""Clipping of a joint gradient to a norm, of whole or sharded parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from probmask.core.shards import WHOLE, Shards
from probmask.masking.sharding import is_dtensor, rows_of


@torch.no_grad()
def clip_joint_norm_(
    parameters: Sequence[Tensor],
    norm: float,
    shards: Shards = WHOLE,
    *,
    also_rows: Sequence[Tensor] = (),
) -> None:
    """Scale the gradients of all parameters so that their joint norm is at most ``norm``.

    Args:
        parameters: The parameters. Those that FSDP2 shards count with the rows of all ranks.
        norm: The largest norm.
        shards: The division of the weights among ranks.
        also_rows: Those of the parameters that are rows of this rank, without being DTensors.
    """
    if shards is WHOLE:
        nn.utils.clip_grad_norm_(parameters, norm)
        return
    rows = {id(parameter) for parameter in also_rows}
    gradients = [p.grad for p in parameters if p.grad is not None]
    divided = [is_dtensor(p) or id(p) in rows for p in parameters if p.grad is not None]
    squares = [0.0, 0.0]  # of gradients that all ranks have, and of rows
    for gradient, by_rows in zip(gradients, divided, strict=True):
        square = torch.linalg.vector_norm(rows_of(gradient), dtype=torch.float64).square()
        squares[by_rows] += float(square)
    whole = squares[0] + float(shards.total(torch.tensor([squares[1]], dtype=torch.float64)))
    factor = min(1.0, norm / (whole**0.5 + 1e-6))
    for gradient in gradients:
        rows_of(gradient).mul_(factor)
