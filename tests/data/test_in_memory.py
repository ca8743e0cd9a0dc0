"""Batches as a function of seed, epoch and position; crops against an obvious twin."""

import pytest
import torch

from probmask.data import Shard
from probmask.data.in_memory import Images, InMemory, random_crop
from probmask.errors import InputError


def source(count=20, channels=2, *, padding=1):
    pixels = torch.arange(count * channels * 3 * 4).remainder(251).to(torch.uint8)
    images = Images(pixels.view(count, channels, 3, 4), torch.arange(count))
    mean, std = (0.25,) * channels, (0.5,) * channels
    return InMemory("tiny", images, images, classes=count, mean=mean, std=std, padding=padding)


def crop_twin(images, padding, generator):
    """Image by image: pad, then cut out a window at (top, left)."""
    count, channels, height, width = images.shape
    tops, lefts = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    cropped = []
    for image, top, left in zip(images, tops.flatten(), lefts.flatten(), strict=True):
        canvas = torch.zeros(
            channels, height + 2 * padding, width + 2 * padding, dtype=images.dtype
        )
        canvas[:, padding : padding + height, padding : padding + width] = image
        cropped.append(canvas[:, top : top + height, left : left + width])
    return torch.stack(cropped)


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_random_crop_agrees_with_its_twin(padding, dtype):
    images = torch.randint(1, 256, (50, 3, 7, 5)).to(dtype)
    ours = random_crop(images, padding, torch.Generator().manual_seed(3))
    twin = crop_twin(images, padding, torch.Generator().manual_seed(3))
    assert ours.dtype == dtype
    assert torch.equal(ours, twin)


def test_every_shift_occurs_about_equally_often():
    images = torch.zeros(9000, 1, 5, 5, dtype=torch.uint8)
    images[:, :, 2, 2] = 1
    cropped = random_crop(images, 1, torch.Generator().manual_seed(0))
    counts = cropped.sum(dim=(0, 1))[1:4, 1:4]
    assert counts.sum() == 9000
    assert (counts - 1000).abs().max() < 150  # five standard deviations


def test_an_epoch_shows_every_image_once_as_far_as_batches_fill():
    labels = torch.cat([b.labels for b in source().training(0, batch_size=6, seed=1)])
    assert len(labels) == 18
    assert len(set(labels.tolist())) == 18


def test_pixels_are_scaled_and_normalised():
    data = source(padding=0)
    (batch,) = data.testing(batch_size=20)
    pixels = data._test.pixels.double()
    assert torch.allclose(batch.images.double(), (pixels / 255 - 0.25) / 0.5, atol=1e-6)
    assert batch.images.dtype == torch.float32


def test_shards_of_other_batches_do_not_overlap():
    whole = [set(b.labels.tolist()) for b in source().training(2, batch_size=6, seed=0)]
    parts = [
        [b.labels.tolist() for b in source().training(2, batch_size=6, seed=0, shard=Shard(r, 3))]
        for r in range(3)
    ]
    for position, labels in enumerate(whole):
        mine = [part[position] for part in parts]
        assert [len(part) for part in mine] == [2, 2, 2]
        assert {label for part in mine for label in part} == labels


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(InputError, match=r"batch_size=21: tiny has 20 training images"):
        next(source().training(0, batch_size=21, seed=0))
