"""SGD with momentum whose steps are normalized over the whole network."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from probmask.core.shards import WHOLE, Shards

_MOMENTUM = 0.9
_MEMORY = 0.99  # decay of the mean square
_TINY = 1e-30  # instead of an RMS of zero, where all gradients have been zero


class NormalizedSGD(Optimizer):
    """p ← p - lr · v / r, with the momentum v of the gradients and one scale r for all entries.

    r is the RMS of all entries of the gradients, averaged over the last hundred updates. Adam
    divides each entry by its own RMS instead, so that an entry with a small gradient moves as far
    as one with a large gradient.

    Args:
        params: The parameters.
        lr: The learning rate: the RMS of a step if the gradients do not change.
        shards: The division of the parameters, if they are the shards of this rank.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, *, shards: Shards = WHOLE) -> None:
        super().__init__(params, {"lr": lr})
        self._shards = shards

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(params, group["lr"])
        return loss

    def _step_group(self, params: list[Tensor], lr: float) -> None:
        device = params[0].device
        squares, size = self._squares(params)
        states = [self._updated_state(p, s) for p, s in zip(params, squares, strict=True)]
        mean = torch.stack([state["square"].to(device) for state in states]).sum()
        mean /= size * (1 - _MEMORY ** float(states[0]["step"]))
        scale = lr / mean.sqrt().clamp_min(_TINY)
        for p, state in zip(params, states, strict=True):
            p.addcmul_(state["momentum_buffer"], scale.to(p.device, p.dtype), value=-1)

    def _squares(self, params: list[Tensor]) -> tuple[Tensor, int]:
        """Return the squared norm of each gradient, and the number of all entries."""
        device = params[0].device
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in params]
        sizes = torch.tensor([sum(p.numel() for p in params)], dtype=torch.float64, device=device)
        found = torch.cat([torch.stack([norm.to(device) for norm in norms]).square(), sizes])
        found = self._shards.total(found)
        return found[:-1], int(found[-1])

    def _updated_state(self, p: Tensor, square: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, updated by its gradient."""
        state: dict[str, Any] = self.state[p]
        grad = p.grad
        assert grad is not None
        if not state:
            state["step"] = torch.zeros(())
            state["momentum_buffer"] = torch.zeros_like(p)
            state["square"] = torch.zeros((), dtype=p.dtype, device=p.device)  # as it is loaded
        state["step"] += 1
        state["momentum_buffer"].lerp_(grad, 1 - _MOMENTUM)
        state["square"].lerp_(square.to(p.device, p.dtype), 1 - _MEMORY)
        return state
