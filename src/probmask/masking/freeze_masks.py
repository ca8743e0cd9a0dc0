"""`freeze_masks` and `quantize`: continue to train a sparse network and keep its zeros."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probmask.checks import check_count, check_within
from probmask.core.integer_grid import fake_quantized, narrow, quantized
from probmask.errors import InputError
from probmask.masking.batchnorm import batches_for_batchnorm, reestimate_batchnorm
from probmask.masking.divergence import check_network, check_statistics
from probmask.masking.parametrization import (
    MaskedWeight,
    apply_masks_,
    mask_site,
    masked_parameters,
)
from probmask.masking.sharding import is_dtensor
from probmask.masking.sites import Frozen, Site, check_is_module, select_sites
from probmask.masking.summary import Summary, summarize
from probmask.masking.zeros import warn_if_filled


def freeze_masks(
    model: nn.Module,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    frozen: Frozen = "mask",
) -> "FrozenMasks":
    """Keep the zeros of ``model`` exactly zero during any further training.

    Every weight that `attach` would mask gets the mask of its own nonzero entries. The network
    computes with the masked weight, and pruned entries get no gradient. No optimizer is hooked, so
    the zeros stay with any optimizer, and in deep copies and pickles of the model. Parameters and
    the names in ``state_dict()`` stay the same. A saved state has exact zeros. A loaded weight with
    zeros replaces its mask by them; a loaded weight without zeros is masked as before.

    For a model whose masks are already frozen, such as a copy, this returns the existing masks.

    Args:
        model: A sparse network, loaded or finalized.
        include: Name patterns of further parameters to mask; see `find_sites`.
        exclude: Name patterns of parameters not to mask.
        frozen: Whether weights with ``requires_grad=False`` count as masked ("mask") or not
            ("skip"). They do not change in either case.

    Returns:
        The frozen masks. Call their ``finalize()`` after training.

    Raises:
        InputError: If no weight is zero, if another mask still applies, or if patterns are given
            for a model whose masks are frozen.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> _ = layer.weight.data.fill_diagonal_(0.0)
        >>> frozen = probmask.freeze_masks(layer)
        >>> frozen.finalize().kept
        12
    """
    check_is_module("freeze_masks", model)
    if not _frozen(model):
        pairs = _masks_of_zeros("freeze_masks", model, include, exclude, frozen)
        if all(bool(masked.mask.all()) for _, masked in pairs):
            raise InputError(
                "freeze_masks(model): the model has no zero weights; load or finalize a sparse "
                "network first."
            )
        _freeze(pairs)
    else:
        _check_no_patterns("freeze_masks", include, exclude)
    return FrozenMasks(model)


def quantize(
    model: nn.Module,
    *,
    bits: int = 8,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> "FrozenMasks":
    """Train ``model`` further with its zeros kept and its other weights rounded to integers.

    This is `freeze_masks` with quantization-aware training. The network computes with each kept
    weight rounded to an integer of ``bits`` bits times the scale of its output channel. The scale
    is recomputed from the current weights: it is the one with the least squared error. Gradients
    pass the rounding unchanged, and the parameters stay unrounded until ``finalize()``.

    ``finalize()`` writes the rounded weights into the parameters. It also rounds the weights that
    are not masked, such as embeddings, and rounds other tensors, such as biases, to fp16.
    ``probmask.save(model, path, values="int8")`` then stores exactly this network.

    Args:
        model: A network, loaded or finalized, or with frozen masks.
        bits: Number of bits of an integer with its sign, from 2 to 8.
        include: Name patterns of further parameters to mask and to round; see `find_sites`.
        exclude: Name patterns of parameters to round in ``finalize()`` only.

    Returns:
        The frozen masks. Call their ``finalize()`` after training.

    Raises:
        InputError: If ``bits`` is out of range, if another mask still applies, or if patterns are
            given for a model whose masks are frozen.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 4)
        >>> _ = layer.weight.data.fill_diagonal_(0.0)
        >>> frozen = probmask.quantize(layer, bits=2)
        >>> frozen.finalize().kept
        12
        >>> layer.weight[0].abs().unique().numel()  # 0 and the scale
        2
    """
    check_is_module("quantize", model)
    check_count("quantize", "bits", bits, least=2, meaning="a number of bits")
    check_within("quantize", "bits", bits, 2, 8, meaning="a number of bits")
    if not _frozen(model):
        _freeze(_masks_of_zeros("quantize", model, include, exclude))
    else:
        _check_no_patterns("quantize", include, exclude)
    for masked, _ in _frozen(model):
        masked.bits = bits
    return FrozenMasks(model)


class FrozenMasks:
    """The frozen masks of a model whose training continues.

    `freeze_masks` and `quantize` build it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masked, self.sites = zip(*_frozen(model), strict=True)
        self._finalized = False

    @property
    def bits(self) -> int | None:
        """Number of bits of the rounded weights, or None without `quantize`."""
        bits: int | None = self._masked[0].bits
        return bits

    @property
    def masks(self) -> dict[str, Tensor]:
        """Boolean mask of each site by parameter name, True where a weight is kept."""
        pairs = zip(self.sites, self._masked, strict=True)
        return {site.name: masked.mask.clone() for site, masked in pairs}

    def set_masks(self, masks: Mapping[str, Tensor]) -> None:
        """Replace the masks by those that `masks` returned, to resume a training."""
        for site, masked in zip(self.sites, self._masked, strict=True):
            masked.set_mask(masks[site.name])

    def summary(self) -> Summary:
        """Return the number of weights kept, in total and per layer."""
        return summarize(
            self._model, self.sites, [int(masked.mask.count_nonzero()) for masked in self._masked]
        )

    def finalize(self, data: Iterable[Any] | None = None) -> Summary:
        """Remove the masks and leave a plain ``nn.Module`` with its zeros, ready to be saved.

        After `quantize`, the network is rounded.

        Args:
            data: Batches to re-estimate the BatchNorm statistics from.

        Returns:
            The number of weights kept, in total and per layer.

        Raises:
            InputError: If it was called before.
            NonFiniteError: If a kept weight, another trained parameter or a BatchNorm statistic is
                NaN or infinite.
        """
        if self._finalized or not _frozen(self._model):
            raise InputError(
                "finalize(): these masks are already finalized; call freeze_masks again."
            )
        batches = None if data is None else batches_for_batchnorm(self._model, data)
        names, weights = [s.name for s in self.sites], [s.weight for s in self.sites]
        check_network(self._model, names, weights, self._masked)
        if batches is not None:
            reestimate_batchnorm(self._model, batches)
        check_statistics(self._model)
        apply_masks_(self.sites, self._masked)
        if self.bits is not None:
            _round_(self._model, self.bits)
        self._finalized = True
        return self.summary()


