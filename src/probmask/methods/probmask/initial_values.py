"""Initial values of the weights: whether they are random, and how they are forgotten.

Early in a training the magnitude of a weight is mostly its random initial value, which does not
depend on how useful the weight is.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor, nn

from probmask.core.shards import WHOLE, Shards
from probmask.masking.sharding import is_dtensor

_LOG = logging.getLogger("probmask")
_FORGET_BY = 0.5  # fraction of the training by which random initial values have faded out
_DISCOUNT = 1.0  # of the initial values where they do not fade out
_RANDOM_POWER, _PRETRAINED_POWER = 1.0, 20.0  # of the present sparsity, in their discount
# Tolerance of the batch counters: the version counter of a buffer restarts when it changes devices.
_FEW_BATCHES = 64
# A smaller change of a half-precision weight would be lost in rounding.
_COARSE = 2.0**-6


class Origin:
    """Whether the weights of a network are random or pretrained when their training begins.

    They count as random if no BatchNorm layer has seen data or learned anything, and there is at
    least one BatchNorm layer per two masked weights. The second condition excludes a pretrained
    network without BatchNorm to which a new BatchNorm layer was added.

    They count as pretrained if the caller says so (``pretrained``), or if most normalization layers
    of any kind have learned different gains for their channels, and there is at least one of them
    per four masked weights. Without normalization layers nothing is known.
    """

    def __init__(self, model: nn.Module, sites: int, *, pretrained: bool = False) -> None:
        layers = [
            module
            for module in model.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            and module.running_var is not None
        ]
        everywhere = 2 * len(layers) >= max(1, sites)
        untouched = everywhere and all(_is_untouched(layer) for layer in layers)
        self._stated = pretrained
        self._fresh = untouched and not pretrained
        self._layers = [(layer, _number_of_changes(layer)) for layer in layers]
        gains = _gains(model)
        self._gains = gains if 4 * len(gains) >= sites else []

    def is_random(self) -> bool:
        """Return whether the weights are still random: no checkpoint was loaded in the meantime.

        A forward pass changes the batch counter once and increases it by one. A checkpoint changes
        it once, but to the number of batches of a whole training.
        """
        return self._fresh and not any(
            layer.num_batches_tracked is not None
            and int(layer.num_batches_tracked) > _number_of_changes(layer) - before + _FEW_BATCHES
            for layer, before in self._layers
        )

    def is_pretrained(self) -> bool:
        """Return whether the weights are known to be pretrained. Call it before the first update.

        All ranks call this together.
        """
        learned = sum(not _is_constant(gain) for gain in self._gains)
        return self._stated or 2 * learned > len(self._gains)


class Forgetting(NamedTuple):
    """The settings ``forget_by``, ``discount`` and ``discount_power`` of `TiedProbMask`."""

    forget_by: float
    discount: float
    discount_power: float


def how_to_forget(
    forget_by: float | None,
    discount: float | None,
    discount_power: float | None,
    *,
    origin: Origin,
    by_gradient: bool,
) -> Forgetting:
    """Make the decisions that are None, and log whether the initial values fade out.

    Call it before the first update, on all ranks together.

    Args:
        forget_by: The setting of `TiedProbMask`, as are the next two.
        discount: See there.
        discount_power: See there.
        origin: Where the weights come from.
        by_gradient: Whether the weights move in proportion to their gradients, as by SGD.
    """
    pretrained = origin.is_pretrained()
    if discount_power is None:
        discount_power = _PRETRAINED_POWER if pretrained else _RANDOM_POWER
    if forget_by is not None:
        return Forgetting(forget_by, discount or 0.0, discount_power)
    if discount:
        return Forgetting(0.0, discount, discount_power)
    random = origin.is_random()
    if random and by_gradient:
        _LOG.info(
            "TiedProbMask fades the initial values out by %g of the training: BatchNorm has "
            "seen no data, so they are random. Pass forget_by=0 to keep them.",
            _FORGET_BY,
        )
        return Forgetting(_FORGET_BY, 0.0, discount_power)
    if discount is not None:  # 0
        return Forgetting(0.0, 0.0, discount_power)
    if pretrained:
        _LOG.info(
            "TiedProbMask keeps the initial values up to high sparsity, because they are "
            "pretrained. Pass discount=0 to keep them to the end, or discount_power=1 if they "
            "are random."
        )
    else:
        _LOG.info(
            "TiedProbMask discounts the initial values instead of fading them out: %s. Pass "
            "pretrained=True to attach if they are pretrained, or discount=0 to keep them.",
            "the optimizer is not SGD"
            if random
            else "nothing shows whether they are random or pretrained",
        )
    return Forgetting(0.0, _DISCOUNT, discount_power)


def _gains(model: nn.Module) -> list[Tensor]:
    """Return the gains of all normalization layers, also of classes that are not PyTorch's."""
    found = (module._parameters.get("weight") for module in model.modules())
    return [gain for gain in found if gain is not None and gain.dim() == 1 and len(gain) > 1]


def _is_constant(gain: Tensor) -> bool:
    """Return whether all channels have the same gain."""
    gain = gain.detach()
    if is_dtensor(gain):
        gain = gain.full_tensor()  # type: ignore[attr-defined]
    return bool((gain == gain.reshape(-1)[:1]).all())


def _is_untouched(layer: nn.modules.batchnorm._BatchNorm) -> bool:
    """Return whether the statistics are initial and all channels have the same gain and bias."""
    variance = layer.running_var
    assert variance is not None
    learned = [p for p in (layer.weight, layer.bias) if p is not None]
    same = all(_is_constant(p) for p in learned)
    return same and torch.equal(variance, torch.ones_like(variance))


def _number_of_changes(layer: nn.modules.batchnorm._BatchNorm) -> int:
    counter = layer.num_batches_tracked
    return 0 if counter is None else counter._version


def squared_norm(initial: Tensor, shards: Shards = WHOLE) -> Tensor:
    """‖w₀‖², never zero. `fade_` takes it as an argument, because it is constant."""
    flat = _wide(initial).reshape(-1)
    return _dot(flat, flat, shards).clamp_min(torch.finfo(flat.dtype).tiny)


def fade_(
    weight: Tensor, initial: Tensor, square: Tensor, left: float, shards: Shards = WHOLE
) -> None:
    """w ← w - max(⟨w, w₀⟩ / ‖w₀‖² - left, 0) w₀: leave at most ``left`` of w₀ in w.

    The current fraction of w₀ in w is measured, because weight decay reduces it too. Subtracting a
    scheduled amount would subtract too much.
    """
    w = _wide(weight)
    along = initial.to(w.dtype)  # the precision may have changed since training began
    fraction = _dot(w.reshape(-1), along.reshape(-1), shards) / square.to(w.dtype)
    excess = (fraction - left).clamp_min(0.0)
    if w is not weight and left > 0:
        excess = torch.where(excess < _COARSE, 0.0, excess)
    w.addcmul_(along, excess, value=-1)
    if w is not weight:
        weight.copy_(w)


def _dot(x: Tensor, y: Tensor, shards: Shards) -> Tensor:
    """⟨x, y⟩ over all shards; sums over several shards are in fp64."""
    if shards.count == 1:
        return torch.dot(x, y)
    return shards.total((x.double() * y.double()).sum()).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return x in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
