"""Shards: the rows of tensors that are divided among ranks, and sums over all of their rows.

A function of `core` that needs a sum, a count or an order over whole tensors takes ``shards``. By
default the tensors are whole (`WHOLE`), and nothing is sent. If they are shards, every rank calls
the function with its own rows at the same moment, and all ranks get the same result for the whole
tensors. Only small tensors are sent: sums, counts and histograms, never weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Shards(ABC):
    """Division of tensors along their first dimension into ``count`` shards of equal size.

    The last shards may have fewer rows, or none, as with ``torch.chunk``. This process has the
    shard ``index``.
    """

    index: int
    count: int

    @abstractmethod
    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values``, a small tensor, over all shards."""

    @abstractmethod
    def gathered(self, values: Tensor) -> Tensor:
        """Return the ``values`` of all shards, stacked along a new first dimension."""

    def rows(self, length: int) -> range:
        """Return the rows of this shard, of a tensor with ``length`` rows."""
        each = -(-length // self.count)
        begin = min(length, self.index * each)
        return range(begin, min(length, begin + each))

    def part(self, whole: Tensor) -> Tensor:
        """Return the rows of this shard."""
        if self.count == 1:
            return whole
        rows = self.rows(whole.shape[0])
        return whole[rows.start : rows.stop]

    def first_position(self, shape: Sequence[int]) -> int:
        """Return the row-major position, in a whole tensor, of the first entry of this shard."""
        if self.count == 1:
            return 0
        return self.rows(shape[0]).start * torch.Size(shape[1:]).numel()

    def counts(self, masks: Sequence[Tensor]) -> list[int]:
        """Return the number of True entries of each mask, over all shards."""
        if self.count == 1:
            return [int(mask.count_nonzero()) for mask in masks]
        found = torch.stack([mask.count_nonzero() for mask in masks])
        counts: list[int] = self.total(found).tolist()
        return counts

    def sums(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the sum of each tensor over all shards, in fp64."""
        if self.count == 1:
            return [float(tensor.detach().sum(dtype=torch.float64)) for tensor in tensors]
        found = torch.stack([tensor.detach().sum(dtype=torch.float64) for tensor in tensors])
        sums: list[float] = self.total(found).tolist()
        return sums


class _Whole(Shards):
    """Tensors that are not divided."""

    index, count = 0, 1

    def total(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def gathered(self, values: Tensor) -> Tensor:
        """Return the values with a new first dimension."""
        return values[None]


WHOLE: Shards = _Whole()
