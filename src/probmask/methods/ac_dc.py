"""AC/DC: training alternates between the sparse network and the dense one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.allocation import Spread
from probmask.errors import InputError
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.probing import averaged
from probmask.masking.protocol import Context, Method, Progress
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker


@dataclass(frozen=True, kw_only=True)
class ACDC(Method):
    """Compress to the full sparsity, train, decompress, train, and so on; end compressed.

    Compressing keeps the largest |w|, of all layers together or (``scope="layer"``) the same
    fraction of each; the others are zero until the next decompression, when they start from zero.
    In parts of the training: dense for ``warm_up``; then stretches of ``period``, compressed and
    decompressed in turn; dense for ``last_dense``; compressed for ``last_sparse``, to the end.
    ``restart_momentum`` makes the optimizer forget its momentum at each decompression, as the
    paper's runs do.
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
    warm_up: float = 0.1
    period: float = 0.05
    last_dense: float = 0.1
    last_sparse: float = 0.15
    restart_momentum: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("ACDC", "scope", self.scope, ("global", "layer"))
        check_choice("ACDC", "restart_momentum", self.restart_momentum, (True, False))
        for name in ("warm_up", "last_dense", "last_sparse"):
            value = getattr(self, name)
            check_within("ACDC", name, value, 0, 1, meaning="a part of the training")
        check_within("ACDC", "period", self.period, 1e-6, 1, meaning="a part of the training")
        taken = self.warm_up + self.last_dense + self.last_sparse
        if taken > 1 + 1e-9:
            raise InputError(
                f"ACDC(warm_up={self.warm_up}, last_dense={self.last_dense}, "
                f"last_sparse={self.last_sparse}): together they are {taken:g} of the training; "
                "at most 1."
            )

    def begin(self, sites: Sequence[Site], context: Context) -> "ACDCMasker":
        """Start dense, unless there is no warm-up."""
        return ACDCMasker(self, sites)

    def compressed_at(self, fraction: float) -> bool:
        """Whether the network is sparse when this part of the training is done."""
        fraction += 1e-9  # a tenth of the training is not over at 0.0999...
        if fraction >= 1 - self.last_sparse:
            return True
        if fraction < self.warm_up or fraction >= 1 - self.last_sparse - self.last_dense:
            return False
        return math.floor((fraction - self.warm_up) / self.period) % 2 == 0


class ACDCMasker(StoredMasker):
    """AC/DC at work on one model."""

    def __init__(self, method: ACDC, sites: Sequence[Site]) -> None:
        super().__init__(method, sites)
        self.method = method
        self.spread = Spread.over(method.scope)
        self.compressed = False
        if self.keep == self.size:
            self.freeze()  # there is nothing to remove
        elif method.compressed_at(0.0):
            self._compress(averaged(self._magnitudes()))  # ranks may not have the same weights yet

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Compress or decompress when it is time to."""
        super().after_update(now, optimizers)
        if self.frozen:
            return
        compressed = self.method.compressed_at((now.step + 1) / now.total_steps)
        if compressed and not self.compressed:
            self._compress(self._magnitudes())
        elif self.compressed and not compressed:
            self._decompress(optimizers)

    def choose(self) -> list[Tensor]:
        """The active weights while compressed, else the largest."""
        return (
            [active.clone() for active in self.active]
            if self.compressed
            else self._largest(self._magnitudes())
        )

    def state_dict(self) -> dict[str, Any]:
        """The active weights, and whether they are all there is."""
        return {**super().state_dict(), "compressed": self.compressed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.compressed = state["compressed"]

    def _magnitudes(self) -> list[Tensor]:
        return [weight.detach().abs() for weight in self.weights]

    def _largest(self, magnitudes: Sequence[Tensor]) -> list[Tensor]:
        return self.spread.select(magnitudes, self.keep, self.names)

    def _compress(self, magnitudes: Sequence[Tensor]) -> None:
        self.activate(self._largest(magnitudes))
        self.compressed = True

    def _decompress(self, optimizers: WeightOptimizers) -> None:
        for mask, weight in zip(self.masks, self.weights, strict=True):
            optimizers.restart_(weight, ~mask.active)
        if self.method.restart_momentum:
            for parameter in optimizers.parameters:
                optimizers.restart_(parameter)
        self.activate([torch.ones_like(active) for active in self.active])
        self.compressed = False
