"""Small images held in memory as bytes; augmentation and normalisation are batched tensor work."""

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from probmask.data.augmentation import Crops, Normalisation
from probmask.data.settings import SmallImages
from probmask.data.source import AUGMENTATION, WHOLE, Batch, DataSource, Shard, generator
from probmask.data.splits import beside_training, for_validation, limited
from probmask.errors import InputError


@dataclass(frozen=True)
class Images:
    """Images as bytes, (count, channels, height, width), and their labels."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor | slice) -> "Images":
        return Images(self.pixels[chosen], self.labels[chosen])

    def to(self, device: torch.device) -> "Images":
        """The same on another device."""
        return Images(self.pixels.to(device), self.labels.to(device))


class InMemory(DataSource):
    """A data set whose images fit in memory; they lie on the device that trains."""

    settings: SmallImages

    def __init__(
        self,
        name: str,
        train: Images,
        test: Images,
        settings: SmallImages,
        *,
        classes: int,
        scale: float = 255.0,
    ) -> None:
        channels, height, width = train.pixels.shape[1:]
        _check_fits(name, settings, channels, height, width)
        count = limited(name, "train_images", settings.train_images, len(train))
        self._beside = _beside(name, train, count, settings)
        train = train[:count]
        test = test[: limited(name, "test_images", settings.test_images, len(test))]
        settings = _with_statistics(settings, train, scale)
        self._parts = {"train": train, "val": train[:0], "test": test}
        self.settings = settings
        assert settings.mean is not None
        assert settings.std is not None
        self._normalised = Normalisation(settings.mean, settings.std, scale=scale)
        self.name, self.classes = name, classes
        self.image_shape = (channels, height, width)
        self._count()

    def _count(self) -> None:
        self.train_size, self.val_size, self.test_size = map(len, self._parts.values())

    def _replaced(self, parts: dict[str, Images]) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update({**self.__dict__, "_parts": parts})
        other.__dict__.pop("_crops", None)  # those of the old images
        other._count()
        return other

    @property
    def train_labels(self) -> Tensor:
        """The classes of the training images."""
        return self._parts["train"].labels

    def with_validation(self) -> Self:
        """The same data with training images held out, always the same: a tenth, or as set."""
        train = self._parts["train"]
        device = train.labels.device
        if self._beside is not None:
            return self._replaced({**self._parts, "val": self._beside.to(device)})
        asked = self.settings.validation_images
        held = for_validation(self.name, train.labels.cpu(), asked).to(device)
        return self._replaced({**self._parts, "train": train[~held], "val": train[held]})

    def to(self, device: torch.device, *, workers: int = 0) -> Self:
        """The same data, lying on the device; there is nothing for workers to do."""
        return self._replaced({name: part.to(device) for name, part in self._parts.items()})

    def fingerprint(self) -> str:
        """A digest of all pixels and labels."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts.values():
            for tensor in (part.pixels, part.labels):
                digest.update(f"{tuple(tensor.shape)}".encode())
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()

    @cached_property
    def _crops(self) -> Crops:
        settings = self.settings
        return Crops(self._parts["train"].pixels, padding=settings.padding, flip=settings.flip)

    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Generator[Batch, None, None]:
        """The training batches of an epoch, shuffled, cropped and mirrored at random."""
        labels = self._parts["train"].labels
        places = self._places(epoch, batch_size=batch_size, seed=seed, start=start, shard=shard)
        for position, begin, chosen in places:
            random = generator(seed, AUGMENTATION, epoch, position)
            first = begin - position * batch_size
            pixels, shown = self._crops.draw(chosen, random, of=batch_size, first=first)
            yield Batch(self._normalised(pixels), labels[shown])

    def validation(self, *, batch_size: int) -> Iterator[Batch]:
        """All held-out training images once, in order."""
        return self._in_order("val", batch_size)

    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """All test images once, in order."""
        return self._in_order("test", batch_size)

    def _in_order(self, name: str, batch_size: int) -> Iterator[Batch]:
        part = self._parts[name]
        for begin in range(0, len(part), batch_size):
            images = part[begin : begin + batch_size]
            yield Batch(self._normalised(images.pixels), images.labels)


def _beside(name: str, train: Images, count: int, settings: SmallImages) -> Images | None:
    """The validation images that are taken from those which are not trained on, if any are."""
    asked = settings.validation_images
    if asked is None or settings.train_images is None:
        return None
    trained = torch.arange(len(train)) < count
    return train[beside_training(name, train.labels, trained, asked)]


def _with_statistics(settings: SmallImages, train: Images, scale: float) -> SmallImages:
    if settings.mean is not None:
        return settings
    total = torch.zeros(2, train.pixels.shape[1], dtype=torch.float64)
    for begin in range(0, len(train), 4096):  # in parts: in fp64 all of it would be large
        values = train.pixels[begin : begin + 4096].double() / scale
        total += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = total / (train.pixels.numel() / train.pixels.shape[1])
    std = (square - mean.square()).clamp(min=0).sqrt()
    std[std < 1e-6] = 1.0  # a channel that is everywhere the same
    return replace(settings, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def _check_fits(name: str, settings: SmallImages, channels: int, height: int, width: int) -> None:
    if settings.padding >= min(height, width):
        raise InputError(
            f"data_args.padding={settings.padding}: {name} has images of {height}×{width} pixels, "
            "of which crops would show nothing; choose fewer than the shorter side."
        )
    if settings.mean is not None and len(settings.mean) != channels:
        raise InputError(
            f"data_args.mean={list(settings.mean)}: {name} has {channels} channel"
            f"{'s' if channels > 1 else ''}; give one number for each."
        )
