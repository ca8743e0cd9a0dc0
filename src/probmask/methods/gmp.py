"""Gradual magnitude pruning: sparsity rises along a cubic, and the smallest weights go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from probmask.checks import check_choice, check_count, check_ramp
from probmask.core import schedules
from probmask.core.allocation import Spread
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.protocol import Context, Method, Progress
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker

_PAPER_INTERVAL = 2000  # updates between two prunings, of 128,000


@dataclass(frozen=True, kw_only=True)
class GMP(Method):
    """Remove the smallest weights little by little while the others train on.

    S_t = S (1 - (1 - (t - b) / (e - b))³), t the part of the training that is done, from b =
    ``ramp_begin`` to e = ``ramp_end``: every ``update_every`` updates (None: 2000, or a twentieth
    of the training if that is less) the smallest active weights are removed until the sparsity is
    S_t. What is removed stays removed, and from e on the mask is final. ``scope="layer"`` gives
    each layer the sparsity S_t, as the paper does; ``"global"`` compares the weights of all layers.
    ``dense_first`` and ``dense_last`` leave those layers whole, at the cost of the others.
    """

    name: ClassVar[str] = "gmp"
    summary: ClassVar[str] = "gradual magnitude pruning along a cubic schedule"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2017
    reference: ClassVar[str] = (
        "M. Zhu and S. Gupta, To prune, or not to prune: exploring the efficacy of pruning for "
        "model compression, ICLR workshop 2018"
    )

    scope: Literal["global", "layer"] = "layer"
    ramp_begin: float = 0.3125
    ramp_end: float = 0.59375
    update_every: int | None = None
    dense_first: bool = False
    dense_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("GMP", "scope", self.scope, ("global", "layer"))
        check_ramp(
            "GMP", ramp_begin=self.ramp_begin, ramp_end=self.ramp_end, meaning="sparsity rises"
        )
        if self.update_every is not None:
            check_count("GMP", "update_every", self.update_every, least=1, meaning="updates")
        for name in ("dense_first", "dense_last"):
            check_choice("GMP", name, getattr(self, name), (True, False))

    def begin(self, sites: Sequence[Site], context: Context) -> "MagnitudeMasker":
        """Start dense."""
        interval = self.update_every or max(1, min(_PAPER_INTERVAL, context.total_steps // 20))
        return MagnitudeMasker(
            self,
            sites,
            Spread.over(self.scope, dense_first=self.dense_first, dense_last=self.dense_last),
            begin=self.ramp_begin,
            end=self.ramp_end,
            interval=interval,
        )


class MagnitudeMasker(StoredMasker):
    """Pruning by magnitude at work: at once, if ``begin`` is ``end``, or gradually."""

    def __init__(
        self,
        method: Method,
        sites: Sequence[Site],
        spread: Spread,
        *,
        begin: float,
        end: float,
        interval: int,
    ) -> None:
        super().__init__(method, sites, spread=spread)
        self.spread = spread
        self.ramp = (begin, end)
        self.interval = interval
        if self.keep == self.size:
            self.freeze()  # there is nothing to remove

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Prune when it is time to."""
        super().after_update(now, optimizers)
        if self.frozen:
            return
        done = (now.step + 1) / now.total_steps
        begin, end = self.ramp
        if done >= end:
            self.activate(self.largest())
            self.freeze()
        elif done >= begin and (now.step + 1) % self.interval == 0:
            spare = schedules.kept_fraction(done, 0.0, begin=begin, end=end)
            self.activate(self.largest(spare=spare))

    def largest(self, *, spare: float = 0.0) -> list[Tensor]:
        """The largest of the active weights: the budget, and ``spare`` of what is to go."""
        magnitudes = [
            weight.detach().abs().float().masked_fill(~active, -1.0)
            for weight, active in zip(self.weights, self.active, strict=True)
        ]
        return self.spread.select(magnitudes, self.keep, self.names, spare=spare)

    def choose(self) -> list[Tensor]:
        """The largest of the active weights: all of them, once they are within the budget."""
        return self.largest()
