"""Data sets of small images that are held in memory as bytes.

Augmentation and normalization are batched tensor operations on the device of the images.
"""

import hashlib
from collections.abc import Generator, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, final

import torch
from torch import Tensor, nn

from probmask.core.noise import RunStream
from probmask.data.settings import SmallImages
from probmask.data.source import WHOLE, Batch, DataSource, Normalization, Shard, generator
from probmask.data.splits import limited_count, select_unused_validation, select_validation
from probmask.errors import InputError

_STATISTICS_CHUNK = 1 << 20  # pixel values


@dataclass(frozen=True)
class Images:
    """Images as uint8, (count, channels, height, width), and their labels."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | slice) -> "Images":
        return Images(self.pixels[index], self.labels[index])

    def to(self, device: torch.device) -> "Images":
        """Return a copy on another device."""
        return Images(self.pixels.to(device), self.labels.to(device))


class Crops:
    """Random crops and flips of zero-padded images.

    The images are padded once, and all their windows are one strided view. The crops of a batch
    are then a single indexing operation that copies whole rows.
    """

    def __init__(self, pixels: Tensor, *, padding: int, flip: bool) -> None:
        self._positions = 2 * padding + 1
        self._flip = flip
        height, width = pixels.shape[-2:]
        padded = nn.functional.pad(pixels, (padding,) * 4) if padding else pixels
        self._windows = padded.unfold(2, height, 1).unfold(3, width, 1)

    def draw(
        self,
        indices: Tensor,
        generator: torch.Generator,
        *,
        batch_size: int | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Crop images at random.

        Args:
            indices: Indices of the images.
            generator: Source of random numbers, on the CPU, so that a seed gives the same crops
                on every device.
            batch_size: Number of images in the whole batch if `indices` is a slice of it. The
                ranks that share a batch then crop it as a single rank would.
            first: Position of the slice in the batch.

        Returns:
            The crops, and the index of the image in each. Mirrored images come first, which
            avoids gathering them twice; the order within a batch has no meaning.
        """
        count = len(indices) if batch_size is None else batch_size
        part, device = slice(first, first + len(indices)), self._windows.device
        corners = torch.randint(self._positions, (2, count), generator=generator)[:, part]
        mirrored = 0
        if self._flip:
            mirror = (torch.rand(count, generator=generator) < 0.5)[part]
            mirrored = int(mirror.sum())
            order = (~mirror).int().argsort(stable=True)
            indices, corners = indices[order], corners[:, order]
        indices, (top, left) = indices.to(device), corners.to(device)
        crops = self._windows[indices, :, top, left]
        crops[:mirrored] = crops[:mirrored].flip(3)
        return crops, indices


@final
class InMemory(DataSource):
    """A data set whose images fit in memory.

    Args:
        name: Name of the data set.
        train: Training images.
        test: Test images.
        settings: Augmentation, normalization, and numbers of images.
        classes: Number of classes.
        scale: Pixel value that is mapped to 1 before normalization.
    """

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
        _check_settings(name, settings, channels, height, width)
        count = limited_count(name, "train_images", settings.train_images, len(train))
        self._unused_validation = _unused_validation(name, train, count, settings)
        train = train[:count]
        test = test[: limited_count(name, "test_images", settings.test_images, len(test))]
        settings = _with_statistics(settings, train, scale)
        self.settings = settings
        assert settings.mean is not None
        assert settings.std is not None
        self._normalize = Normalization(settings.mean, settings.std, scale=scale)
        self.name, self.classes = name, classes
        self.image_shape = (channels, height, width)
        self._set_parts({"train": train, "val": train[:0], "test": test})

    def _set_parts(self, parts: dict[str, Images]) -> None:
        self._parts = parts
        self.train_size, self.val_size, self.test_size = map(len, parts.values())

    def _with_parts(self, parts: dict[str, Images]) -> Self:
        other = copy(self)
        other.__dict__.pop("_crops", None)  # cached for the previous images
        other._set_parts(parts)
        return other

    @property
    def train_labels(self) -> Tensor:
        """Labels of the training images."""
        return self._parts["train"].labels

    def with_validation(self) -> Self:
        """Return a copy that holds out validation images; always the same ones."""
        train = self._parts["train"]
        device = train.labels.device
        if self._unused_validation is not None:
            return self._with_parts({**self._parts, "val": self._unused_validation.to(device)})
        count = self.settings.validation_images
        held_out = select_validation(self.name, train.labels.cpu(), count).to(device)
        parts = {**self._parts, "train": train[~held_out], "val": train[held_out]}
        return self._with_parts(parts)

    def to(self, device: torch.device, *, workers: int = 0) -> Self:
        """Return a copy on the device; worker processes are not needed."""
        return self._with_parts({name: part.to(device) for name, part in self._parts.items()})

    def fingerprint(self) -> str:
        """Return a digest of all pixels and labels."""
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
        """Yield the training batches of an epoch, shuffled, cropped and mirrored at random."""
        labels = self._parts["train"].labels
        slices = self._slices(epoch, batch_size=batch_size, seed=seed, start=start, shard=shard)
        for position, begin, indices in slices:
            random = generator(seed, RunStream.AUGMENTATION, epoch, position)
            first = begin - position * batch_size
            pixels, drawn = self._crops.draw(indices, random, batch_size=batch_size, first=first)
            yield Batch(self._normalize(pixels), labels[drawn])

    def validation(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all validation images once, in order."""
        return self._in_order("val", batch_size)

    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all test images once, in order."""
        return self._in_order("test", batch_size)

    def _in_order(self, name: str, batch_size: int) -> Iterator[Batch]:
        part = self._parts[name]
        for begin in range(0, len(part), batch_size):
            images = part[begin : begin + batch_size]
            yield Batch(self._normalize(images.pixels), images.labels)


def _unused_validation(
    name: str, train: Images, count: int, settings: SmallImages
) -> Images | None:
    """Return validation images that are not among the first `count`, if the settings ask for it."""
    if settings.validation_images is None or settings.train_images is None:
        return None
    used = torch.arange(len(train)) < count
    selected = select_unused_validation(name, train.labels, used, settings.validation_images)
    return train[selected]


def _with_statistics(settings: SmallImages, train: Images, scale: float) -> SmallImages:
    if settings.mean is not None:
        return settings
    total = torch.zeros(2, train.pixels.shape[1], dtype=torch.float64)
    # In chunks, since fp64 takes eight times the memory.
    images = max(1, _STATISTICS_CHUNK // train.pixels[0].numel())
    for begin in range(0, len(train), images):
        values = train.pixels[begin : begin + images].double() / scale
        total += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = total / (train.pixels.numel() / train.pixels.shape[1])
    std = (square - mean.square()).clamp(min=0).sqrt()
    std[std < 1e-6] = 1.0  # a constant channel
    return replace(settings, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def _check_settings(
    name: str, settings: SmallImages, channels: int, height: int, width: int
) -> None:
    if settings.padding >= min(height, width):
        raise InputError(
            f"data_args.padding={settings.padding}: the images of {name} are {height}×{width}, so "
            "a crop could contain padding only; choose less than the shorter side."
        )
    if settings.mean is not None and len(settings.mean) != channels:
        raise InputError(
            f"data_args.mean={list(settings.mean)}: the images of {name} have {channels} channel"
            f"{'s' if channels > 1 else ''}; give one number per channel."
        )
