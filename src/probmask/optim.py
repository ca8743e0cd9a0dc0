"""Optimizer wrappers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from probmask.checks import check_within
from probmask.errors import InputError

_MAX_EXPONENT = 5.0  # bound on the logarithm of the factor of one step


class HAM(Optimizer):
    """Hyperbolic aware minimization: a multiplicative step after each step of an optimizer.

    Every entry of a tensor with two or more dimensions is multiplied by
    ``exp(lr * (-alpha * sign(w) * grad - beta))``, where ``lr`` is the learning rate of its group
    and ``grad`` the gradient that the wrapped optimizer has just used. Weights that the loss wants
    larger grow in proportion to their size, and all others shrink, which favors sparse solutions.
    Biases and normalization layers are trained by the wrapped optimizer alone. The exponent is
    bounded to ±5.

    Use it in place of the wrapped optimizer, whose parameter groups and state it shares:
    learning-rate schedulers, ``state_dict`` and `probmask.attach` take it. A checkpoint of the
    wrapped optimizer fits.

    Jacobs, Gadhikar, Rubio-Madrigal and Burkholz, "Hyperbolic Aware Minimization: Implicit Bias for
    Sparsity", ICLR 2026.

    Args:
        optimizer: The optimizer of the first step, such as SGD or AdamW.
        alpha: Strength of the multiplicative step along the gradient.
        beta: Strength of the decay towards zero.
        max_grad_norm: Clip the joint gradient to this norm before both steps.

    Raises:
        InputError: If ``optimizer`` is not an optimizer, or a number breaks its rule.

    Example:
        >>> import torch
        >>> from probmask.optim import HAM
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = HAM(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        alpha: float = 200.0,
        beta: float = 1e-3,
        max_grad_norm: float = 20.0,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"HAM(optimizer={type(optimizer).__name__}): not a torch.optim.Optimizer; pass the "
                "optimizer to extend, such as torch.optim.SGD(model.parameters(), lr=0.1)."
            )
        if isinstance(optimizer, HAM):
            raise InputError("HAM(optimizer=HAM): it already has the multiplicative step.")
        check_within("HAM", "alpha", alpha, 0, float("inf"), meaning="a strength")
        check_within("HAM", "beta", beta, 0, float("inf"), meaning="a strength")
        check_within("HAM", "max_grad_norm", max_grad_norm, 0, float("inf"), meaning="a norm")
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.alpha = float(alpha)
        self.beta = float(beta)
        self.max_grad_norm = float(max_grad_norm)
        self._share()

    def _share(self) -> None:
        """Refer to the groups and the state of the wrapped optimizer."""
        self.param_groups = self.optimizer.param_groups
        self.state = self.optimizer.state
        self.defaults = self.optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer, then multiply the weights.

        Args:
            closure: A function that computes the gradients again, for optimizers that need it.

        Returns:
            What the wrapped optimizer returns.
        """

        def clipped() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            self._clip()
            return loss

        if closure is None:
            self._clip()
            result = self.optimizer.step()
        else:
            result = self.optimizer.step(clipped)
        self._multiply()
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        if "optimizer" in vars(self):
            self.optimizer.add_param_group(param_group)
        else:  # the constructor of the base class lists the groups
            self.param_groups.append(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer; this class has none of its own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the wrapped optimizer."""
        self.optimizer.load_state_dict(dict(state_dict))
        self._share()

    def _clip(self) -> None:
        clip_grad_norm_(
            [p for group in self.param_groups for p in group["params"]], self.max_grad_norm
        )

    @torch.no_grad()
    def _multiply(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.ndim >= 2:
                    weight.mul_(self._factor(weight, weight.grad, float(group["lr"])))

    def _factor(self, weight: Tensor, grad: Tensor, rate: float) -> Tensor:
        exponent = (weight.sign() * grad).mul_(-rate * self.alpha).sub_(rate * self.beta)
        return exponent.clamp_(-_MAX_EXPONENT, _MAX_EXPONENT).exp_()


def without_ham(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that HAM wraps, or the given one."""
    return optimizer.optimizer if isinstance(optimizer, HAM) else optimizer
