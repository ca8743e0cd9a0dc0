"""Letting the random values fade that the weights of a fresh network began with.

Early in a training a magnitude is mostly where its weight began, which says nothing about what the
weight is good for.
"""

import torch
from torch import Tensor, nn

# Batches by which counts may differ from what was seen: a buffer moved to a device counts anew.
_FEW_BATCHES = 64
# The least that a weight of half precision can lose at once: less would be rounded away.
_COARSE = 2.0**-6


class Freshness:
    """Whether the weights of a network can be told to be random, as its training begins.

    They can where BatchNorm has seen no data and has learned nothing, in so many places that there
    is one for two of the weights that are masked: a new neck of BatchNorm on a pretrained network
    without it says nothing about the network's weights.
    """

    def __init__(self, model: nn.Module, sites: int) -> None:
        found = [
            module
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.running_var is not None
        ]
        everywhere = 2 * len(found) >= max(1, sites)
        self._fresh = everywhere and all(_is_untouched(module) for module in found)
        self._found = [(module, _changes_of(module)) for module in found]

    def holds_still(self) -> bool:
        """The same now, forward passes later: whether no checkpoint has been loaded meanwhile.

        A forward pass counts one batch and changes the counter once; a checkpoint changes it once
        too, but to the batches of a whole training.
        """
        return self._fresh and not any(
            module.num_batches_tracked is not None
            and int(module.num_batches_tracked) > _changes_of(module) - before + _FEW_BATCHES
            for module, before in self._found
        )


def _is_untouched(module: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether it has its first statistics, and gain and bias the same for every channel."""
    variance = module.running_var
    assert variance is not None
    learned = [p for p in (module.weight, module.bias) if p is not None]
    same = all(bool((p == p.reshape(-1)[:1]).all()) for p in learned)
    return same and torch.equal(variance, torch.ones_like(variance))


def _changes_of(module: nn.modules.batchnorm._BatchNorm) -> int:
    """How often the number of batches has been changed."""
    counter = module.num_batches_tracked
    return 0 if counter is None else counter._version


def squared_norm(start: Tensor) -> Tensor:
    """‖start‖², for `fade_`: it stays, and need not be computed at every update. Never zero."""
    along = _wide(start).reshape(-1)
    return torch.dot(along, along).clamp_min(torch.finfo(along.dtype).tiny)


def fade_(weight: Tensor, start: Tensor, square: Tensor, left: float) -> None:
    """Take away so much of the start that at most ``left`` of it is in the weight.

    What is in it is measured, as the component of the weight along the start: weight decay takes
    its part of it too, and subtracting all would leave the negative of that.
    """
    w = _wide(weight)
    along = start.to(w.dtype)  # the model may have another precision than when it began
    part = torch.dot(w.reshape(-1), along.reshape(-1)) / square.to(w.dtype)
    excess = (part - left).clamp_min(0.0)
    if w is not weight and left > 0:
        excess = torch.where(excess < _COARSE, 0.0, excess)
    w.addcmul_(along, excess, value=-1)
    if w is not weight:
        weight.copy_(w)


def _wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
