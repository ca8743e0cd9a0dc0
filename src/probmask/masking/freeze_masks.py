"""`freeze_masks`: continue to train a sparse network and keep its zeros."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from probmask.errors import InputError
from probmask.masking.batchnorm import batches_for_batchnorm, reestimate_batchnorm
from probmask.masking.divergence import check_network, check_statistics
from probmask.masking.parametrization import (
    MaskedWeight,
    apply_masks_,
    mask_site,
    masked_parameters,
)
from probmask.masking.sites import Site, check_is_module, select_sites
from probmask.masking.summary import Summary, summarize
from probmask.masking.zeros import warn_if_filled


def freeze_masks(
    model: nn.Module, *, include: Iterable[str] = (), exclude: Iterable[str] = ()
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
        warn_if_filled("freeze_masks", model)
        _freeze(select_sites("freeze_masks", model, include, exclude))
    elif tuple(include) or tuple(exclude):
        raise InputError(
            "freeze_masks(include=…, exclude=…): the masks of this model are already frozen; "
            "finalize them first to choose others."
        )
    return FrozenMasks(model)


class FrozenMasks:
    """The frozen masks of a model whose training continues. `freeze_masks` builds it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masked, self.sites = zip(*_frozen(model), strict=True)
        self._finalized = False

    def summary(self) -> Summary:
        """Return the number of weights kept, in total and per layer."""
        return summarize(self._model, self.sites, [masked.mask for masked in self._masked])

    def finalize(self, data: Iterable[Any] | None = None) -> Summary:
        """Remove the masks and leave a plain ``nn.Module`` with its zeros, ready to be saved.

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
        self._finalized = True
        return self.summary()


class FrozenWeight(MaskedWeight):
    """One site with a mask that is final from the start."""

    def __init__(self, site: Site, mask: Tensor) -> None:
        super().__init__(site)
        self.set_mask(mask)
        self.frozen = True

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the kept weights, as in evaluation."""
        return torch.where(self.mask, weight, 0.0)

    def weight_loaded(self, weight: Tensor) -> None:
        """Replace the mask by the zeros of a loaded weight; keep it if the weight has none."""
        nonzero = weight.detach() != 0
        if not bool(nonzero.all()):
            self.set_mask(nonzero)


def _freeze(sites: Iterable[Site]) -> None:
    pairs = [(site, FrozenWeight(site, site.weight.detach() != 0)) for site in sites]
    if all(bool(masked.mask.all()) for _, masked in pairs):
        raise InputError(
            "freeze_masks(model): the model has no zero weights; load or finalize a sparse network "
            "first."
        )
    for site, masked in pairs:
        mask_site(site, masked)


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
