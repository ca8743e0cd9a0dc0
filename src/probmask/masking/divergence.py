"""Divergence: errors that name the tensor of a training that is NaN or infinite.

Updates are not checked, so that they stay fast. An error that a method raises is diagnosed after
the fact (`diagnosing`), and `attach` and `finalize` check the network.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from probmask.core.shards import WHOLE, Shards
from probmask.errors import InputError, NonFiniteError
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sharding import rows_of, shards_of
from probmask.masking.sites import Site

_ADVICE = (
    "The training has diverged: lower the learning rate or clip the gradients, and continue from "
    "an earlier checkpoint."
)


@contextmanager
def diagnosing(
    moment: str, names: Sequence[str], weights: Sequence[Tensor], masked: Sequence[MaskedWeight]
) -> Iterator[None]:
    """Replace an error raised inside if a weight or a gradient, its likely cause, is not finite.

    Raises:
        NonFiniteError: With the ``moment`` (``after 3 updates``) and the name of the weight.
    """
    try:
        yield
    except Exception as error:
        found = next(_nonfinite(names, weights, masked), None)
        if found is None:
            raise
        raise NonFiniteError(f"{moment}: {found}. {_ADVICE}") from error


def _nonfinite(
    names: Sequence[str], weights: Sequence[Tensor], masked: Sequence[MaskedWeight]
) -> Iterator[str]:
    """Yield what is not finite: weights first, then gradients, then the method's parameters."""
    for name, weight in zip(names, weights, strict=True):
        if kind := _nonfinite_kind(weight):
            yield f"{name} contains {kind}"
    for name, weight in zip(names, weights, strict=True):
        if weight.grad is not None and (kind := _nonfinite_kind(weight.grad)):
            yield f"the gradient of {name} contains {kind}"
    for name, each in zip(names, masked, strict=True):
        for parameter in each.parameters():
            if kind := _nonfinite_kind(parameter):
                yield f"the method's parameters of {name} contain {kind}"


def _nonfinite_kind(tensor: Tensor) -> str:
    """Return "NaN" or "infinity" if the tensor contains one, otherwise an empty text."""
    tensor = rows_of(tensor.detach())
    if tensor.is_meta or bool(tensor.isfinite().all()):
        return ""
    return "NaN" if bool(tensor.isnan().any()) else "infinity"


def _kinds(tensors: Sequence[Tensor], shards: Shards) -> list[str]:
    """Return `_nonfinite_kind` of each tensor; of sharded tensors, that of the worst shard."""
    kinds = ["", "infinity", "NaN"]
    found = torch.tensor([kinds.index(_nonfinite_kind(tensor)) for tensor in tensors])
    return [kinds[place] for place in shards.gathered(found).amax(0).tolist()]


def check_initial_weights(sites: Sequence[Site]) -> None:
    """Raise unless the weights to mask are finite before the training.

    Raises:
        InputError: With the name of the first weight that is not.
    """
    weights = [site.weight for site in sites]
    for site, kind in zip(sites, _kinds(weights, shards_of(weights)), strict=True):
        if kind:
            raise InputError(
                f"attach(model): {site.name} contains {kind}; pass a network with finite weights."
            )


@torch.no_grad()
def check_network(
    model: nn.Module,
    names: Sequence[str],
    weights: Sequence[Tensor],
    masked: Sequence[MaskedWeight],
    shards: Shards = WHOLE,
) -> None:
    """Raise unless the kept weights under final masks and the trained parameters are finite.

    Raises:
        NonFiniteError: With the name of the first parameter that is not.
    """
    sites = {id(weight) for weight in weights}
    kept = {
        name: torch.where(each.mask, weight, 0.0)
        for name, weight, each in zip(names, weights, masked, strict=True)
    }
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(rows_of(parameter)) not in sites and parameter.requires_grad
    }
    tensors = {**kept, **trained}
    for name, kind in zip(tensors, _kinds(list(tensors.values()), shards), strict=True):
        if kind:
            raise NonFiniteError(f"finalize(): {name} contains {kind}. {_ADVICE}")


def check_statistics(model: nn.Module) -> None:
    """Raise unless the running statistics of all normalization layers are finite.

    Raises:
        NonFiniteError: With the name of the first that is not.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if kind := _nonfinite_kind(buffer):
                    raise NonFiniteError(
                        f"finalize(): {name} contains {kind}, because a batch did, or because the "
                        "training diverged; pass finite batches as finalize(data=…) to re-estimate "
                        "it."
                    )
