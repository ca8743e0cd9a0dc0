"""Following the optimizers that train a model's weights."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from probmask.errors import InputError


def checked_optimizers(caller: str, given: object) -> tuple[Optimizer, ...]:
    """One optimizer or several as a tuple; anything else is refused."""
    optimizers = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not optimizers:
        raise InputError(f"{caller}(): pass the optimizers that train the model, at least one.")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"{caller}(optimizer={type(optimizer).__name__}): not a torch.optim.Optimizer; "
                "pass the one that is wrapped, if this is a wrapper."
            )
    return optimizers


def remove_parameters(optimizer: Optimizer, unwanted: set[int]) -> None:
    """Take parameters out of an optimizer; groups stay, as learning-rate schedules count them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in unwanted:
                optimizer.state.pop(parameter, None)
        # In place: LBFGS holds on to this very list.
        group["params"][:] = [p for p in group["params"] if id(p) not in unwanted]


def clear_with_zero_grad(optimizer: Optimizer, clear: Callable[[], None]) -> Callable[[], None]:
    """Make ``optimizer.zero_grad()`` clear the extra trainables too; return what undoes it.

    A loop that skips an update (AMP's GradScaler does, on overflow) discards gradients by
    ``zero_grad`` alone; those of the probabilities must not survive into the next update.
    """
    plain = optimizer.zero_grad
    clearing = [clear]

    def zero_grad(set_to_none: bool = True) -> None:
        plain(set_to_none)
        for extra in clearing:
            extra()

    earlier = optimizer.__dict__.get("zero_grad")
    optimizer.__dict__["zero_grad"] = zero_grad

    def undo() -> None:
        clearing.clear()
        if optimizer.__dict__.get("zero_grad") is not zero_grad:
            return  # another sparsifier has wrapped it since; it calls us, to no effect
        if earlier is None:
            del optimizer.__dict__["zero_grad"]
        else:
            optimizer.__dict__["zero_grad"] = earlier

    return undo


class WeightOptimizers:
    """The optimizers that train the weights, as far as a method may see and touch them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)

    @property
    def parameters(self) -> list[Tensor]:
        """Everything that they train."""
        return [p for o in self._optimizers for group in o.param_groups for p in group["params"]]

    @property
    def rate(self) -> float:
        """The learning rate at this moment: the first group's."""
        return float(self._optimizers[0].param_groups[0]["lr"]) if self._optimizers else 0.0

    def move_by_gradient(self, weights: Sequence[Tensor]) -> bool:
        """Whether these weights move in proportion to their gradients, as by SGD.

        Adam and its kin move all weights by steps of about one size.
        """
        wanted = {id(weight) for weight in weights}
        holders = [
            optimizer
            for optimizer in self._optimizers
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
        ]
        return bool(holders) and all(isinstance(optimizer, SGD) for optimizer in holders)

    def momentum(self, weight: Tensor) -> Tensor | None:
        """The running mean of the weight's gradient, if its optimizer has one already."""
        state = self._state(weight)
        found = state.get("momentum_buffer", state.get("exp_avg"))
        return found if isinstance(found, Tensor) else None

    def restart_(self, weight: Tensor, where: Tensor | None = None) -> None:
        """Forget what is remembered of a weight's gradients, or of those entries of it."""
        for value in self._state(weight).values():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                value.zero_() if where is None else value.masked_fill_(where, 0)

    def restart_all_(self) -> None:
        """Forget everything that is remembered of gradients."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _state(self, weight: Tensor) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if weight in optimizer.state:
                state: dict[str, Any] = optimizer.state[weight]
                return state
        return {}


class OptimizerWatcher(Protocol):
    """Wants to know of every optimizer that steps anywhere."""

    def on_any_optimizer(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that is about to step."""


class OptimizerWatch:
    """Looks at every optimizer that steps anywhere, for sparsifiers that may have to adopt it.

    PyTorch offers this as a hook for the whole process. One is registered when the first sparsifier
    is made, and stays: taking hooks away under a running step is an error, and a sparsifier may
    be collected at any moment.
    """

    def __init__(self) -> None:
        self._watching: weakref.WeakSet[OptimizerWatcher] = weakref.WeakSet()
        self._registered = False

    def add(self, watcher: OptimizerWatcher) -> None:
        """Tell ``watcher`` of every step from now on, as long as somebody else holds on to it."""
        self._watching.add(watcher)
        if not self._registered:
            register_optimizer_step_pre_hook(self._on_step)
            self._registered = True

    def discard(self, watcher: OptimizerWatcher) -> None:
        """Tell it no more."""
        self._watching.discard(watcher)

    def _on_step(self, optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        for watcher in list(self._watching):
            watcher.on_any_optimizer(optimizer)


watch = OptimizerWatch()
