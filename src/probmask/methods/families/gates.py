"""Gates: a trained parameter per weight, per output or per layer that decides what is kept.

Gates are fp32 for weights of any dtype: in bf16 a gate could not take small steps. The noise or
mask drawn for the next passes is not saved: it is a function of seed and update.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from probmask.core.schedules import cosine
from probmask.core.selection import select_top
from probmask.core.steering import steered_penalty
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site


class BernoulliWeight(MaskedWeight):
    """One site: w m, m ~ Bernoulli(gate). The mask ``drawn`` is set before each forward pass."""

    def __init__(self, site: Site, gate: Tensor) -> None:
        super().__init__(site)
        self.gate = gate_parameter(site, gate)
        self.drawn = torch.zeros_like(self.gate, requires_grad=False)

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return w m. The gradient of m goes to the gate unchanged."""
        return weight * straight_through_mask(self.drawn, self.gate).to(weight.dtype)


def gate_parameter(site: Site, values: Tensor) -> nn.Parameter:
    """Return a trainable fp32 gate on the device of the site, with these initial values."""
    return nn.Parameter(values.to(site.rows.device, torch.float32))


def straight_through_mask(mask: Tensor, gate: Tensor) -> Tensor:
    """Return the mask; its gradient goes to the gate unchanged, as if the mask were the gate."""
    passed: Tensor = _StraightThroughMask.apply(mask, gate)  # type: ignore[no-untyped-call]
    return passed


class _StraightThroughMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: Tensor, gate: Tensor) -> Tensor:
        return mask.to(gate.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


def output_shape(site: Site) -> tuple[int, ...]:
    """Return the shape of one gate per output of the layer, which broadcasts over the weight.

    In a transposed convolution with groups, the outputs at the same position in their groups share
    a gate.
    """
    return tuple(
        size if axis == site.output_axis else 1 for axis, size in enumerate(site.weight.shape)
    )


def adam_on_gates(gates: Sequence[Tensor], rate: float, *, begin: int = 0) -> list[Trainables]:
    """Return Adam for the gates; from update ``begin`` on, its rate falls along a cosine."""
    if not gates:
        return []

    def learning_rate(now: Progress, _: float) -> float:
        return 0.0 if now.step < begin else rate * cosine(fraction_since(now, begin))

    return [Trainables(torch.optim.Adam(gates, lr=rate), learning_rate)]


def fraction_since(now: Progress, begin: int) -> float:
    """Return the fraction done of the training from update ``begin`` on."""
    return min(1.0, max(0.0, (now.step - begin) / (now.total_steps - begin)))


def keep_highest(
    masker: Masker, values: Sequence[Tensor], *, border: float | None = None
) -> list[Tensor]:
    """Return masks of the ``keep`` highest values of all sites; ties are decided by magnitude.

    With ``border``, the method's own rule decides instead: all values above it are kept.
    """
    if border is not None:
        return [value > border for value in values]
    ties = [weight.detach().abs() for weight in masker.weights]
    return select_top(values, masker.keep, ties=ties, names=masker.names, shards=masker.shards)


class SteeringSettings(Protocol):
    """Settings of a method whose penalty is steered towards the budget."""

    @property
    def steer(self) -> bool: ...  # noqa: D102
    @property
    def ramp_begin(self) -> float: ...  # noqa: D102
    @property
    def ramp_end(self) -> float: ...  # noqa: D102
    @property
    def freeze_at(self) -> float | None: ...  # noqa: D102


class SteeredMasker(Protocol):
    """A masker with a penalty: ``knob`` and ``pressure`` are those of `steered_penalty`."""

    knob: float
    pressure: float
    keep: int
    size: int

    def kept_now(self) -> float:
        """Return the number of weights that the method's own rule keeps."""

    def freeze(self) -> None:
        """Make the masks final."""


def steer_or_freeze(
    masker: SteeredMasker, settings: SteeringSettings, now: Progress, *, first_update: int = 0
) -> None:
    """Steer the penalty along the ramp, counted from ``first_update``; freeze at ``freeze_at``."""
    done = fraction_since(now, first_update)
    if settings.steer and now.step >= first_update:
        masker.knob, masker.pressure = steered_penalty(
            masker.knob,
            masker.kept_now() / masker.size,
            masker.keep / masker.size,
            progress=done,
            ramp=(settings.ramp_begin, settings.ramp_end),
            updates=now.total_steps - first_update,
        )
    if settings.freeze_at is not None and done >= settings.freeze_at:
        masker.freeze()


def penalty_metrics(
    masker: Masker, kept_now: Callable[[], float], penalty_factor: float
) -> dict[str, float]:
    """Return the current sparsity and the factor on the penalty."""
    kept = number_in_masks(masker) if masker.frozen else kept_now()
    return {"expected_sparsity": 1 - kept / masker.size, "penalty_factor": penalty_factor}


def number_in_masks(masker: Masker) -> int:
    """Return the number of weights that frozen masks keep."""
    return sum(masker.shards.counts([each.mask for each in masker.masked]))
