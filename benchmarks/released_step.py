"""ProbMask's step as the released code computes it, for comparison in `step_overhead.py`.

Written from its description, without code of the library. Every layer draws two uniforms, takes
logarithms of them and of its probabilities, and leaves the gradients to autograd. Adam and the
joint gradient clipping work tensor by tensor. The projection is 21 halvings over all layers.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

_EPS = 1e-20


class ReleasedMask(nn.Module):
    """w σ((ln s - ln(1 - s) + g) / τ), with new noise g at every use."""

    def __init__(self, weight: Tensor, temperature: float) -> None:
        super().__init__()
        self.prob = nn.Parameter(torch.ones_like(weight))
        self.inverse = 1 / temperature

    def forward(self, weight: Tensor) -> Tensor:
        """Return the masked weight."""
        u0, u1 = torch.rand_like(self.prob), torch.rand_like(self.prob)
        noise = -torch.log(torch.log(u0 + _EPS) / torch.log(u1 + _EPS) + _EPS)
        logit = torch.log(self.prob + _EPS) - torch.log(1.0 - self.prob + _EPS)
        return weight * torch.sigmoid((logit + noise) * self.inverse)


class ReleasedStep:
    """The released step for a model: call `after_backward` instead of ``optimizer.step``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sparsity: float,
        temperature: float,
    ) -> None:
        self.optimizer = optimizer
        self.probs: list[Tensor] = []
        for module in list(model.modules()):
            if isinstance(module, nn.Conv2d | nn.Linear):
                mask = ReleasedMask(module.weight, temperature)
                self.probs.append(mask.prob)
                parametrize.register_parametrization(module, "weight", mask)
        self.keep = (1 - sparsity) * sum(prob.numel() for prob in self.probs)
        self.adam = torch.optim.Adam(self.probs, lr=6e-3, foreach=False)

    def after_backward(self) -> None:
        """Clip gradients, update weights and probabilities, and project."""
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_([*weights, *self.probs], 3, foreach=False)
        self.adam.step()
        self.optimizer.step()
        self.adam.zero_grad()
        with torch.no_grad():
            shift = self._shift()
            for prob in self.probs:
                prob.sub_(shift).clamp_(0, 1)

    def _shift(self) -> Tensor | float:
        def excess(v: Tensor | float) -> Tensor | float:
            return sum((prob - v).clamp(0, 1).sum() for prob in self.probs) - self.keep

        low: Tensor | float = 0.0
        high: Tensor | float = max(prob.max() for prob in self.probs)
        if excess(0.0) < 0:
            return 0.0
        for _ in range(21):
            middle = (low + high) / 2
            gap = excess(middle)
            if abs(gap) < 1e-3:
                break
            low, high = (low, middle) if gap < 0 else (middle, high)
        return middle
