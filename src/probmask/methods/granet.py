"""GraNet: prune gradually, and regrow by gradient what each pruning lost too early.

Liu et al., "Sparse Training via Boosting Pruning Plasticity with Neuroregeneration", NeurIPS 2021.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from probmask.checks import check_count, check_ramp, check_within
from probmask.core.allocation import Spread
from probmask.core.selection import select_top
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Method, Progress, keep_of
from probmask.masking.sites import Site
from probmask.methods.exchange import ExchangeMasker, falling, interval, is_due, magnitude

_EVERY = 1000


@dataclass(frozen=True, kw_only=True)
class GraNet(Method):
    """Prune by magnitude over all layers, step by step, exchanging weights by gradient each time.

    The network begins at ``start_sparsity`` (at ``sparsity``, if that is lower), its layers as ERK
    has it. Every ``update_every`` updates, with t the part of the training done and x how far t
    is on the way from ``prune_begin`` to ``prune_end``:

        S_t = S_0 + (S - S_0) (1 - (1 - x)³): keep the largest |w| of all layers together
        drop the ⌈p_t n_l⌉ smallest |w| of each layer, and grow as many there, the largest |∂L/∂w|
        of the inactive, at zero; p_t from drop_fraction to drop_fraction_end along a cosine
    """

    name: ClassVar[str] = "granet"
    summary: ClassVar[str] = "gradual pruning with regrowth by gradient"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2021
    reference: ClassVar[str] = (
        "Liu, Chen, Chen, Atashgahi, Yin, Kou, Shen, Pechenizkiy, Wang, Mocanu: Sparse Training "
        "via Boosting Pruning Plasticity with Neuroregeneration. NeurIPS 2021"
    )

    start_sparsity: float = 0.5
    prune_begin: float = 0.0
    prune_end: float = 0.5
    drop_fraction: float = 0.5
    drop_fraction_end: float = 0.005
    update_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("GraNet", "start_sparsity", self.start_sparsity, 0, 1, meaning="a sparsity")
        check_ramp(
            "GraNet", prune_begin=self.prune_begin, prune_end=self.prune_end, meaning="pruning goes"
        )
        for name in ("drop_fraction", "drop_fraction_end"):
            check_within("GraNet", name, getattr(self, name), 0, 1, meaning="a part of a layer")
        if self.update_every is not None:
            check_count("GraNet", "update_every", self.update_every, least=1, meaning="updates")

    def begin(self, sites: Sequence[Site], context: Context) -> "GraNetMasker":
        """Draw the network that training begins with."""
        return GraNetMasker(self, sites, context)

    def sparsity_at(self, fraction: float) -> float:
        """S_t, the sparsity when this part of the training is done."""
        start = min(self.start_sparsity, self.sparsity)
        if fraction >= self.prune_end:
            return self.sparsity
        x = max(0.0, fraction - self.prune_begin) / (self.prune_end - self.prune_begin)
        return start + (self.sparsity - start) * (1 - (1 - x) ** 3)


class GraNetMasker(ExchangeMasker):
    """GraNet at work."""

    def __init__(self, method: GraNet, sites: Sequence[Site], context: Context) -> None:
        sparsity = min(method.start_sparsity, method.sparsity)
        spread = Spread(allocation="erk")
        super().__init__(method, sites, context, spread, start_sparsity=sparsity)
        self.method = method
        self.every = interval(method.update_every, _EVERY, context.total_steps)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Ask for the dense gradient if this update exchanges weights."""
        self.want_dense_gradient(is_due(now.step, self.every))

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Prune, drop and grow."""
        if self.frozen or not is_due(now.step, self.every):
            return
        self._prune(keep_of(self.method.sparsity_at(now.fraction), self.size))
        part = falling(now.fraction, self.method.drop_fraction, self.method.drop_fraction_end)
        self.regrow_by_gradient_(
            [math.ceil(part * int(active.sum())) for active in self.active], optimizers
        )

    def _prune(self, keep: int) -> None:
        if keep >= self.active_count:
            return
        sizes = [
            torch.where(active, magnitude(weight), -1.0)
            for weight, active in zip(self.weights, self.active, strict=True)
        ]
        self.activate(select_top(sizes, keep, names=self.names))
