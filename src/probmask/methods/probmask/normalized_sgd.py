"""SGD with momentum whose steps are normalized over the whole network."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_MOMENTUM = 0.9
_MEMORY = 0.99  # decay of the mean square


class NormalizedSGD(Optimizer):
    """p ← p - lr · v / r, with the momentum v of the gradients and one scale r for all entries.

    r is the RMS of all gradient entries, averaged over the last hundred updates. Adam divides each
    entry by its own RMS instead, so that an entry with a small gradient moves as far as one with a
    large gradient. Here the sizes of gradients are compared over the whole network.

    Args:
        params: The parameters.
        lr: The RMS of a step, for gradients that do not change.
    """

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr, "mean_square": 0.0, "weight": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one update of all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        square = float(torch.stack([norm.cpu() for norm in norms]).square().sum())
        count = sum(grad.numel() for grad in grads)
        group["mean_square"] += (1 - _MEMORY) * (square / count - group["mean_square"])
        group["weight"] += (1 - _MEMORY) * (1 - group["weight"])
        rms = math.sqrt(group["mean_square"] / group["weight"])
        if rms == 0:
            return
        for p, grad in zip(params, grads, strict=True):
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p)
            velocity = state["momentum_buffer"]
            velocity.lerp_(grad, 1 - _MOMENTUM)
            p.add_(velocity, alpha=-group["lr"] / rms)
