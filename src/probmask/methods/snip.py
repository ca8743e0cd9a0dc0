"""SNIP: keep the weights that the loss depends on most, chosen before training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, ClassVar

from torch import Tensor

from probmask.checks import Range
from probmask.masking.distributed import averaged
from probmask.masking.method import Context, Method
from probmask.masking.probe import batches_of, mean_gradient, network_at, probing
from probmask.masking.sites import Site
from probmask.methods.families.stored import StoredMasker, keep_largest_scores


@dataclass(frozen=True, kw_only=True)
class SNIP(Method):
    """Score weights once by the derivative of the loss by a gate on each weight.

        s = |w ∂L/∂w| at the initial weights; keep the weights with the largest s of all layers

    L is the mean loss of the first batches of the probe.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        batches: Number of batches of the probe to measure on. BatchNorm normalizes each by itself.
    """

    name: ClassVar[str] = "snip"
    summary: ClassVar[str] = "scores |w ∂L/∂w| on a batch before training"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "N. Lee, T. Ajanthan and P. Torr, SNIP: Single-shot Network Pruning based on Connection "
        "Sensitivity, ICLR 2019"
    )

    batches: Annotated[int, Range(1, meaning="a number of batches")] = 1

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "it measures whole weights on a probe"

    def begin(self, sites: Sequence[Site], context: Context) -> StoredMasker:
        """Measure the scores and choose the final masks."""
        return keep_largest_scores(self, sites, lambda: self._scores(sites, context))

    def _scores(self, sites: Sequence[Site], context: Context) -> list[Tensor]:
        probe = context.required_probe("SNIP")
        weights = {site.name: site.weight.detach().clone().requires_grad_() for site in sites}
        with probing(context.model, context.seed):
            network = network_at(context.model, weights)
            batches = batches_of("attach(SNIP)", probe, sites[0].weight.device)
            losses = (
                probe.criterion(network(inputs), targets)
                for inputs, targets in islice(batches, self.batches)
            )
            gradients = mean_gradient(losses, list(weights.values()))
        scores = [
            (site.weight.detach() * gradient).abs()
            for site, gradient in zip(sites, gradients, strict=True)
        ]
        return averaged(scores)  # ranks may still have different weights
