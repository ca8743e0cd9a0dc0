"""Zeros of a finished network: remembered, and missed when something has filled them.

Nothing that probmask can hook runs when an adapter is merged into a weight. The number of nonzero
entries is therefore stored on the parameter, and compared where the network is used next.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from probmask.errors import RefilledWeightsWarning
from probmask.masking.sharding import rows_of
from probmask.messages import listed

_KEPT = "_probmask_kept"  # an attribute of a pruned parameter: its number of nonzero entries


def remember_zeros(parameters: Iterable[nn.Parameter]) -> None:
    """Store the number of nonzero entries of each parameter that has zeros."""
    for parameter in parameters:
        rows = rows_of(parameter.detach())
        kept = int(torch.count_nonzero(rows))
        if kept < rows.numel():
            setattr(parameter, _KEPT, kept)
        else:
            vars(parameter).pop(_KEPT, None)


def warn_if_filled(caller: str, model: nn.Module) -> None:
    """Warn if pruned weights of a model have become nonzero since `remember_zeros`.

    Warns:
        RefilledWeightsWarning: With the names of the parameters.
    """
    filled = [
        f"{name} ({now:,} nonzero weights instead of {kept:,})"
        for name, parameter in model.named_parameters()
        if (kept := vars(parameter).get(_KEPT)) is not None
        and (now := int(torch.count_nonzero(rows_of(parameter.detach())))) > kept
    ]
    if filled:
        warnings.warn(
            f"{caller}(model): pruned weights have become nonzero: {listed(filled, most=3)}. Merge "
            "adapters with probmask.merge_lora, and train a finished network with "
            "probmask.freeze_masks; both keep the zeros.",
            RefilledWeightsWarning,
            stacklevel=3,
        )
