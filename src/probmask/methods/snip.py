"""SNIP: keep the weights that the loss depends on most, before training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from torch import Tensor

from probmask.checks import check_count
from probmask.masking.probing import averaged, batches_of, mean_gradient, network_at, probing
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker, chosen_at_once


@dataclass(frozen=True, kw_only=True)
class SNIP(Method):
    """Score weights once by what the loss would lose with them.

    s = |w ∂L/∂w| at the initial weights, the derivative of the loss L by a gate on the weight;
    the largest of all layers stay. L is the mean loss of the first ``batches`` batches of the
    probe; more of them are one larger batch, but for BatchNorm, which normalises each by itself.
    """

    name: ClassVar[str] = "snip"
    summary: ClassVar[str] = "scores |w ∂L/∂w| on a batch before training"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2019
    reference: ClassVar[str] = (
        "N. Lee, T. Ajanthan and P. Torr, SNIP: Single-shot Network Pruning based on Connection "
        "Sensitivity, ICLR 2019"
    )

    batches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("SNIP", "batches", self.batches, least=1, meaning="batches looked at")

    def begin(self, sites: Sequence[Site], context: Context) -> StoredMasker:
        """Look at the data and choose, for good."""
        return chosen_at_once(self, sites, lambda: self._scores(sites, context))

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
        return averaged(scores)  # ranks may not have the same weights yet
