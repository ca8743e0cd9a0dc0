"""Masked parameters: a module computes with the masked weight but holds the plain one.

PyTorch's own `torch.nn.utils.parametrize` moves a parameter into a submodule. That changes its name
in ``state_dict()`` and its position in ``parameters()``, so checkpoints, optimizer states and
averaged copies made without masks no longer fit. Here the parameter stays where it is. The module's
class is replaced by a subclass with a property of the parameter's name; reading the property masks
the parameter. A forward hook would not suffice: other modules read the weights of attention layers
and tied weights without calling the ``forward`` of the module that holds them.
"""

import copyreg
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from probmask.errors import InputError
from probmask.masking.sharding import MaskedRows, is_dtensor, rows_of
from probmask.masking.sites import MASKED_TABLE, Site
from probmask.masking.zeros import remember_zeros


class MaskSource(Protocol):
    """Decides the masks of all sites together."""

    def refresh_masks(self) -> None:
        """Recompute the mask of every site whose tensors have changed."""

    def move_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace its own tensors by ``fn`` of them: the model moves to another device."""

    def weights_loaded(self) -> None:
        """Act on new weights: ``load_state_dict`` has overwritten those of all sites."""


class MaskedWeight(nn.Module, ABC):
    """One masked site: the method's rule in training, a boolean mask in evaluation.

    It is not in any module's ``_modules``, so ``parameters()``, ``buffers()`` and ``state_dict()``
    of the model do not contain its tensors. They follow the model to other devices and into deep
    copies, but keep their dtype: in bf16 a probability could not take small steps.

    The mask is recomputed when ``eval()`` is called, and at its next use if the weight or a trained
    parameter has changed. After changing another tensor that it depends on, call `invalidate`. A
    frozen mask is final and applies in training too.
    """

    saved: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that a resumed training needs: tensors, numbers, flags."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.mask = _all_kept(site.rows)
        self.rows: MaskedRows | None = None  # set if FSDP2 shards the weight
        self.frozen = False
        self.trained = site.weight.requires_grad  # an untrained weight is masked, but never changed
        self._source: MaskSource | None = None
        self._leads = self._last = False
        self._computed_from: tuple[int, ...] = ()

    @abstractmethod
    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the weight that the network computes with during training."""

    def final_weight(self, weight: Tensor) -> Tensor:
        """Return the values of the kept weights in evaluation and after freezing."""
        return weight

    def follow(self, source: MaskSource, *, leads: bool, last: bool) -> None:
        """Take the mask from ``source``. Its first site leads, and its last site is ``last``."""
        self._source, self._leads, self._last = source, leads, last

    @property
    def source(self) -> MaskSource | None:
        """The source of the mask. In a deep copy of a model it is the copied source."""
        return self._source

    def set_mask(self, mask: Tensor) -> None:
        """Store a copy of ``mask``."""
        memory = torch.empty(self.mask.shape, dtype=torch.bool, device=self.mask.device)
        self.mask = memory.copy_(mask)

    def update_mask(self, mask: Tensor, weight: Tensor) -> None:
        """Store ``mask``, computed from the current values of the site's tensors."""
        self.set_mask(mask)
        self._computed_from = self._versions(weight)

    def invalidate(self) -> None:
        """Have the mask recomputed at its next use."""
        self._computed_from = ()

    def is_current(self, weight: Tensor) -> bool:
        """Return whether the site's tensors are unchanged since the mask was computed."""
        return self.frozen or self._computed_from == self._versions(weight)

    def forward(self, weight: Tensor, training: bool) -> Tensor:
        """Return the effective weight."""
        if training and not self.frozen:
            return self.training_weight(weight)
        # A compiled graph cannot read version counters; eval() has already refreshed the mask.
        if not torch.compiler.is_compiling() and not self.is_current(weight):
            self._refresh()
        if self.trained and not self.frozen:
            weight = self.final_weight(weight)
        masked: Tensor = _Masked.apply(weight, self.mask)  # type: ignore[no-untyped-call]
        return masked

    def train(self, mode: bool = True) -> Self:
        """Set the mode. The mask is refreshed when evaluation begins."""
        super().train(mode)
        if not mode:
            if self._leads:
                self.invalidate()  # changes made through .data do not increase version counters
            self._refresh()
        elif not self.frozen:
            self.invalidate()
            self.mask = _all_kept(self.mask)  # frees a byte per weight during training
        if self._leads and self.rows is not None:
            self.rows.refresh()
        return self

    def weight_loaded(self, weight: Tensor) -> None:
        """Update the mask after ``load_state_dict`` has overwritten the weight."""
        # Weights are loaded in the order of the sites.
        if self._last and self._source is not None:
            self._source.weights_loaded()

    def saved_values(self) -> list[Any]:
        """Return the values of the attributes named in ``saved``."""
        return [getattr(self, name) for name in self.saved]

    def state(self) -> dict[str, Any]:
        """Return the attributes named in ``saved``, and the mask once it is frozen."""
        values = {name: getattr(self, name) for name in self.saved}
        return {"mask": self.mask.contiguous() if self.frozen else None, "values": values}

    def load_state(self, state: dict[str, Any], weight: Tensor) -> None:
        """Restore what `state` returned."""
        self.frozen = state["mask"] is not None
        if self.frozen:
            self.set_mask(state["mask"])
        for name in self.saved:
            restore_attribute(self, name, state["values"][name], like=weight)
        self.invalidate()

    def _refresh(self) -> None:
        if self._source is not None:
            self._source.refresh_masks()

    def _versions(self, weight: Tensor) -> tuple[int, ...]:
        # The id distinguishes copies: they inherit the tuple, but count versions from zero.
        return (id(self), weight._version, *(tensor._version for tensor in self.parameters()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        trained = [(name, p.data, p.grad) for name, p in self.named_parameters(recurse=False)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, data, grad in trained:
            parameter = self.get_parameter(name)
            parameter.grad = None
            parameter.data = _moved(data, fn)
            parameter.grad = None if grad is None else _moved(grad, fn)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, _moved(value, fn))
        if self._leads and self._source is not None:
            self._source.move_tensors(lambda tensor: _moved(tensor, fn))
        return self


def restore_attribute(owner: object, name: str, value: Any, *, like: Tensor) -> None:
    """Set an attribute to a saved value; an existing tensor is overwritten in place.

    A new tensor gets the device of ``like``, and its memory layout if the shapes are equal.
    """
    if not isinstance(value, Tensor):
        copied = map_tensors(value, lambda tensor: tensor.to(like.device, copy=True))
        setattr(owner, name, copied)
        return
    current = getattr(owner, name)
    if isinstance(current, Tensor) and current.shape == value.shape:
        with torch.no_grad():
            current.copy_(value)
    elif value.shape == like.shape:
        setattr(owner, name, torch.empty_like(like, dtype=value.dtype).detach().copy_(value))
    else:
        setattr(owner, name, value.to(like.device, copy=True))


def map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return a number, string, list or dictionary with ``fn`` applied to the tensors in it."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, fn) for item in value)
    return value


def _all_kept(like: Tensor) -> Tensor:
    """Return a mask that keeps every weight and takes no memory."""
    return torch.ones((), dtype=torch.bool, device=like.device).expand(like.shape)


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the tensor with the device and layout that ``fn`` gives it, but its own dtype."""
    moved = fn(tensor)
    if tensor.is_meta:
        return moved.to(tensor.dtype)
    if moved.stride() == tensor.stride():
        return tensor.to(moved.device)
    return torch.empty_like(moved, dtype=tensor.dtype).copy_(tensor)


class _Masked(torch.autograd.Function):
    """w where the mask is True, else 0. Not a product: 0 · w is −0.0 or NaN for some w."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return _where(mask, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return _where(mask, grad), None


def _where(mask: Tensor, x: Tensor) -> Tensor:
    """Return x where the mask is True, else 0, in the memory layout of x."""
    kept = torch.where(mask, x, 0.0)
    return kept if kept.stride() == x.stride() else torch.empty_like(x).copy_(kept)


class MaskedModule:
    """Base class that a module's class gains while some of its parameters are masked."""

    training: bool
    _parameters: dict[str, nn.Parameter | None]
    _masked_weights: dict[str, MaskedWeight]

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module and of its masked weights."""
        super().train(mode)  # type: ignore[misc]
        for masked in self._masked_weights.values():
            masked.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if fn(torch.empty(0)).is_meta:
            raise InputError(
                "model.to('meta'): this discards the weights of a model that is being sparsified; "
                "call sparsifier.finalize() first, or build a second model on the meta device."
            )
        super()._apply(fn, recurse)  # type: ignore[misc]
        for masked in self._masked_weights.values():
            masked._apply(fn)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        for name, masked in self._masked_weights.items():
            weight = self._parameters[name]
            if weight is not None:
                masked.weight_loaded(rows_of(weight))

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # An optimizer's momentum may have moved weights under a frozen mask, which hides them. The
        # plain model that loads this state has no mask.
        for name, masked in self._masked_weights.items():
            weight = self._parameters[name]
            if masked.frozen and weight is not None:
                rows_of(weight).data.masked_fill_(~masked.mask, 0.0)
        super()._save_to_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle finds classes by name, which this one does not have: it is recreated when loaded.
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        create, args, *rest = reduced
        if create is copyreg.__newobj__ and args[0] is type(self):  # type: ignore[attr-defined]
            create, args = _new_masked, (plain_class(type(self)), (*self._masked_weights,))
        return (create, args, *rest)


class MaskedRecurrent(MaskedModule):
    """Base class of masked recurrent layers, which give a list of their weights to fused kernels.

    The list holds the effective weights during a call, and the parameters otherwise: cuDNN keeps
    these in one block of memory, and copies and pickles of the module must share them.
    """

    _flat_weights_names: list[str]
    _flat_weights: list[Tensor | None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with its effective weights."""
        parameters = self._flat_weights
        self._flat_weights = [getattr(self, name) for name in self._flat_weights_names]
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._flat_weights = parameters

    def _update_flat_weights(self) -> None:
        """Keep the list: PyTorch compares it with the effective weights, which always differ."""

    def _init_flat_weights(self) -> None:
        """Do what the plain layer does, which lists the parameters."""
        masked = type(self)
        self.__class__ = plain_class(masked)
        try:
            self._init_flat_weights()
        finally:
            self.__class__ = masked


def plain_class(kind: type[Any]) -> type[Any]:
    """Return the class that a module has without masks."""
    if not issubclass(kind, MaskedModule):
        return kind
    first, second = kind.__bases__
    named = vars(kind)
    if issubclass(first, MaskedModule):
        return second
    # fully_shard has derived a class from the masked one. Derive one from the plain class instead.
    plain = plain_class(second)
    return type(f"FSDP{plain.__name__}", (first, plain), {"__deepcopy__": named["__deepcopy__"]})


@lru_cache(maxsize=512)  # modules of one class share a masked class, as compiled code expects
def _masked_class(kind: Any, names: tuple[str, ...]) -> type[nn.Module]:
    properties = {name: property(_reader(name)) for name in names}
    base = MaskedRecurrent if issubclass(kind, nn.RNNBase) else MaskedModule
    return type(f"Masked{kind.__name__}", (base, kind), properties)


def _set_class(module: nn.Module, names: Collection[str]) -> None:
    """Give a module the class in which the parameters of these names are masked."""
    plain: Any = plain_class(type(module))
    module.__class__ = _masked_class(plain, tuple(names)) if names else plain
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()  # functional_call may have left other tensors in the list


def _new_masked(kind: Any, names: tuple[str, ...]) -> nn.Module:
    module: nn.Module = kind.__new__(_masked_class(kind, names))
    return module


def _reader(name: str) -> Callable[[MaskedModule], Tensor | None]:
    def read(module: MaskedModule) -> Tensor | None:
        weight = module._parameters[name]
        if weight is None:
            return None
        masked = module._masked_weights[name]
        if masked.rows is not None:
            gathered: Tensor = masked.rows.read(weight)
            return gathered
        if is_dtensor(weight):
            raise InputError(
                f"{name}: fully_shard was called after attach; build the optimizer now, and call "
                "sparsifier.use(optimizer)."
            )
        try:
            effective: Tensor = masked(weight, module.training)
        except AttributeError as error:  # nn.Module.__getattr__ would return the unmasked weight
            raise RuntimeError(f"masking {name} failed: {error}") from error
        return effective

    return read


def mask_site(site: Site, masked: MaskedWeight) -> None:
    """Make every module that holds the site's weight compute with ``masked``."""
    for module, name in site.holders:
        table = {**vars(module).get(MASKED_TABLE, {}), name: masked}
        setattr(module, MASKED_TABLE, table)
        _set_class(module, table)
        masked.train(module.training)


def unmask_site(site: Site) -> None:
    """Make every module that holds the site's weight compute with the weight itself again."""
    for module, name in site.holders:
        table = {key: masked for key, masked in vars(module)[MASKED_TABLE].items() if key != name}
        if table:
            setattr(module, MASKED_TABLE, table)
        else:
            delattr(module, MASKED_TABLE)
        _set_class(module, table)


def masked_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, MaskedWeight]]:
    """Yield each masked parameter: its full name, its module, its name there, its masked weight."""
    for prefix, module in model.named_modules():
        holder: nn.Module = module
        if isinstance(module, MaskedModule):
            for name, masked in module._masked_weights.items():
                yield (f"{prefix}.{name}" if prefix else name), holder, name, masked


@torch.no_grad()
def apply_masks_(sites: Sequence[Site], masked: Sequence[MaskedWeight]) -> None:
    """Remove the masks and set the pruned entries of the parameters to zero."""
    for site, each in zip(sites, masked, strict=True):
        unmask_site(site)
        site.rows.masked_fill_(~each.mask, 0.0)
    remember_zeros(site.weight for site in sites)
