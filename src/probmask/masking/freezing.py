"""Training a sparse network further, with its zeros kept."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from probmask.errors import InputError
from probmask.masking.batchnorm import batches_for_batchnorm, reestimate_batchnorm
from probmask.masking.parametrization import MaskedWeight, register, settle
from probmask.masking.sites import Site, find_sites
from probmask.masking.summary import LayerSummary, Summary


def freeze_masks(
    model: nn.Module, *, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> "FrozenMasks":
    """Keep what is zero in ``model`` exactly zero through any further training.

    Every weight that `attach` would mask (``include`` and ``exclude`` as there) gets the mask of
    its own non-zeros, put before it by the same parametrization that sparse training uses. Such a
    mask stands between weight and network and lets no gradient through: nothing has to be hooked,
    so that any optimizer, several of them, or none of PyTorch's keep the zeros, and so do copies of
    the model. The parameters stay the same objects. Masks travel in the model's ``state_dict``, in
    deep copies and in pickles.

    The masks of a copy are ended by calling this on the copy: a model whose masks are frozen
    already is left as it is.
    """
    if not _frozen(model):
        _freeze(find_sites(model, include=include, exclude=exclude))
    elif tuple(include) or tuple(exclude):
        raise InputError(
            "freeze_masks(include=…, exclude=…): the masks of this model are frozen already; "
            "finalize them first to choose others."
        )
    return FrozenMasks(model)


class FrozenMasks:
    """The masks of a model that is trained further. Made by `freeze_masks`; ended by `finalize`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._masks, self.sites = zip(*_frozen(model), strict=True)
        self._finalized = False

    def summary(self) -> Summary:
        """What is kept of each layer."""
        return Summary(
            tuple(
                LayerSummary(site.name, site.shape, int(mask.hard.sum()), site.size)
                for site, mask in zip(self.sites, self._masks, strict=True)
            )
        )

    def finalize(self, data: Iterable[Any] | None = None) -> Summary:
        """Leave a plain ``nn.Module`` with its zeros, ready to be saved, and say what is kept.

        With ``data``, an iterable of batches, BatchNorm statistics are estimated anew.
        """
        if self._finalized:
            raise InputError("finalize(): these masks are gone; call freeze_masks anew.")
        batches = None if data is None else batches_for_batchnorm(self._model, data)
        order = [
            (module, names)
            for site, mask in zip(self.sites, self._masks, strict=True)
            for (module, _), names in zip(site.holders, mask.order, strict=False)
        ]
        settle(self.sites, self._masks, order)
        self._finalized = True
        if batches is not None:
            reestimate_batchnorm(self._model, batches)
        return self.summary()


class FrozenMask(MaskedWeight):
    """The mask of one site, final from the start.

    ``order`` holds the names of the parameters of each module that has the site: a copy of the
    model can then be finalised as exactly as the model.
    """

    def __init__(self, site: Site, kept: Tensor) -> None:
        super().__init__(site)
        self.take_hard(kept)
        self.frozen = True
        self.order = tuple(tuple(module._parameters) for module, _ in site.holders)

    def training_weight(self, weight: Tensor) -> Tensor:
        """The weights that are kept, as in evaluation."""
        return torch.where(self.hard, weight, 0.0)

    def get_extra_state(self) -> Tensor:
        """The mask; not a buffer, which DDP would broadcast at every step."""
        return self.hard

    def set_extra_state(self, state: Any) -> None:
        """Take over the mask of a checkpoint."""
        self.take_hard(state)


def _freeze(sites: Iterable[Site]) -> None:
    masks = [(site, FrozenMask(site, site.weight.detach() != 0)) for site in sites]
    if all(bool(mask.hard.all()) for _, mask in masks):
        raise InputError(
            "freeze_masks(model): none of its weights is zero; load or finalize a sparse network "
            "first."
        )
    for site, mask in masks:
        register(site, mask)
        for module, _ in site.holders:
            type(module).__reduce_ex__ = _reduce  # type: ignore[assignment,method-assign]


def _frozen(model: nn.Module) -> list[tuple[FrozenMask, Site]]:
    """The frozen masks of a model, each once, with the site that it stands before."""
    holders: dict[FrozenMask, list[tuple[str, nn.Module, str]]] = {}
    weights: dict[FrozenMask, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, mask, weight in _masks_of(module):
            holders.setdefault(mask, []).append((f"{prefix}.{name}".lstrip("."), module, name))
            weights[mask] = weight
    return [
        (mask, Site(places[0][0], tuple((m, name) for _, m, name in places), weights[mask]))
        for mask, places in holders.items()
    ]


def _masks_of(module: nn.Module) -> Iterator[tuple[str, FrozenMask, nn.Parameter]]:
    for name, steps in _parametrizations(module).items():
        for step in steps:
            if isinstance(step, FrozenMask):
                yield name, step, steps.original


def _parametrizations(module: nn.Module) -> dict[str, Any]:
    found = module._modules.get("parametrizations") if parametrize.is_parametrized(module) else None
    return dict(found.items()) if isinstance(found, nn.ModuleDict) else {}


def _reduce(module: nn.Module, _: Any) -> tuple[Any, ...]:
    """How a module with frozen masks is pickled, which PyTorch refuses for parametrized modules.

    Their class is made on the spot and cannot be found by name. What is written instead is the
    plain module, of the class that it had, and the masks.
    """
    masks = {name: mask for name, mask, _ in _masks_of(module)}
    if masks.keys() != _parametrizations(module).keys():
        raise InputError(
            f"pickle({type(module).__name__}): has parametrizations beside frozen masks, which "
            "PyTorch does not pickle; use its state_dict."
        )
    weights = {name: weight for name, _, weight in _masks_of(module)}
    children = {k: child for k, child in module._modules.items() if k != "parametrizations"}
    state = vars(module) | {"_parameters": module._parameters | weights, "_modules": children}
    return _restored, (type(module).__bases__[0], state, masks)


def _restored(
    kind: type[nn.Module], state: dict[str, Any], masks: Mapping[str, FrozenMask]
) -> nn.Module:
    module = kind.__new__(kind)
    module.__setstate__(state)  # type: ignore[no-untyped-call]
    for name, mask in masks.items():
        parametrize.register_parametrization(module, name, mask, unsafe=True)
    type(module).__reduce_ex__ = _reduce  # type: ignore[assignment,method-assign]
    return module
