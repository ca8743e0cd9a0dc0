"""Dense training: nothing is removed. The twin that sparse results are compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from probmask.errors import InputError
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Context, Masker, Method
from probmask.masking.sites import Site


@dataclass(frozen=True, kw_only=True)
class Dense(Method):
    """Keep every weight."""

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = "keeps every weight: the baseline"
    group: ClassVar[str] = "floors"

    sparsity: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity != 0:
            raise InputError(
                f"Dense(sparsity={self.sparsity}): dense training removes nothing; "
                "leave sparsity out or choose a method that removes."
            )

    def begin(self, sites: Sequence[Site], context: Context) -> Masker:
        """Pass every weight through as it is."""
        return DenseMasker(sites, [DenseWeight(site) for site in sites])


class DenseWeight(MaskedWeight):
    """The weight itself."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """The weight as it is."""
        return weight


class DenseMasker(Masker):
    """Dense training at work: nothing to do."""

    def choose(self) -> list[Tensor]:
        """Keep everything."""
        return [torch.ones_like(weight, dtype=torch.bool) for weight in self.weights]
