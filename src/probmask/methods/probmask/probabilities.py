"""Functions of probabilities that the ProbMask family shares: metrics and sampling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from probmask.core.noise import Stream, logistic_
from probmask.core.relaxation import bernoulli_mask
from probmask.core.shards import WHOLE, Shards
from probmask.masking.masker import Histogram, Masker

_BINS = 20
_UNDECIDED = (0.05, 0.95)  # a probability between these is neither close to 0 nor to 1

COLLAPSE_ADVICE = (
    "; min_keep_per_layer=1 prevents it (command line: --set method.min_keep_per_layer=1)"
)


def count_undecided(masker: Masker, probs: Sequence[Tensor]) -> int:
    """Return the number of probabilities that are neither close to 0 nor to 1."""
    low, high = _UNDECIDED
    return sum(masker.shards.counts([(prob > low) & (prob < high) for prob in probs]))


def prob_metrics(
    masker: Masker, probs: Sequence[Tensor], temperature: float, kept_fraction: float
) -> dict[str, float]:
    """Return temperature, budget, sparsity and undecided probabilities per kept weight."""
    return {
        "temperature": temperature,
        "kept_fraction": kept_fraction,
        "expected_sparsity": 1 - sum(masker.shards.sums(probs)) / masker.size,
        "undecided_per_kept": count_undecided(masker, probs) / max(1, masker.keep),
    }


def prob_histogram(masker: Masker, probs: Sequence[Tensor]) -> dict[str, Histogram]:
    """Return the histogram of the probabilities of all layers."""
    counts = torch.stack([torch.histc(prob.detach(), _BINS, min=0, max=1) for prob in probs])
    total = masker.shards.total(counts.double().sum(0))
    return {"prob": Histogram(0, 1, tuple(int(count) for count in total))}


def sample_masks(
    probs: Sequence[Tensor],
    seed: int,
    shapes: Sequence[tuple[int, ...]] | None = None,
    shards: Shards = WHOLE,
) -> list[Tensor]:
    """m ~ Bernoulli(s), equal on all ranks.

    ``probs`` may be shards of tensors of these ``shapes``. The noise is that of whole tensors.
    """
    masks = []
    for index, prob in enumerate(probs):
        shape = prob.shape if shapes is None else shapes[index]
        noise = torch.empty(shape, dtype=prob.dtype, device=prob.device)
        noise = shards.part(logistic_(noise, seed, Stream.FINAL_SAMPLE, index))
        masks.append(bernoulli_mask(prob, noise))
    return masks
