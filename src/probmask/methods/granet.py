"""GraNet: prune gradually, and regrow weights by gradient at each pruning.

Liu et al., "Sparse Training via Boosting Pruning Plasticity with Neuroregeneration", NeurIPS 2021.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from probmask.checks import LayerFraction, Range, TrainingFraction, Updates
from probmask.core.allocation import Spread
from probmask.core.selection import select_top
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method, number_kept
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.exchange import (
    activate_at_random_,
    cosine_decay,
    interval,
    is_due,
    regrow_by_gradient_,
)
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_magnitudes,
    active_masks,
    active_sparsity,
    count_active,
    largest_active,
    set_outside_gradient,
    zero_inactive_,
)

_PAPER_INTERVAL = 1000


@dataclass(frozen=True, kw_only=True)
class GraNet(Method):
    """Prune by magnitude over all layers, gradually, and exchange weights by gradient each time.

    Every ``update_every`` updates, with t the fraction of the training that is done and x the
    fraction of the way from ``prune_begin`` to ``prune_end``:

        S_t = S_0 + (S - S_0) (1 - (1 - x)³): keep the largest |w| of all layers together
        drop the ⌈p_t n_l⌉ smallest |w| of each layer, then grow the same number there, from zero:
        the inactive weights with the largest |∂L/∂w|; p_t falls from drop_fraction to
        drop_fraction_end on a cosine

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        start_sparsity: The sparsity S_0 of the first network, drawn at random with the number of
            weights per layer of ERK. It is ``sparsity`` if that is lower.
        prune_begin: Fraction of the training at which the sparsity begins to rise.
        prune_end: Fraction of the training at which it reaches ``sparsity``.
        drop_fraction: The fraction of a layer's weights exchanged at the start.
        drop_fraction_end: The fraction exchanged at the end.
        update_every: Updates between prunings. None: 1000, or a twentieth of a short training.
    """

    name: ClassVar[str] = "granet"
    summary: ClassVar[str] = "gradual pruning with regrowth by gradient"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2021
    reference: ClassVar[str] = (
        "Liu, Chen, Chen, Atashgahi, Yin, Kou, Shen, Pechenizkiy, Wang, Mocanu: Sparse Training "
        "via Boosting Pruning Plasticity with Neuroregeneration. NeurIPS 2021"
    )
    ordered: ClassVar[tuple[str, ...]] = ("prune_begin", "prune_end")

    start_sparsity: Annotated[float, Range(0, 1, "a sparsity")] = 0.5
    prune_begin: TrainingFraction = 0.0
    prune_end: TrainingFraction = 0.5
    drop_fraction: LayerFraction = 0.5
    drop_fraction_end: LayerFraction = 0.005
    update_every: Updates | None = None

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "GraNetMasker":
        """Draw the network that training starts with."""
        return GraNetMasker(self, sites, context)

    def sparsity_at(self, fraction: float) -> float:
        """S_t, the sparsity when this fraction of the training is done."""
        start = min(self.start_sparsity, self.sparsity)
        if fraction >= self.prune_end:
            return self.sparsity
        x = max(0.0, fraction - self.prune_begin) / (self.prune_end - self.prune_begin)
        return start + (self.sparsity - start) * (1 - (1 - x) ** 3)


class GraNetMasker(Masker):
    """Masker of GraNet."""

    masked: tuple[StoredWeight, ...]

    def __init__(self, method: GraNet, sites: Sequence[Site], context: Context) -> None:
        super().__init__(sites, [StoredWeight(site) for site in sites], method.keep_of(sites))
        self.method = method
        self.every = interval(method.update_every, _PAPER_INTERVAL, context.total_steps)
        start = number_kept(min(method.start_sparsity, method.sparsity), self.size)
        spread = Spread(allocation="erk")
        activate_at_random_(self, self.masked, sites, spread, start, context.seed)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Request the dense gradient if this update exchanges weights."""
        set_outside_gradient(self.masked, float(is_due(now.step, self.every)))

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Prune, drop and grow."""
        if self.frozen or not is_due(now.step, self.every):
            return
        method = self.method
        self._prune(number_kept(method.sparsity_at(now.fraction), self.size))
        dropped = cosine_decay(now.fraction, method.drop_fraction, method.drop_fraction_end)
        active = self.shards.counts(active_masks(self.masked))
        counts = [math.ceil(dropped * count) for count in active]
        regrow_by_gradient_(self.masked, self.weights, counts, optimizers, self.shards)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero."""
        zero_inactive_(self.masked, self.weights)

    def choose(self) -> list[Tensor]:
        """Return the active weights, or the largest of them if they exceed the budget."""
        return largest_active(self, self.masked)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _prune(self, keep: int) -> None:
        if keep < count_active(self, self.masked):
            values = active_magnitudes(self.masked, self.weights)
            activate_(
                self.masked,
                self.weights,
                select_top(values, keep, names=self.names, shards=self.shards),
            )
