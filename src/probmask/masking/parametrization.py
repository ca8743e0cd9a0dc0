"""How a site's weight becomes the weight that the network computes with."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from probmask.masking.sites import Site


class HardMaskSource(Protocol):
    """Whatever decides the hard masks of all sites together."""

    def refresh_hard_masks(self) -> None:
        """Give every site the hard mask that its tensors now stand for."""


class MaskedWeight(nn.Module, ABC):
    """The parametrization of one site: the method's rule in training, a hard mask in evaluation.

    The hard mask is neither a parameter nor a buffer: DDP would broadcast a buffer from rank 0, and
    a ``state_dict`` would carry what can be computed. It follows the module from device to device
    and into copies all the same, as do all tensors that a method has here; their dtype stays, as
    in bf16 a probability or a score could not take small steps. The hard mask is brought up to
    date when ``eval()`` is called, and at the next use if the tensors it was made from have changed
    since (a checkpoint loaded, an averaged copy updated). A frozen mask is final: it serves
    training too, and nothing changes it.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.hard = _everything(site.weight)
        self.frozen = False
        self._source: HardMaskSource | None = None
        self._leads = False
        self._kept_alive = _NotCopied(None)
        self._made_from: tuple[int, ...] = ()

    @abstractmethod
    def training_weight(self, weight: Tensor) -> Tensor:
        """The weight that the network computes with while it is being trained."""

    def settled_weight(self, weight: Tensor) -> Tensor:
        """What the weights that stay are in evaluation, and become when the mask is frozen."""
        return weight

    def follow(self, source: HardMaskSource, *, leads: bool = False) -> None:
        """Take hard masks from ``source`` from now on; one of its masks leads."""
        self._source = source
        self._leads = leads

    def keep_alive(self, value: object) -> None:
        """Hold on to ``value`` as long as the model has this mask; copies do not."""
        self._kept_alive = _NotCopied(value)

    def harden(self, hard: Tensor, weight: Tensor) -> None:
        """Take ``hard`` as the mask that the site's tensors, as they are now, stand for."""
        self.take_hard(hard)
        self._made_from = self._versions(weight)

    def take_hard(self, hard: Tensor) -> None:
        """Have this hard mask, in memory of its own."""
        room = torch.empty(self.hard.shape, dtype=torch.bool, device=self.hard.device)
        self.hard = room.copy_(hard)

    def outdate(self) -> None:
        """Have the hard mask made anew at its next use, whatever has changed."""
        self._made_from = ()

    def is_current(self, weight: Tensor) -> bool:
        """Whether the hard mask needs no refreshing."""
        return self.frozen or self._made_from == self._versions(weight)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the effective weight."""
        if self.training and not self.frozen:
            return self.training_weight(weight)
        # A compiled graph cannot look at version counters; eval() has looked for it.
        if not torch.compiler.is_compiling() and not self.is_current(weight):
            self._refresh()
        if not self.frozen:
            weight = self.settled_weight(weight)
        masked: Tensor = _HardMasked.apply(weight, self.hard, *self.parameters())  # type: ignore[no-untyped-call]
        return masked

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the hard mask is brought up to date when evaluation begins."""
        super().train(mode)
        if not mode:
            if self._leads:
                self.outdate()  # changes made through .data leave no trace in any counter
            self._refresh()
        elif not self.frozen:
            self.outdate()  # made anew by eval(): a byte per weight that training can do without
            self.hard = _everything(self.hard)
        return self

    def _refresh(self) -> None:
        if self._source is not None:
            self._source.refresh_hard_masks()

    def _versions(self, weight: Tensor) -> tuple[int, ...]:
        # Our id, as a copy takes this along but counts its own tensors' versions anew.
        return (id(self), weight._version, *(tensor._version for tensor in self.parameters()))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        trained = [(name, p.data, p.grad) for name, p in self.named_parameters(recurse=False)]
        buffers = list(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, data, grad in trained:
            parameter = self.get_parameter(name)
            parameter.grad = None
            parameter.data = _moved(data, fn)
            parameter.grad = None if grad is None else _moved(grad, fn)
        for name, value in (*buffers, *vars(self).items()):
            if isinstance(value, Tensor):
                setattr(self, name, _moved(value, fn))
        return self


def _everything(like: Tensor) -> Tensor:
    """A mask that keeps all, which takes no memory."""
    return torch.ones((), dtype=torch.bool, device=like.device).expand(like.shape)


def _moved(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor as ``fn`` lays it out, of the dtype it had: not through bf16 and back."""
    moved = fn(tensor)
    if tensor.is_meta:
        return moved.to(tensor.dtype)
    if moved.stride() == tensor.stride():
        return tensor.to(moved.device)
    return torch.empty_like(moved, dtype=tensor.dtype).copy_(tensor)


class _NotCopied:
    """A reference that a deep copy of its holder does not have."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __deepcopy__(self, _: dict[int, Any]) -> "_NotCopied":
        return _NotCopied(None)


class _HardMasked(torch.autograd.Function):
    """w where the mask is set, 0 elsewhere.

    Not a product: 0 * w is -0.0 for a negative w, and NaN where w is not finite. The site's other
    parameters take part without effect: DDP waits for every parameter it knows, and one that
    dropped out of the graph when the mask was frozen would make it fail.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, hard: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(hard)
        ctx.others = len(others)
        return _where(hard, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hard,) = ctx.saved_tensors
        return (_where(hard, grad), None, *([None] * ctx.others))


def _where(hard: Tensor, x: Tensor) -> Tensor:
    """x where the mask is set, else 0, in x's order in memory, whatever the mask's."""
    kept = torch.where(hard, x, 0.0)
    return kept if kept.stride() == x.stride() else torch.empty_like(x).copy_(kept)


def register(site: Site, mask: MaskedWeight) -> None:
    """Put ``mask`` between the site's weight and every module that holds it."""
    for module, name in site.holders:
        parametrize.register_parametrization(module, name, mask)
        mask.train(module.training)


def unregister(site: Site) -> None:
    """Give the site's weight back to the modules that hold it, as the parameter it always was."""
    for module, name in site.holders:
        # A deep copy has the same class, from which the property will be deleted.
        kind = type(module)
        module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def parameter_order(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """The names of each module's parameters as they stand, for `settle` to put back."""
    return [(module, tuple(module._parameters)) for module in model.modules()]


def settle(
    sites: Sequence[Site],
    masks: Sequence[MaskedWeight],
    order: Sequence[tuple[nn.Module, Sequence[str]]],
) -> None:
    """Leave plain parameters, those that are masked out exactly zero, in the order given."""
    for site, mask in zip(sites, masks, strict=True):
        unregister(site)
        with torch.no_grad():
            site.weight.masked_fill_(~mask.hard, 0.0)
    for module, names in order:
        for name in names:  # removing a parametrization puts its parameter last
            if name in module._parameters:
                module._parameters[name] = module._parameters.pop(name)
