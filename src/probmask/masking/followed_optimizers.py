"""The optimizers that a sparsifier follows: their steps together make one update."""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch.optim import Optimizer

from probmask.errors import InputError
from probmask.masking.optimizers import clear_with_zero_grad

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of a call of step()


@final
class FollowedOptimizers:
    """Hooks on optimizers that call a function at each moment of an update.

    An update begins before the first step of one of the optimizers, and ends when all of them have
    stepped, in any order.

    Args:
        optimizers: The optimizers. Without any, there are no updates.
        begin: Called when an update begins.
        act_on_gradients: Called when the gradients of the update exist: after ``begin``, or each
            time the closure that was passed to ``step`` has computed them.
        end: Called when all optimizers have stepped.
        clear: Called by ``zero_grad``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        *,
        begin: Callable[[], None],
        act_on_gradients: Callable[[], None],
        end: Callable[[], None],
        clear: Callable[[], None],
    ) -> None:
        self.optimizers = tuple(optimizers)
        self._begin, self._act_on_gradients, self._end = begin, act_on_gradients, end
        self._waiting = self._all()  # optimizers that have not stepped in this update
        self._remove_hooks: list[Callable[[], None]] = []
        for optimizer in self.optimizers:
            self._remove_hooks += (
                clear_with_zero_grad(optimizer, clear),
                optimizer.register_step_pre_hook(self._before_step).remove,
                optimizer.register_step_post_hook(self._after_step).remove,
            )

    @property
    def some_have_stepped(self) -> bool:
        """Whether some of the optimizers, but not all, have stepped in this update."""
        return len(self._waiting) < len(self.optimizers)

    def release(self) -> None:
        """Remove the hooks and forget the optimizers."""
        for remove in self._remove_hooks:
            remove()
        self._remove_hooks.clear()
        self.optimizers = ()

    def _all(self) -> set[int]:
        return {id(optimizer) for optimizer in self.optimizers}

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if id(optimizer) not in self._waiting:  # the others have skipped this update
            self._waiting = self._all()
        if self.some_have_stepped:
            return None  # another optimizer has begun this update
        if torch._C._current_graph_task_id() != -1:
            raise InputError(
                "optimizer.step(): it was called inside backward, when some gradients do not exist "
                "yet. The masks need all of them; call it after loss.backward()."
            )
        self._begin()
        itself, *rest = args  # the optimizer, and what step() was called with
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            self._act_on_gradients()
            return None

        def with_gradients() -> Any:
            loss = closure()
            self._act_on_gradients()
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (itself, with_gradients, *rest[1:]), others

    def _after_step(self, optimizer: Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        self._waiting.discard(id(optimizer))
        if not self._waiting:
            self._waiting = self._all()
            self._end()
