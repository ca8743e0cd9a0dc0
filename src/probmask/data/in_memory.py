"""Small images held in memory as bytes; augmentation and normalisation are batched tensor work."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from probmask.core.noise import fold
from probmask.data.source import WHOLE, Batch, DataSource, Shard

# Counters that keep the streams of random numbers apart.
_ORDER, _CROP = 0, 1


@dataclass(frozen=True)
class Images:
    """Images as bytes, (count, channels, height, width), and their labels."""

    pixels: Tensor
    labels: Tensor


class InMemory(DataSource):
    """A data set whose images fit in memory.

    ``padding`` pixels of zeros are put around every training image before a crop of the original
    size is taken at random; ``mean`` and ``std`` are per channel, on pixels scaled to [0, 1].
    """

    def __init__(
        self,
        name: str,
        train: Images,
        test: Images,
        *,
        classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        padding: int,
        scale: float = 255.0,
    ) -> None:
        self.name = name
        self.classes = classes
        channels, height, width = train.pixels.shape[1:]
        self.image_shape = (channels, height, width)
        self.train_size = len(train.labels)
        self.test_size = len(test.labels)
        self._train, self._test = train, test
        self._padding = padding
        self._mean = torch.tensor(mean).view(1, -1, 1, 1)
        self._std = torch.tensor(std).view(1, -1, 1, 1)
        self._scale = scale

    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Iterator[Batch]:
        """The training batches of an epoch, shuffled and cropped at random."""
        steps = self.steps_per_epoch(batch_size)
        order = torch.randperm(self.train_size, generator=_generator(seed, _ORDER, epoch))
        part = batch_size // shard.ranks
        for position in range(start, steps):
            begin = position * batch_size + shard.rank * part
            chosen = order[begin : begin + part]
            generator = _generator(seed, _CROP, epoch, position, shard.rank)
            pixels = random_crop(self._train.pixels[chosen], self._padding, generator)
            yield Batch(self._normalised(pixels), self._train.labels[chosen])

    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """All test images once, in order."""
        for begin in range(0, self.test_size, batch_size):
            pixels = self._test.pixels[begin : begin + batch_size]
            yield Batch(self._normalised(pixels), self._test.labels[begin : begin + batch_size])

    def _normalised(self, pixels: Tensor) -> Tensor:
        return (pixels.float() / self._scale - self._mean) / self._std


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shift each image by up to ``padding`` pixels either way, filling up with zeros."""
    if padding == 0:
        return images
    count, channels, height, width = images.shape
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    rows = (top + torch.arange(height)).view(count, 1, height, 1)
    columns = (left + torch.arange(width)).view(count, 1, 1, width)
    image = torch.arange(count).view(count, 1, 1, 1)
    channel = torch.arange(channels).view(1, channels, 1, 1)
    return padded[image, channel, rows, columns]


def _generator(seed: int, *counters: int) -> torch.Generator:
    return torch.Generator().manual_seed(fold(seed, *counters))
