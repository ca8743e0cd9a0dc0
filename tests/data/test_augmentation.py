"""Crops, flips and normalisation against obvious twins: image by image, and in fp64."""

import numpy as np
import pytest
import torch

from probmask.data.augmentation import Crops, Normalisation


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def window(image, padding, top, left, *, mirrored):
    """Pad one image, cut a window of its size out at (top, left), mirror it if so wanted."""
    channels, height, width = image.shape
    canvas = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    canvas[:, padding : padding + height, padding : padding + width] = image
    cut = canvas[:, top : top + height, left : left + width]
    return torch.stack([cut[:, :, -1 - x] for x in range(width)], 2) if mirrored else cut


def draw_twin(images, chosen, generator, *, padding, flip):
    """What `Crops.draw` returns, one image after the other."""
    tops, lefts = torch.randint(2 * padding + 1, (2, len(chosen)), generator=generator).tolist()
    coins = torch.rand(len(chosen), generator=generator).tolist() if flip else [1.0] * len(chosen)
    drawn = list(zip(chosen.tolist(), tops, lefts, coins, strict=True))
    heads = [one for one in drawn if one[3] < 0.5]
    tails = [one for one in drawn if one[3] >= 0.5]
    cropped = [
        window(images[number], padding, top, left, mirrored=coin < 0.5)
        for number, top, left, coin in heads + tails
    ]
    return torch.stack(cropped), torch.tensor([number for number, *_ in heads + tails])


@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 5), (1, 5, 8), (2, 6, 6), (1, 1, 1)])
def test_crops_agree_with_their_twin(padding, flip, shape):
    images = torch.randint(1, 256, (50, *shape), dtype=torch.uint8, generator=random())
    before = images.clone()
    crops = Crops(images, padding=padding, flip=flip)
    for seed in range(3):
        chosen = torch.randint(50, (30,), generator=random(seed + 10))
        ours, numbers = crops.draw(chosen, random(seed))
        twins, theirs = draw_twin(images, chosen, random(seed), padding=padding, flip=flip)
        assert ours.dtype == torch.uint8
        assert torch.equal(ours, twins)
        assert torch.equal(numbers, theirs)
        assert sorted(numbers.tolist()) == sorted(chosen.tolist())
    assert torch.equal(images, before)


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_that_share_a_batch_crop_it_as_one_alone_would(ranks):
    images = torch.randint(256, (30, 1, 6, 6), dtype=torch.uint8, generator=random())
    crops = Crops(images, padding=2, flip=True)
    chosen = torch.randperm(30, generator=random())
    whole = dict(
        zip(*(part.tolist() for part in reversed(crops.draw(chosen, random()))), strict=True)
    )
    shared = {}
    for first in range(0, 30, 30 // ranks):
        part = chosen[first : first + 30 // ranks]
        ours, numbers = crops.draw(part, random(), of=30, first=first)
        assert sorted(numbers.tolist()) == sorted(part.tolist())
        shared |= dict(zip(numbers.tolist(), ours.tolist(), strict=True))
    assert shared == whole


def test_without_padding_and_flip_images_pass_unchanged_and_in_order():
    images = torch.randint(256, (9, 2, 4, 3), dtype=torch.uint8, generator=random())
    chosen = torch.tensor([4, 0, 8, 4])
    ours, numbers = Crops(images, padding=0, flip=False).draw(chosen, random())
    assert torch.equal(numbers, chosen)
    assert torch.equal(ours, images[chosen])
    ours.zero_()  # a copy
    assert images.sum() > 0


def test_with_flip_alone_an_image_is_itself_or_its_mirror_image():
    images = torch.arange(12, dtype=torch.uint8).view(1, 1, 3, 4)
    crops = Crops(images, padding=0, flip=True)
    ours, _ = crops.draw(torch.zeros(1000, dtype=torch.long), random())
    same, mirrored = ((ours == kind).flatten(1).all(1) for kind in (images, images.flip(3)))
    assert (same | mirrored).all()
    assert abs(int(mirrored.sum()) - 500) < 80  # five standard deviations
    first = int(mirrored.sum())
    assert mirrored[:first].all()


@pytest.mark.parametrize("flip", [False, True])
def test_every_shift_occurs_equally_often_in_both_orientations(flip):
    # Two pixels side by side tell the shift and the orientation.
    image = torch.zeros(1, 1, 7, 7, dtype=torch.uint8)
    image[..., 3, 3], image[..., 3, 4] = 1, 2
    kinds = {}
    for top in range(3):
        for left in range(3):
            for mirrored in (False, True) if flip else (False,):
                seen = window(image[0], 1, top, left, mirrored=mirrored)
                kinds[seen.numpy().tobytes()] = 0
    assert len(kinds) == (18 if flip else 9)
    crops = Crops(image, padding=1, flip=flip)
    drawn, _ = crops.draw(torch.zeros(18_000, dtype=torch.long), random())
    for crop in drawn:
        kinds[crop.numpy().tobytes()] += 1
    expected = 18_000 / len(kinds)
    assert max(abs(count - expected) for count in kinds.values()) < 5 * expected**0.5


def test_the_drawn_numbers_name_the_crops():
    images = torch.arange(1, 41, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 2, 5, 5)
    crops = Crops(images, padding=2, flip=True)
    ours, numbers = crops.draw(torch.randperm(40, generator=random()), random())
    assert torch.equal(ours.flatten(1).amax(1).long() - 1, numbers)


def test_another_seed_crops_otherwise():
    images = torch.randint(256, (20, 1, 6, 6), dtype=torch.uint8, generator=random())
    crops = Crops(images, padding=2, flip=False)
    first, again, other = (crops.draw(torch.arange(20), random(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("mean", "std", "scale"),
    [
        ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262), 255.0),
        ((0.3051,), (0.3762,), 16.0),
        ((0.0, 1.0), (1.0, 0.01), 255.0),
    ],
)
def test_normalisation_agrees_with_fp64(mean, std, scale):
    pixels = torch.arange(256, dtype=torch.uint8).view(8, 1, 8, 4).repeat(1, len(mean), 1, 1)
    ours = Normalisation(mean, std, scale=scale)(pixels)
    assert ours.dtype == torch.float32
    values = pixels.numpy().transpose(0, 2, 3, 1).astype(np.float64)
    exact = ((values / scale - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
    largest = np.abs(exact).max((0, 2, 3)) + np.array(mean) / np.array(std)
    error = np.abs(ours.numpy() - exact).max((0, 2, 3))
    assert (error <= 2 * np.finfo(np.float32).eps * largest).all()


def test_normalisation_leaves_the_bytes_alone():
    pixels = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    before = pixels.clone()
    Normalisation((0.5,) * 3, (0.5,) * 3, scale=255.0)(pixels)
    assert torch.equal(pixels, before)
