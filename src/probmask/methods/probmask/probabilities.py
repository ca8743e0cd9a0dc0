"""Functions of probabilities that the ProbMask family shares: metrics and sampling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from probmask.core.noise import Stream, logistic_
from probmask.core.relaxation import bernoulli_mask
from probmask.masking.masker import Histogram

_BINS = 20
_UNDECIDED = (0.05, 0.95)  # a probability between these is neither close to 0 nor to 1

COLLAPSE_ADVICE = (
    "; min_keep_per_layer=1 prevents it (command line: --set method.min_keep_per_layer=1)"
)


def count_undecided(probs: Sequence[Tensor]) -> int:
    """Return the number of probabilities that are neither close to 0 nor to 1."""
    low, high = _UNDECIDED
    return sum(int(((prob > low) & (prob < high)).count_nonzero()) for prob in probs)


def prob_metrics(
    probs: Sequence[Tensor], keep: int, temperature: float, kept_fraction: float
) -> dict[str, float]:
    """Return temperature, budget, sparsity and undecided probabilities per kept weight."""
    size = sum(prob.numel() for prob in probs)
    expected = sum(float(prob.sum(dtype=torch.float64)) for prob in probs)
    return {
        "temperature": temperature,
        "kept_fraction": kept_fraction,
        "expected_sparsity": 1 - expected / size,
        "undecided_per_kept": count_undecided(probs) / max(1, keep),
    }


def prob_histogram(probs: Sequence[Tensor]) -> dict[str, Histogram]:
    """Return the histogram of the probabilities of all layers."""
    counts = torch.stack([torch.histc(prob.detach(), _BINS, min=0, max=1) for prob in probs])
    return {"prob": Histogram(0, 1, tuple(int(count) for count in counts.double().sum(0)))}


def sample_masks(probs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """m ~ Bernoulli(s), equal on all ranks."""
    noise = [torch.empty_like(prob) for prob in probs]
    return [
        bernoulli_mask(prob, logistic_(out, seed, Stream.FINAL_SAMPLE, index))
        for index, (prob, out) in enumerate(zip(probs, noise, strict=True))
    ]
