"""Summary of a sparse network: the number of weights kept, in total and per layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from probmask.masking.sharding import counts_nonzero
from probmask.masking.sites import Site, find_unmasked
from probmask.messages import listed


@dataclass(frozen=True)
class LayerSummary:
    """Number of weights kept of one site."""

    name: str
    shape: tuple[int, ...]
    kept: int
    size: int

    @property
    def sparsity(self) -> float:
        """Fraction pruned."""
        return 1 - self.kept / self.size if self.size else 0.0


@dataclass(frozen=True)
class Summary:
    """Number of weights kept of a network and of each of its masked layers.

    ``kept``, ``size`` and ``sparsity`` are of the masked layers, which share the budget. `network`
    adds the tensors of two or more dimensions that are not masked, such as embeddings.
    """

    layers: tuple[LayerSummary, ...]
    unmasked: tuple[LayerSummary, ...] = ()

    def __str__(self) -> str:
        rows = [*self.layers, LayerSummary("all", (), self.kept, self.size)]
        if self.unmasked:
            # The tensors of a parametrization have one name.
            names = listed([*dict.fromkeys(layer.name for layer in self.unmasked)])
            rows.append(replace(self.network, name=f"with {names}, not masked"))
        return "\n".join(
            f"{row.name}: {row.kept:,} of {row.size:,} kept, {100 * row.sparsity:.2f} % sparse"
            for row in rows
        )

    @property
    def kept(self) -> int:
        """Number of weights kept in the masked layers."""
        return sum(layer.kept for layer in self.layers)

    @property
    def size(self) -> int:
        """Number of weights in the masked layers."""
        return sum(layer.size for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Fraction of the masked layers' weights that is pruned."""
        return 1 - self.kept / self.size if self.size else 0.0

    @property
    def network(self) -> LayerSummary:
        """Totals of the whole network: its masked layers and its unmasked tensors."""
        layers = self.layers + self.unmasked
        kept, size = sum(layer.kept for layer in layers), sum(layer.size for layer in layers)
        return LayerSummary("network", (), kept, size)


def summarize(model: nn.Module, sites: Sequence[Site], kept: Sequence[int]) -> Summary:
    """Return the summary of a network that keeps these numbers of weights, site by site."""
    unmasked = find_unmasked(model, sites)
    nonzero = counts_nonzero([weight for _, weight in unmasked])
    return Summary(
        tuple(
            LayerSummary(site.name, site.shape, count, site.size)
            for site, count in zip(sites, kept, strict=True)
        ),
        tuple(
            LayerSummary(name, tuple(weight.shape), count, weight.numel())
            for (name, weight), count in zip(unmasked, nonzero, strict=True)
        ),
    )
