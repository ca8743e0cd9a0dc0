"""RigL: drop the smallest weights, grow those with the largest gradient.

Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from probmask.checks import check_choice, check_count, check_within
from probmask.core.allocation import Spread
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Progress
from probmask.masking.sites import Site
from probmask.methods.exchange import (
    Allocation,
    ExchangeMasker,
    SparseStart,
    falling,
    interval,
    is_due,
)

_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class RigL(SparseStart):
    """Train a sparse network whose weakest weights make room where the gradient asks for some.

    Layer l has a fixed number n_l of active weights, drawn at random at the start. Every
    ``update_every`` updates, up to the part ``stop_at`` of the training, with t the part done:

        q = ⌊α_t n_l⌋,  α_t = drop_fraction (1 + cos(π t / stop_at)) / 2
        drop the q smallest |w| of the layer, then grow the q largest |∂L/∂w| of the inactive

    What is grown begins at zero with no momentum; what is dropped and grown at once stays as it
    is. Only for these updates is the gradient of inactive weights computed.
    """

    name: ClassVar[str] = "rigl"
    summary: ClassVar[str] = "drops the smallest weights, grows by gradient"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "Evci, Gale, Menick, Castro, Elsen: Rigging the Lottery: Making All Tickets Winners. "
        "ICML 2020"
    )

    allocation: Allocation = "erk"
    dense_first: bool | None = None
    drop_fraction: float = 0.3
    update_every: int | None = None
    stop_at: float = 0.75
    replace_update: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("RigL", "replace_update", self.replace_update, (True, False))
        check_within("RigL", "drop_fraction", self.drop_fraction, 0, 1, meaning="a part of a layer")
        check_within("RigL", "stop_at", self.stop_at, 0, 1, meaning="a part of the training")
        if self.update_every is not None:
            check_count("RigL", "update_every", self.update_every, least=1, meaning="updates")

    @property
    def spread(self) -> Spread:
        """How many weights each layer has; the paper's uniform networks have a dense first one."""
        first = self.allocation == "uniform" if self.dense_first is None else self.dense_first
        return replace(super().spread, dense_first=first)

    def begin(self, sites: Sequence[Site], context: Context) -> "RigLMasker":
        """Draw the sparse network that training begins with."""
        return RigLMasker(self, sites, context)


class RigLMasker(ExchangeMasker):
    """RigL at work."""

    def __init__(self, method: RigL, sites: Sequence[Site], context: Context) -> None:
        super().__init__(method, sites, context, method.spread)
        self.method = method
        self.every = interval(method.update_every, _EVERY, context.total_steps)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Ask for the dense gradient if this update exchanges weights."""
        self.want_dense_gradient(self._exchanges(now))

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Drop and grow."""
        if self.frozen or not self._exchanges(now):
            return
        part = falling(now.fraction / self.method.stop_at, self.method.drop_fraction)
        counts = [math.floor(part * int(active.sum())) for active in self.active]
        self.regrow_by_gradient_(counts, optimizers)
        if self.method.replace_update:
            for parameter in optimizers.parameters:
                parameter.grad = None

    def _exchanges(self, now: Progress) -> bool:
        return is_due(now.step, self.every) and now.fraction < self.method.stop_at
