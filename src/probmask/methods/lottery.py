"""Lottery tickets: iterative magnitude pruning that rewinds the network to where it was early on.

Frankle and Carbin, "The Lottery Ticket Hypothesis", ICLR 2019; Frankle, Dziugaite, Roy and Carbin,
"Linear Mode Connectivity and the Lottery Ticket Hypothesis", ICML 2020, for rewinding to an early
update instead of the initialization.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor

from probmask.checks import check_within
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Progress
from probmask.masking.sites import Site
from probmask.methods.rounds import IterativeMasker, IterativePruning


@dataclass(frozen=True, kw_only=True)
class Lottery(IterativePruning):
    """Train, remove the smallest weights, set the others back to update j, train again; repeat.

        m_r = 1[|w| > t_r] m_(r-1),  Σ m_r = K_r,  w_(r+1, 0) = m_r w_(1, j)

    j is ``rewind_to`` times the updates of the first training; 0 is the network as it was attached.
    Everything is set back: weights, biases, normalization and its statistics. The rounds are those
    of `IterativePruning`; each training follows the whole learning-rate schedule.
    """

    name: ClassVar[str] = "lottery"
    summary: ClassVar[str] = "prunes in rounds, rewinding the weights to an early update"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int] = 2019
    reference: ClassVar[str] = (
        "J. Frankle, M. Carbin, The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural "
        "Networks, ICLR 2019"
    )

    rewind_to: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within(
            "Lottery", "rewind_to", self.rewind_to, 0, 0.99, meaning="a part of the first training"
        )

    def begin(self, sites: Sequence[Site], context: Context) -> "LotteryMasker":
        """Train densely at first."""
        return LotteryMasker(self, sites, context)


class LotteryMasker(IterativeMasker):
    """The search for a lottery ticket at work."""

    def __init__(self, method: Lottery, sites: Sequence[Site], context: Context) -> None:
        super().__init__(method, sites, context)
        self.model = context.model
        first = context.phase_ends[0]
        self.rewind_step = min(round(method.rewind_to * first), max(0, first - 1))
        self.early: dict[str, Tensor] = {}

    def before_forward(self, now: Progress, draw: int) -> None:
        """Remember the network when the update comes to which it will be set back."""
        if now.step == self.rewind_step and not self.frozen:
            self.early = self._parameters() | self._buffers()

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Remember parameters that were set between `attach` and the first update."""
        # DDP brings the first rank's when it wraps the model; a checkpoint may have been loaded.
        if now.step == self.rewind_step == 0 and not self.frozen:
            self.early |= self._parameters()

    def rewind_(self) -> None:
        """Set all parameters and buffers back."""
        named = chain(self.model.named_parameters(), self.model.named_buffers())
        for name, tensor in named:
            if name in self.early:
                tensor.copy_(self.early[name])

    def state_dict(self) -> dict[str, Any]:
        """The masks, and the network that is set back to."""
        return {**super().state_dict(), "early": dict(self.early)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.early = dict(state["early"])

    def _parameters(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def _buffers(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.named_buffers()}
