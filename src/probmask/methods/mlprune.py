"""MLPrune: train, remove the weights that a K-FAC Fisher says matter least, fine-tune.

Zeng and Urtasun, "MLPrune: Multi-Layer Pruning for Automated Neural Network Compression", 2018.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from probmask.checks import check_choice, check_count, check_within
from probmask.core.noise import fold, uniform_
from probmask.errors import InputError
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.probing import batches_of
from probmask.masking.protocol import Context, Histogram, Progress
from probmask.masking.ranks import rank
from probmask.masking.sites import Site
from probmask.methods.curvature import importances
from probmask.methods.fine_tuning import PruneOnce, PruneOnceMasker

# A counter that keeps the order of the batches apart from the noise of the labels.
_BATCHES = -3
# Of the histograms: the same for all layers, so that they can be laid over each other.
_LOG_LOW, _LOG_HIGH, _LOG_BINS = -14.0, 2.0, 32


@dataclass(frozen=True, kw_only=True)
class MLPrune(PruneOnce):
    """Train, keep the K weights whose removal would cost most by second order, fine-tune.

        cost of θ_ij = θ_ij² / (2 [G⁻¹]_ii [A⁻¹]_jj),  A = E[a aᵀ],  G = E[g gᵀ]

    a are a layer's inputs (patches, in a convolution), g the gradients of its outputs, for labels
    that are drawn from the trained network itself (``labels="sampled"``: the Fisher information)
    or those of the data (``"given"``, for losses that are no classification). They are measured on
    ``probe_batches`` batches of the probe, all if None. ``damping`` is added to the diagonals of A
    and G, relative to their means. ``normalize`` divides by the sum of each layer's costs. One
    threshold for all layers, or the same fraction of each (``scope="layer"``).
    """

    name: ClassVar[str] = "mlprune"
    summary: ClassVar[str] = "trains, removes what a K-FAC curvature says costs least, fine-tunes"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int] = 2018
    reference: ClassVar[str] = (
        "W. Zeng, R. Urtasun, MLPrune: Multi-Layer Pruning for Automated Neural Network "
        "Compression, 2018"
    )

    scope: Literal["global", "layer"] = "global"
    normalize: bool = True
    damping: float = 1e-3
    labels: Literal["sampled", "given"] = "sampled"
    probe_batches: int | None = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("MLPrune", "scope", self.scope, ("global", "layer"))
        check_choice("MLPrune", "normalize", self.normalize, (True, False))
        check_choice("MLPrune", "labels", self.labels, ("sampled", "given"))
        check_within(
            "MLPrune", "damping", self.damping, 1e-6, math.inf, meaning="a part of the diagonal"
        )
        if self.probe_batches is not None:
            check_count("MLPrune", "probe_batches", self.probe_batches, least=1, meaning="batches")

    def begin(self, sites: Sequence[Site], context: Context) -> "MLPruneMasker":
        """Train densely at first."""
        return MLPruneMasker(self, sites, context)


class MLPruneMasker(PruneOnceMasker):
    """MLPrune at work."""

    def __init__(self, method: MLPrune, sites: Sequence[Site], context: Context) -> None:
        super().__init__(method, sites, by_layer=method.scope == "layer")
        self.method = method
        self.model = context.model
        self.holders = tuple(site.holders for site in sites)
        self.seed = context.seed
        self._seen: dict[str, Histogram] = {}
        self._probe = None if self.frozen else context.required_probe("MLPrune")

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Measure what each weight's removal would cost, and remove the cheapest."""
        costs = self.costs()
        self._seen = {
            f"log10_cost/{name}": log_histogram(cost)
            for name, cost in zip(self.names, costs, strict=True)
        }
        self.prune_(self.spread.select(costs, self.keep, self.names), optimizers)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep removed weights at zero; what they would have cost is old by now."""
        super().after_update(now, optimizers)
        self._seen = {}

    def histograms(self) -> dict[str, Histogram]:
        """The costs by which was just pruned, layer by layer."""
        return self._seen

    def costs(self) -> list[Tensor]:
        """What the removal of each weight would cost now."""
        assert self._probe is not None
        batches = batches_of("MLPrune", self._probe, self.weights[0].device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(fold(self.seed, _BATCHES, rank()))
            costs = importances(
                self.model,
                self.weights,
                self.holders,
                islice(batches, self.method.probe_batches),
                self._loss,
                damping=self.method.damping,
            )
        if self.method.normalize:
            costs = [cost / cost.sum().clamp_min(1e-300) for cost in costs]
        return costs

    def state_dict(self) -> dict[str, Any]:
        """The masks, and the seed of the labels that are drawn."""
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.seed = state["seed"]

    def _loss(self, outputs: Any, targets: Any, index: int) -> Tensor:
        """The loss of a batch, summed over its examples."""
        assert self._probe is not None
        if self.method.labels == "given":
            return self._probe.criterion(outputs, targets) * len(targets)
        if not isinstance(outputs, Tensor) or outputs.dim() < 2:
            raise InputError(
                "MLPrune(labels='sampled'): draws labels from the network's outputs, which must "
                "be logits, one row per example; pass labels='given'."
            )
        logits = outputs.float()
        labels = sample_labels(logits.detach(), self.seed, index)
        return functional.cross_entropy(logits, labels, reduction="sum")


def log_histogram(costs: Tensor) -> Histogram:
    """How the logarithms (base 10) of the costs of a layer are spread.

    A cost of nothing, or beyond the least bin, is counted there.
    """
    logs = costs.double().log10().clamp(_LOG_LOW, _LOG_HIGH)
    counts = torch.histc(logs, _LOG_BINS, min=_LOG_LOW, max=_LOG_HIGH)
    return Histogram(_LOG_LOW, _LOG_HIGH, tuple(int(count) for count in counts))


def sample_labels(logits: Tensor, seed: int, index: int) -> Tensor:
    """Draw a class from softmax(logits) along dimension 1, by inverting the distribution."""
    ends = logits.softmax(dim=1).cumsum(dim=1)
    u = uniform_(torch.empty_like(ends[:, :1]), seed, index)
    # Not above the last class, where the sum has been rounded to less than 1.
    return (ends <= u).sum(dim=1).clamp_max(logits.shape[1] - 1)
