"""One-shot magnitude pruning: train, remove the smallest weights at once, train on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probmask.checks import check_choice, check_within
from probmask.core.allocation import Spread
from probmask.masking.probing import averaged
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site
from probmask.methods.gmp import MagnitudeMasker


@dataclass(frozen=True, kw_only=True)
class Magnitude(Method):
    """Remove the smallest weights once.

    m = 1[|w| > θ], θ the magnitude at which the budget ends: one for all layers, or with
    ``scope="layer"`` one for each, of which the same fraction then stays. Training is dense up to
    the part ``prune_at`` of it and masked from there on; 1, the default, prunes at the very end, 0
    before the first update. ``dense_first`` and ``dense_last`` leave those layers whole, at the
    cost of the others.
    """

    name: ClassVar[str] = "magnitude"
    summary: ClassVar[str] = "removes the smallest weights once: a floor"
    group: ClassVar[str] = "floors"
    year: ClassVar[int | None] = 1989
    reference: ClassVar[str] = (
        "S. A. Janowsky, Pruning versus clipping in neural networks, Physical Review A 39, 1989"
    )

    scope: Literal["global", "layer"] = "global"
    prune_at: float = 1.0
    dense_first: bool = False
    dense_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("Magnitude", "scope", self.scope, ("global", "layer"))
        check_within("Magnitude", "prune_at", self.prune_at, 0, 1, meaning="a part of the training")
        for name in ("dense_first", "dense_last"):
            check_choice("Magnitude", name, getattr(self, name), (True, False))

    def begin(self, sites: Sequence[Site], context: Context) -> MagnitudeMasker:
        """Start dense, or prune what is there."""
        spread = Spread.over(self.scope, dense_first=self.dense_first, dense_last=self.dense_last)
        at = self.prune_at
        masker = MagnitudeMasker(self, sites, spread, begin=at, end=at, interval=1)
        if at == 0 and not masker.frozen:
            # Ranks may not have the same weights yet, but must have the same masks.
            magnitudes = averaged([site.weight.detach().abs().float() for site in sites])
            masker.activate(spread.select(magnitudes, masker.keep, masker.names))
            masker.freeze()
        return masker
