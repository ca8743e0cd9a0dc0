"""Summary of a sparse network: the number of weights kept, in total and per layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from probmask.masking.sites import Site


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
    """Number of weights kept of a network and of each of its layers."""

    layers: tuple[LayerSummary, ...]

    def __str__(self) -> str:
        rows = [*self.layers, LayerSummary("all", (), self.kept, self.size)]
        return "\n".join(
            f"{row.name}: {row.kept:,} of {row.size:,} kept, {100 * row.sparsity:.2f} % sparse"
            for row in rows
        )

    @property
    def kept(self) -> int:
        """Number of weights kept."""
        return sum(layer.kept for layer in self.layers)

    @property
    def size(self) -> int:
        """Number of maskable weights."""
        return sum(layer.size for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Fraction pruned."""
        return 1 - self.kept / self.size if self.size else 0.0


def summarize(sites: Sequence[Site], masks: Sequence[Tensor]) -> Summary:
    """Return the summary of a network with these masks, one per site."""
    return Summary(
        tuple(
            LayerSummary(site.name, site.shape, int(mask.sum()), site.size)
            for site, mask in zip(sites, masks, strict=True)
        )
    )
