"""Dense training: nothing is pruned. Sparse results are compared with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probmask.checks import Sparsity
from probmask.errors import InputError
from probmask.masking.masker import Masker
from probmask.masking.method import Context, Method
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """Keep every weight.

    Args:
        sparsity: 0, the only sparsity of dense training.

    Example:
        >>> probmask.Dense().sparsity
        0.0
    """

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = "keeps every weight: the baseline"
    group: ClassVar[str] = "baselines"

    sparsity: Sparsity = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity != 0:
            raise InputError(
                f"Dense(sparsity={self.sparsity}): dense training prunes nothing; omit sparsity or "
                "choose a method that prunes."
            )

    def refuses_shards(self) -> str:
        """Return an empty text: shards are supported."""
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> "DenseMasker":
        """Keep every weight."""
        return DenseMasker(sites, [DenseWeight(site) for site in sites], self.keep_of(sites))


class DenseWeight(MaskedWeight):
    """One site that stays dense."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the weight itself."""
        return weight


class DenseMasker(Masker):
    """Masker of dense training."""

    def choose(self) -> list[Tensor]:
        """Return masks that keep everything."""
        return [torch.ones_like(weight, dtype=torch.bool) for weight in self.weights]
