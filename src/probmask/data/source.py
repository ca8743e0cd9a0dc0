"""What a data set is to the trainer: batches that are a function of seed, epoch and position."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from probmask.errors import InputError


@dataclass(frozen=True)
class Batch:
    """Images ready for the network, and their labels."""

    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Shard:
    """The part of every training batch that falls to one of several ranks."""

    rank: int = 0
    ranks: int = 1


# All of every batch: what the only rank gets.
WHOLE = Shard()


class DataSource(ABC):
    """A data set for classification.

    The training batch at a given epoch and position is a pure function of the seed, so that a
    resumed run sees exactly the batches it would have seen, from the middle of an epoch too.
    """

    name: str
    classes: int
    image_shape: tuple[int, int, int]
    train_size: int
    test_size: int

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of training batches in an epoch; what does not fill a batch is left out."""
        if batch_size > self.train_size:
            raise InputError(
                f"batch_size={batch_size}: {self.name} has {self.train_size} training images; "
                "a batch cannot be larger."
            )
        return self.train_size // batch_size

    @abstractmethod
    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Iterator[Batch]:
        """The training batches of an epoch, shuffled and augmented, from position ``start`` on.

        ``batch_size`` is over all ranks together; each gets its own slice.
        """

    @abstractmethod
    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """All test images once, in order, not augmented."""
