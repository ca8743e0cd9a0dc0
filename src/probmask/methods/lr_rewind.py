"""Learning-rate rewinding: iterative magnitude pruning that replays the schedule, not the weights.

Renda, Frankle and Carbin, "Comparing Rewinding and Fine-tuning in Neural Network Pruning",
ICLR 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from probmask.masking.protocol import Context
from probmask.masking.sites import Site
from probmask.methods.rounds import IterativeMasker, IterativePruning


@dataclass(frozen=True, kw_only=True)
class LRRewind(IterativePruning):
    """Train, remove the smallest weights, train the others on under the whole schedule; repeat.

        m_r = 1[|w| > t_r] m_(r-1),  Σ m_r = K_r,  w_(r+1, 0) = m_r w_(r, T)

    The rounds are those of `IterativePruning`; the learning rate starts from the top in each.
    """

    name: ClassVar[str] = "lr-rewind"
    summary: ClassVar[str] = "prunes in rounds, each retrained under the whole rate schedule"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int] = 2020
    reference: ClassVar[str] = (
        "A. Renda, J. Frankle, M. Carbin, Comparing Rewinding and Fine-tuning in Neural Network "
        "Pruning, ICLR 2020"
    )

    def begin(self, sites: Sequence[Site], context: Context) -> "LRRewindMasker":
        """Train densely at first."""
        return LRRewindMasker(self, sites, context)


class LRRewindMasker(IterativeMasker):
    """Learning-rate rewinding at work."""

    def rewind_(self) -> None:
        """Keep the weights as they are: only the schedule begins anew."""
