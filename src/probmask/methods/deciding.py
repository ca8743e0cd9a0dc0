"""What all recipes of ProbMask have in common: their schedules, and how decided they are."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from probmask.masking.protocol import Histogram, Masker, Progress
from probmask.methods.recipes import Recipe

if TYPE_CHECKING:
    from probmask.methods.probmask import ProbMask

_BINS = 20  # of the histogram of probabilities
_UNDECIDED = (0.05, 0.95)  # a probability between these stands neither for 0 nor for 1


class DecidingMasker(Masker):
    """ProbMask at work on one model, wherever its probabilities come from."""

    method: "ProbMask"
    settings: Recipe
    against_collapse = (
        "; min_keep_per_layer=1 forbids it (on the command line: --set method.min_keep_per_layer=1)"
    )

    @property
    @abstractmethod
    def probs(self) -> list[Tensor]:
        """The probabilities of all sites."""

    def progress(self, now: Progress) -> float:
        """The part of the training that is done, for schedules."""
        return now.epoch_fraction if self.settings.every == "epoch" else now.fraction

    def histograms(self) -> dict[str, Histogram]:
        """The probabilities of all layers, as long as they are learned."""
        if self.frozen:
            return {}
        counts = torch.stack([torch.histc(p.detach(), _BINS, min=0, max=1) for p in self.probs])
        return {"prob": Histogram(0, 1, tuple(int(count) for count in counts.double().sum(0)))}

    def warn_of_collapse(self, kept: Sequence[float]) -> None:
        """Name layers without weights, unless each must keep some: then they will."""
        if self.method.min_keep_per_layer == 0:
            super().warn_of_collapse(kept)


def count_undecided(probs: Sequence[Tensor]) -> int:
    """How many probabilities are neither close to 0 nor to 1."""
    low, high = _UNDECIDED
    return sum(int(((prob > low) & (prob < high)).count_nonzero()) for prob in probs)
