"""AC/DC: training alternates between the sparse network and the dense one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Range, TrainingFraction
from probmask.core.allocation import Spread
from probmask.errors import InputError
from probmask.masking.masker import Masker, Progress
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.sites import Site
from probmask.methods.families.stored import (
    StoredWeight,
    activate_,
    active_masks,
    active_sparsity,
    agreed,
    select_by,
    zero_inactive_,
)


@dataclass(frozen=True, kw_only=True)
class ACDC(Method):
    """Alternate between a compressed (sparse) and a decompressed (dense) network; end compressed.

    Compression keeps the largest |w|. The other weights are zero until the next decompression, when
    they are trained again, from zero. The training is dense for ``warm_up``; then compressed and
    decompressed in turn, for ``period`` each; then dense for ``last_dense``; then compressed for
    ``last_sparse``.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: Compare the weights of all layers, or keep the same fraction of each layer.
        warm_up: Fraction of the training that is dense at the beginning.
        period: Fraction of the training between a compression and a decompression.
        last_dense: Fraction of the training that is dense before the final compression.
        last_sparse: Fraction of the training after the final compression.
        restart_momentum: Reset the optimizer's momentum at each decompression, as the paper does.
    """

    name: ClassVar[str] = "ac-dc"
    summary: ClassVar[str] = "alternates between training the sparse and the dense network"
    group: ClassVar[str] = "newer rivals"
    year: ClassVar[int | None] = 2021
    reference: ClassVar[str] = (
        "A. Peste, E. Iofinova, A. Vladu and D. Alistarh, AC/DC: Alternating "
        "Compressed/DeCompressed Training of Deep Neural Networks, NeurIPS 2021"
    )

    scope: Literal["global", "layer"] = "global"
    warm_up: TrainingFraction = 0.1
    period: Annotated[float, Range(1e-6, 1, "a fraction of the training")] = 0.05
    last_dense: TrainingFraction = 0.1
    last_sparse: TrainingFraction = 0.15
    restart_momentum: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.warm_up + self.last_dense + self.last_sparse
        if total > 1 + 1e-9:
            raise InputError(
                f"ACDC(warm_up={self.warm_up}, last_dense={self.last_dense}, "
                f"last_sparse={self.last_sparse}): their sum is {total:g}, but these fractions of "
                "the training must not exceed 1 together."
            )

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "ACDCMasker":
        """Start dense, unless there is no warm-up."""
        return ACDCMasker(self, sites)

    def compressed_at(self, fraction: float) -> bool:
        """Return whether the network is compressed when this fraction of the training is done."""
        fraction += 1e-9  # a sum of steps may be 0.0999… instead of 0.1
        if fraction >= 1 - self.last_sparse:
            return True
        if fraction < self.warm_up or fraction >= 1 - self.last_sparse - self.last_dense:
            return False
        return math.floor((fraction - self.warm_up) / self.period) % 2 == 0


class ACDCMasker(Masker):
    """Masker of AC/DC."""

    saved = ("compressed",)
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: ACDC, sites: Sequence[Site]) -> None:
        super().__init__(sites, [StoredWeight(site) for site in sites], method.keep_of(sites))
        self.method = method
        self.spread = Spread.over(method.scope)
        self.compressed = False
        if self.keep < self.size and method.compressed_at(0.0):
            self._compress(agreed(self, self._magnitudes()))

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep inactive weights at zero; compress or decompress according to the schedule."""
        zero_inactive_(self.masked, self.weights)
        if self.frozen:
            return
        compressed = self.method.compressed_at(now.next_fraction)
        if compressed and not self.compressed:
            self._compress(self._magnitudes())
        elif self.compressed and not compressed:
            self._decompress(optimizers)

    def choose(self) -> list[Tensor]:
        """Return the active weights if compressed, else the largest."""
        if self.compressed:
            return [active.clone() for active in active_masks(self.masked)]
        return self._largest(self._magnitudes())

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def _magnitudes(self) -> list[Tensor]:
        return [weight.detach().abs() for weight in self.weights]

    def _largest(self, magnitudes: Sequence[Tensor]) -> list[Tensor]:
        return select_by(self, magnitudes, self.spread)

    def _compress(self, magnitudes: Sequence[Tensor]) -> None:
        activate_(self.masked, self.weights, self._largest(magnitudes))
        self.compressed = True

    def _decompress(self, optimizers: WeightOptimizers) -> None:
        for each, weight in zip(self.masked, self.weights, strict=True):
            optimizers.restart_(weight, ~each.active)
        if self.method.restart_momentum:
            for parameter in optimizers.parameters:
                optimizers.restart_(parameter)
        everything = [torch.ones_like(active) for active in active_masks(self.masked)]
        activate_(self.masked, self.weights, everything)
        self.compressed = False