class FrozenWeight(MaskedWeight):
    """One site with a mask that is final from the start.

    With ``bits``, the network computes with rounded weights.
    """

    def __init__(self, site: Site, mask: Tensor) -> None:
        super().__init__(site)
        self.set_mask(mask)
        self.frozen = True
        self.bits: int | None = None

    def forward(self, weight: Tensor, training: bool) -> Tensor:
        """Return the effective weight."""
        masked = super().forward(weight, training)
        return masked if self.bits is None else fake_quantized(masked, self.bits)

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the kept weights, as in evaluation."""
        return torch.where(self.mask, weight, 0.0)

    def weight_loaded(self, weight: Tensor) -> None:
        """Replace the mask by the zeros of a loaded weight; keep it if the weight has none."""
        nonzero = weight.detach() != 0
        if not bool(nonzero.all()):
            self.set_mask(nonzero)


def _masks_of_zeros(
    caller: str,
    model: nn.Module,
    include: Iterable[str],
    exclude: Iterable[str],
    frozen: Frozen = "mask",
) -> list[tuple[Site, FrozenWeight]]:
    """Return each site of a plain model with the mask of its nonzero entries."""
    warn_if_filled(caller, model)
    sites = select_sites(caller, model, include, exclude, frozen)
    for site in sites:
        if is_dtensor(site.weight):
            raise InputError(
                f"{caller}(model): {site.name} is sharded; {caller} needs whole weights. Train a "
                "finished network further with DDP."
            )
    return [(site, FrozenWeight(site, site.weight.detach() != 0)) for site in sites]


def check_not_rounding(caller: str, model: nn.Module) -> None:
    """Raise if the model, under `quantize`, rounds a weight in each call."""
    for masked, site in _frozen(model):
        if masked.bits is not None:
            raise InputError(
                f"{caller}(model): {site.name} is still trained as integers (probmask.quantize); "
                "call finalize() first."
            )


def _freeze(pairs: Sequence[tuple[Site, FrozenWeight]]) -> None:
    for site, masked in pairs:
        mask_site(site, masked)


def _check_no_patterns(caller: str, include: Iterable[str], exclude: Iterable[str]) -> None:
    if tuple(include) or tuple(exclude):
        raise InputError(
            f"{caller}(include=…, exclude=…): the masks of this model are already frozen; "
            "finalize them first to choose others."
        )


@torch.no_grad()
def _round_(model: nn.Module, bits: int) -> None:
    """Round every tensor of a plain model as `save` does, so that it is saved exactly."""
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            tensor.copy_(quantized(tensor, bits) if tensor.dim() >= 2 else narrow(tensor))


def _frozen(model: nn.Module) -> list[tuple[FrozenWeight, Site]]:
    """Return each frozen mask of a model with its site."""
    found: dict[FrozenWeight, list[tuple[str, nn.Module, str]]] = {}
    for full_name, module, name, masked in masked_parameters(model):
        if isinstance(masked, FrozenWeight):
            found.setdefault(masked, []).append((full_name, module, name))
    return [(masked, _site_of(places)) for masked, places in found.items()]


def _site_of(places: list[tuple[str, nn.Module, str]]) -> Site:
    full_name, module, name = places[0]
    weight = module._parameters[name]
    assert weight is not None
    return Site(full_name, tuple((m, n) for _, m, n in places), weight)
