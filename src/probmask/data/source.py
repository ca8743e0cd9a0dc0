"""What a data set is to the trainer: batches that are a function of seed, epoch and position."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from probmask.core.noise import fold
from probmask.data.settings import Photographs, SmallImages
from probmask.errors import InputError

# Counters that keep the streams of random numbers apart.
ORDER, AUGMENTATION = 0, 1


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
    Validation images are training images that are held out; there are none until
    `with_validation` takes them out.
    """

    name: str
    classes: int
    class_names: tuple[str, ...] | None = None
    image_shape: tuple[int, int, int]
    train_size: int
    val_size: int = 0
    test_size: int
    settings: SmallImages | Photographs

    def steps_per_epoch(self, batch_size: int) -> int:
        """The number of training batches in an epoch; what does not fill a batch is left out."""
        if batch_size > self.train_size:
            raise InputError(
                f"batch_size={batch_size}: {self.name} has {self.train_size} training images "
                f"({self.val_size} are held out); a batch cannot be larger: pass --batch-size."
            )
        return self.train_size // batch_size

    @property
    @abstractmethod
    def train_labels(self) -> Tensor:
        """The classes of the training images."""

    @abstractmethod
    def with_validation(self) -> Self:
        """The same data with a part of its training images held out, always the same ones."""

    @abstractmethod
    def to(self, device: torch.device, *, workers: int = 0) -> Self:
        """The same data, whose batches come on the device, made by so many worker processes.

        Neither has an influence on what is in them. Without workers this process makes them.
        """

    def check(self, *, visible: bool) -> None:
        """Refuse now what would fail later; ``visible`` shows how far a long check has come."""

    @property
    def unreadable(self) -> dict[str, str]:
        """The files that had to be left out so far, each with the reason."""
        return {}

    def recall_unreadable(self, files: Mapping[str, str]) -> None:
        """Take over what was found unreadable before the run was interrupted."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of what is in the parts: a resumed run asks whether it is still the same."""

    @abstractmethod
    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Generator[Batch, None, None]:
        """The training batches of an epoch, shuffled and augmented, from position ``start`` on.

        ``batch_size`` is over all ranks together; each gets its own slice. Whoever does not go
        through to the end closes it, or processes may go on reading.
        """

    @abstractmethod
    def validation(self, *, batch_size: int) -> Iterator[Batch]:
        """All held-out training images once, in order, not augmented."""

    @abstractmethod
    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """All test images once, in order, not augmented."""

    def _places(
        self, epoch: int, *, batch_size: int, seed: int, start: int, shard: Shard
    ) -> Iterator[tuple[int, int, Tensor]]:
        """For each training batch of the epoch: its position, where this rank's slice begins in the
        epoch's order, and the numbers of its images."""
        order = torch.randperm(self.train_size, generator=generator(seed, ORDER, epoch))
        part = batch_size // shard.ranks
        for position in range(start, self.steps_per_epoch(batch_size)):
            begin = position * batch_size + shard.rank * part
            yield position, begin, order[begin : begin + part]


def generator(seed: int, *counters: int) -> torch.Generator:
    """Random numbers that depend on nothing but seed and counters."""
    return torch.Generator().manual_seed(fold(seed, *counters))
