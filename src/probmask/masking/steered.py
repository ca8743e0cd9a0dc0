"""Methods whose sparsity follows from a penalty, steered so that it becomes the one asked for."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probmask.checks import check_choice, check_ramp, check_within
from probmask.core import schedules
from probmask.core.selection import select_top
from probmask.core.steering import pressed, steered
from probmask.masking.budgets import checked_keep
from probmask.masking.gated import GatedWeight
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Context, Masker, Method, Progress, Trainables
from probmask.masking.sites import Site


@dataclass(frozen=True, kw_only=True)
class SteeredMethod(Method):
    """A method with a penalty on what is kept.

    With ``steer`` its weight is moved during training so that what is kept follows a cubic down to
    the budget, from ``ramp_begin`` to ``ramp_end`` of the training; without, it stays as given.
    Either way exactly the budget is selected by the method's own criterion at ``freeze_at`` of the
    training, and the weights that stay train on: the exact cut is not the papers', so what it takes
    away can be made up for. None selects at the end. With ``exact=False`` the method's own rule
    says what stays, as in the papers: the sparsity reached is what came of it. ``gate_lr`` is
    Adam's rate for the gates; None lets them travel far enough in a training of any length.
    """

    steer: bool = True
    ramp_begin: float = 0.1
    ramp_end: float = 0.6
    freeze_at: float | None = 0.8
    exact: bool = True
    gate_lr: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        caller = type(self).__name__
        check_choice(caller, "steer", self.steer, (True, False))
        check_choice(caller, "exact", self.exact, (True, False))
        check_ramp(
            caller, ramp_begin=self.ramp_begin, ramp_end=self.ramp_end, meaning="what is kept falls"
        )
        if self.freeze_at is not None:
            check_within(
                caller, "freeze_at", self.freeze_at, 0, 1, meaning="a part of the training"
            )
        if self.gate_lr is not None:
            check_within(caller, "gate_lr", self.gate_lr, 1e-9, math.inf, meaning="Adam's rate")


class SteeredMasker(Masker):
    """Such a method at work: the steering, the gates' optimizer and the exact selection.

    Sites whose masks are no `GatedWeight` are kept whole. ``knob`` is the factor on the penalty.
    """

    def __init__(
        self,
        method: SteeredMethod,
        sites: Sequence[Site],
        masks: Sequence[MaskedWeight],
        context: Context,
        *,
        gate_lr: float,
        begin: int = 0,
    ) -> None:
        super().__init__(sites, masks)
        self.settings = method
        self.seed = context.seed
        self.gate_lr = method.gate_lr or gate_lr
        self.first_update, self.last_update = begin, context.total_steps
        self.size = sum(site.size for site in sites)
        self.keep = checked_keep(method, sites)
        self.knob = self.pressure = 1.0
        if self.keep == self.size:
            for mask in self.masks:
                mask.frozen = True  # everything is kept: dense training, with no gate in it

    @abstractmethod
    def term(self) -> Tensor:
        """The penalty for a factor of 1."""

    @abstractmethod
    def kept_of(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """How many weights of a gated site would be kept, by the method's own rule."""

    @abstractmethod
    def criterion(self, mask: GatedWeight, weight: Tensor) -> Tensor:
        """What the weights of a gated site are selected by, the larger the better."""

    @property
    @abstractmethod
    def border(self) -> float:
        """The criterion above which a weight is kept by the method's own rule."""

    @property
    def gated(self) -> list[tuple[GatedWeight, Tensor]]:
        """The gated sites: mask and weight."""
        pairs = zip(self.masks, self.weights, strict=True)
        return [(mask, weight) for mask, weight in pairs if isinstance(mask, GatedWeight)]

    def trainables(self) -> list[Trainables]:
        """Adam on the gates, its rate on a cosine from the moment they are trained."""
        gates = [mask.gate for mask, _ in self.gated]
        if not gates:
            return []

        def learning_rate(now: Progress, _: float) -> float:
            if now.step < self.first_update:
                return 0.0
            return self.gate_lr * schedules.cosine(self.part(now))

        return [Trainables(torch.optim.Adam(gates, lr=self.gate_lr), learning_rate)]

    def part(self, now: Progress) -> float:
        """The part of the training of the gates that is done."""
        span = self.last_update - self.first_update
        return min(1.0, max(0.0, (now.step - self.first_update) / span))

    def penalty(self) -> Tensor | float:
        """The method's penalty, as strong as the steering has it."""
        return 0.0 if self.frozen else self.pressure * self.term()

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Turn the knob; freeze when it is time."""
        if self.frozen:
            return
        if self.settings.steer and now.step >= self.first_update:
            self._steer(now)
        freeze_at = self.settings.freeze_at
        if freeze_at is not None and self.part(now) >= freeze_at:
            self.freeze()

    def _steer(self, now: Progress) -> None:
        wanted = schedules.kept_fraction(
            self.part(now),
            self.keep / self.size,
            begin=self.settings.ramp_begin,
            end=self.settings.ramp_end,
        )
        kept = self.kept_now() / self.size
        updates = self.last_update - self.first_update
        self.knob = steered(self.knob, kept, wanted, updates=updates)
        self.pressure = pressed(self.knob, kept, wanted)

    @torch.no_grad()
    def kept_now(self) -> float:
        """How many weights would be kept by the method's own rule."""
        counts = [self.kept_of(mask, weight).double() for mask, weight in self.gated]
        whole = self.size - sum(weight.numel() for _, weight in self.gated)
        return whole + (float(torch.stack(counts).sum()) if counts else 0.0)

    def choose(self) -> list[Tensor]:
        """Exactly the budget by the method's criterion, ties by magnitude; whole layers first.

        Or, if the number is the method's to decide, all above its border.
        """
        values = [torch.full_like(weight, math.inf, dtype=torch.float32) for weight in self.weights]
        for value, mask, weight in zip(values, self.masks, self.weights, strict=True):
            if isinstance(mask, GatedWeight):
                value.copy_(self.criterion(mask, weight.detach()))
        if not self.settings.exact:
            return [value > self.border for value in values]
        ties = [weight.detach().abs() for weight in self.weights]
        return select_top(values, self.keep, ties=ties, names=self.names)

    def metrics(self) -> dict[str, float]:
        """How sparse the method itself has become, and how strong its penalty is."""
        kept = sum(int(m.hard.sum()) for m in self.masks) if self.frozen else self.kept_now()
        return {"expected_sparsity": 1 - kept / self.size, "penalty_factor": self.pressure}

    def state_dict(self) -> dict[str, Any]:
        """The knob and the seed, and the masks once they are frozen."""
        numbers = {"seed": self.seed, "knob": self.knob, "pressure": self.pressure}
        return {**super().state_dict(), **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.seed, self.knob, self.pressure = state["seed"], state["knob"], state["pressure"]
