"""The optimizers that train a model's weights, as the sparsifier and its method use them."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer

from probmask.errors import InputError, RefilledWeightsWarning
from probmask.masking.sharding import rows_of
from probmask.optim import without_ham


def checked_optimizers(caller: str, given: object) -> tuple[Optimizer, ...]:
    """Return one or several optimizers as a tuple, each without its wrapper.

    Raises:
        InputError: If none is given, or one is not a ``torch.optim.Optimizer``.
    """
    optimizers = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not optimizers:
        raise InputError(f"{caller}(): pass at least one optimizer that trains the model.")
    return tuple(_unwrapped(caller, optimizer) for optimizer in optimizers)


def _unwrapped(caller: str, given: object) -> Optimizer:
    """Return the optimizer that has hooks: the given one, or the one that it wraps.

    The wrappers of Accelerate and Lightning are subclasses of ``Optimizer`` that never initialize
    it, and hold the real one as ``optimizer``.
    """
    wrapped: Any = given
    while isinstance(wrapped, Optimizer):
        if "_optimizer_step_pre_hooks" in vars(wrapped):
            return wrapped
        wrapped = vars(wrapped).get("optimizer", vars(wrapped).get("_optimizer"))
    raise InputError(
        f"{caller}(optimizer={type(given).__name__}): not a torch.optim.Optimizer; if it wraps "
        "one, pass the wrapped optimizer."
    )


def scaler_of(given: object) -> GradScaler | None:
    """Return the scaler of a wrapper of Accelerate, which holds it next to its optimizer."""
    for wrapper in given if isinstance(given, list | tuple) else (given,):
        if isinstance(wrapper, Optimizer) and "_optimizer_step_pre_hooks" not in vars(wrapper):
            scaler = vars(wrapper).get("scaler")
            if isinstance(scaler, GradScaler):
                return scaler
    return None


def warn_if_refilled(
    optimizers: Sequence[Optimizer], weights: Sequence[Tensor], is_masked: Callable[[], bool]
) -> None:
    """Warn once if a later step of these optimizers makes zeros of ``weights`` nonzero.

    Args:
        optimizers: The optimizers that trained the weights.
        weights: The pruned weights.
        is_masked: Returns whether masks have been put on the weights again, which keep the zeros.
    """
    weights = [rows_of(weight) for weight in weights]
    watched = [(weight, weight._version) for weight in weights]
    kept = sum(int(weight.count_nonzero()) for weight in weights)

    def check(*_: Any) -> None:
        if all(weight._version == version for weight, version in watched):
            return  # it trains other parameters, or it has been checked
        refilled = sum(int(weight.count_nonzero()) for weight, _ in watched) - kept
        watched.clear()  # PyTorch does not allow a hook to remove itself
        if refilled > 0 and not is_masked():
            warnings.warn(
                f"optimizer.step() after finalize() has made {refilled:,} pruned weights nonzero: "
                "its sparsity has fallen. To train the model further, call "
                "probmask.freeze_masks(model) before the first step.",
                RefilledWeightsWarning,
                stacklevel=4,
            )

    for optimizer in optimizers:
        optimizer.register_step_post_hook(check)


def clear_with_zero_grad(optimizer: Optimizer, clear: Callable[[], None]) -> Callable[[], None]:
    """Make ``optimizer.zero_grad()`` also call ``clear``; return a function that undoes this.

    A loop that skips an update (GradScaler does so on overflow) discards gradients by ``zero_grad``
    alone, and PyTorch has no hook for it. Without this, the gradients of a method's own parameters
    would survive into the next update. The method is replaced on this one optimizer object.
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
            return  # another sparsifier wraps this function, which now has no effect
        if earlier is None:
            del optimizer.__dict__["zero_grad"]
        else:
            optimizer.__dict__["zero_grad"] = earlier

    return undo


class WeightOptimizers:
    """The optimizers of the weights, with the operations that a method may use."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that the optimizers train."""
        return [p for o in self._optimizers for group in o.param_groups for p in group["params"]]

    @property
    def rate(self) -> float:
        """Current learning rate of the first parameter group."""
        return float(self._optimizers[0].param_groups[0]["lr"]) if self._optimizers else 0.0

    def trains(self, weight: Tensor) -> bool:
        """Return whether the optimizers change this weight, or the weight with these rows."""
        return any(rows_of(p) is weight and p.requires_grad for p in self.parameters)

    def move_by_gradient(self, weights: Sequence[Tensor]) -> bool:
        """Return whether SGD trains these weights: they move in proportion to their gradients.

        Adam and similar optimizers move all weights by steps of about the same size.
        """
        wanted = {id(weight) for weight in weights}
        holders = [
            optimizer
            for optimizer in self._optimizers
            if any(
                id(rows_of(p)) in wanted
                for group in optimizer.param_groups
                for p in group["params"]
            )
        ]
        return bool(holders) and all(isinstance(without_ham(each), SGD) for each in holders)

    def momentum(self, weight: Tensor) -> Tensor | None:
        """Return the running mean of the weight's gradient, or None if there is none yet."""
        state = self._state(weight)
        found = rows_of(state.get("momentum_buffer", state.get("exp_avg")))
        return found if isinstance(found, Tensor) else None

    def restart_(self, weight: Tensor, where: Tensor | None = None) -> None:
        """Reset the optimizer's state of a weight, or of its entries at ``where``, to zero."""
        for value in map(rows_of, self._state(weight).values()):
            if isinstance(value, Tensor) and value.shape == rows_of(weight).shape:
                value.zero_() if where is None else value.masked_fill_(where, 0)

    def restart_all_(self) -> None:
        """Discard the state of all optimizers."""
        for optimizer in self._optimizers:
            optimizer.state.clear()

    def _state(self, weight: Tensor) -> dict[str, Any]:
        for optimizer in self._optimizers:
            if weight in optimizer.state:
                state: dict[str, Any] = optimizer.state[weight]
                return state
            for parameter in optimizer.state:
                if rows_of(parameter) is weight:
                    return dict(optimizer.state[parameter])
        return {}
