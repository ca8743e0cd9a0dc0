"""Data sets in memory: crops, normalization, deterministic batches, and disjoint parts."""

import numpy as np
import pytest
import torch

from probmask.data import Shard, SmallImages
from probmask.data.in_memory import Crops, Images, InMemory
from probmask.data.source import Normalization
from probmask.errors import InputError

PLAIN = SmallImages(padding=0, flip=False, mean=(0.0,), std=(1.0,))
AUGMENTED = SmallImages(padding=1, flip=True, mean=(0.0,), std=(1.0,))
# Number of the first test image.
FIRST_TEST = 200
CPU = torch.device("cpu")


def images(first, count, classes):
    """Images of 3×4 pixels whose value is the number of the image, with unordered labels."""
    numbers = torch.arange(first, first + count)
    pixels = numbers.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 3, 4).contiguous()
    return Images(pixels, (numbers * 7 + numbers // 3) % classes)


def source(settings=PLAIN, *, train=100, test=30, classes=4):
    return InMemory(
        "tiny",
        images(0, train, classes),
        images(FIRST_TEST, test, classes),
        settings,
        classes=classes,
    )


def numbers(batches):
    """The numbers of the images in the batches, in order."""
    # A crop may contain padding, but never only padding.
    return [
        round(value * 255)
        for batch in batches
        for value in batch.inputs.flatten(1).amax(1).tolist()
    ]


def assert_same(ours, theirs):
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.labels, other.labels)


def epoch(data, number=0, *, seed=0, **arguments):
    return list(data.training(number, batch_size=12, seed=seed, **arguments))


def test_sizes_and_shape():
    data = source()
    assert (data.train_size, data.val_size, data.test_size) == (100, 0, 30)
    assert (data.name, data.classes, data.image_shape) == ("tiny", 4, (1, 3, 4))
    assert data.steps_per_epoch(12) == 8
    assert data.unreadable == {}
    data.check(progress=True)


@pytest.mark.parametrize("settings", [PLAIN, AUGMENTED])
def test_an_epoch_contains_every_image_at_most_once_in_full_batches(settings):
    batches = epoch(source(settings))
    assert [len(batch.labels) for batch in batches] == [12] * 8
    shown = numbers(batches)
    assert len(set(shown)) == 96
    assert set(shown) <= set(range(100))
    assert shown != sorted(shown)


@pytest.mark.parametrize("settings", [PLAIN, AUGMENTED])
def test_images_keep_their_labels(settings):
    data = source(settings).with_validation()
    everything = dict(enumerate(images(0, 100, 4).labels.tolist()))
    everything |= dict(enumerate(images(FIRST_TEST, 30, 4).labels.tolist(), FIRST_TEST))
    for batches in (epoch(data), data.validation(batch_size=7), data.testing(batch_size=7)):
        batches = list(batches)
        labels = [label for batch in batches for label in batch.labels.tolist()]
        assert labels == [everything[number] for number in numbers(batches)]


def test_batches_depend_on_seed_epoch_and_position_only():
    first = epoch(source(AUGMENTED), 3, seed=5)
    torch.manual_seed(99)
    torch.rand(10)
    assert_same(first, epoch(source(AUGMENTED), 3, seed=5))


def test_batches_do_not_use_the_global_generator():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    epoch(source(AUGMENTED))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("other", [{"number": 1, "seed": 0}, {"number": 0, "seed": 1}])
def test_another_epoch_or_seed_gives_another_order_and_other_crops(other):
    data = source(SmallImages(padding=1, flip=False, mean=(0.0,), std=(1.0,)), train=96)
    ours, theirs = epoch(data), epoch(data, **other)
    assert numbers(ours) != numbers(theirs)
    assert sorted(numbers(ours)) == sorted(numbers(theirs))
    crops = [
        dict(zip(numbers(batches), torch.cat([b.inputs for b in batches]), strict=True))
        for batches in (ours, theirs)
    ]
    same = sum(torch.equal(crops[0][number], crops[1][number]) for number in range(1, 96))
    assert same < 30  # one in nine is equal by chance


@pytest.mark.parametrize("settings", [PLAIN, AUGMENTED])
@pytest.mark.parametrize("start", [1, 4, 7, 8])
def test_an_epoch_can_start_in_the_middle(settings, start):
    whole = epoch(source(settings), 2)
    rest = epoch(source(settings), 2, start=start)
    assert len(rest) == 8 - start
    if rest:
        assert_same(rest, whole[start:])


@pytest.mark.parametrize("settings", [PLAIN, AUGMENTED])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_divide_every_batch(settings, ranks):
    data = source(settings)
    whole = epoch(data, 2)
    parts = [epoch(data, 2, shard=Shard(rank, ranks)) for rank in range(ranks)]
    for position, batch in enumerate(whole):
        assert [len(part[position].labels) for part in parts] == [12 // ranks] * ranks
        shown = numbers(part[position] for part in parts)
        assert sorted(shown) == sorted(numbers([batch]))
        if settings is PLAIN:  # otherwise mirrored images come first
            assert shown == numbers([batch])


def test_every_seed_epoch_position_and_rank_has_its_own_crops():
    # All images are equal, so batches differ only in their crops.
    pixels = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).expand(64, 1, 5, 5)
    same = Images(pixels.contiguous(), torch.zeros(64, dtype=torch.long))
    data = InMemory("same", same, same, AUGMENTED, classes=1)
    batches = [
        batch.inputs.numpy().tobytes()
        for seed in (0, 1)
        for number in (0, 1)
        for rank in (0, 1)
        for batch in data.training(number, batch_size=32, seed=seed, shard=Shard(rank, 2))
    ]
    assert len(set(batches)) == len(batches) == 16


@pytest.mark.parametrize("batch_size", [1, 7, 30, 64])
def test_test_images_come_once_and_in_order_for_any_batch_size(batch_size):
    data = source(AUGMENTED).with_validation()
    assert numbers(data.testing(batch_size=batch_size)) == list(range(FIRST_TEST, FIRST_TEST + 30))
    held = numbers(data.validation(batch_size=batch_size))
    assert held == sorted(held)
    assert len(held) == data.val_size == 10


def test_nothing_is_held_out_by_default():
    assert list(source().validation(batch_size=4)) == []


def test_validation_images_are_always_the_same_and_disjoint_from_the_others():
    data, again = source().with_validation(), source(AUGMENTED).with_validation()
    held = numbers(data.validation(batch_size=64))
    assert numbers(again.validation(batch_size=64)) == held
    assert (data.train_size, data.val_size, data.test_size) == (90, 10, 30)
    (batch,) = data.training(0, batch_size=90, seed=0)
    shown = numbers([batch])
    assert not set(shown) & set(held)
    assert sorted(shown + held) == list(range(100))
    assert not set(shown + held) & set(numbers(data.testing(batch_size=64)))


@pytest.mark.parametrize("classes", [1, 2, 7, 30])
def test_validation_images_are_stratified(classes):
    data = source(classes=classes, train=97).with_validation()
    labels = torch.cat([batch.labels for batch in data.validation(batch_size=64)])
    held = labels.bincount(minlength=classes)
    sizes = images(0, 97, classes).labels.bincount(minlength=classes)
    assert held.sum() == 10
    assert (held - sizes * 10 / 97).abs().max() < 1


def test_with_validation_does_not_change_the_original():
    data = source(AUGMENTED)
    before = epoch(data)
    part = data.with_validation()
    assert_same(epoch(data), before)
    assert (data.train_size, data.val_size) == (100, 0)
    held = set(numbers(part.validation(batch_size=64)))
    assert not held & set(numbers(epoch(part)))  # the cached crops are not reused


def test_limits_take_the_first_images():
    limited = SmallImages(
        padding=0, flip=False, mean=(0.0,), std=(1.0,), train_images=20, test_images=3
    )
    data = source(limited)
    assert (data.train_size, data.test_size) == (20, 3)
    (batch,) = data.training(0, batch_size=20, seed=0)
    assert sorted(numbers([batch])) == list(range(20))
    assert numbers(data.testing(batch_size=64)) == [FIRST_TEST, FIRST_TEST + 1, FIRST_TEST + 2]
    part = data.with_validation()
    assert (part.train_size, part.val_size, part.test_size) == (18, 2, 3)
    (batch,) = part.training(0, batch_size=18, seed=0)
    together = numbers([batch]) + numbers(part.validation(batch_size=64))
    assert sorted(together) == list(range(20))
    assert data.classes == 4


def with_images(**counts):
    return source(SmallImages(padding=1, flip=True, mean=(0.0,), std=(1.0,), **counts))


def test_validation_images_come_from_unused_training_images():
    whole = with_images(train_images=20, validation_images=15)
    data = whole.with_validation()
    assert (data.train_size, data.val_size, data.test_size) == (20, 15, 30)
    held = numbers(data.validation(batch_size=64))
    assert len(set(held)) == 15
    assert set(held) <= set(range(20, 100))
    assert held == sorted(held)
    # Training batches are identical to those without validation.
    alone = with_images(train_images=20)
    assert_same(epoch(data), epoch(alone))
    assert (whole.train_size, whole.val_size) == (20, 0)
    assert numbers(whole.to(CPU).with_validation().validation(batch_size=64)) == held
    assert data.fingerprint() != alone.fingerprint()


def test_validation_images_are_held_out_of_all_training_images():
    data = with_images(validation_images=25).with_validation()
    assert (data.train_size, data.val_size) == (75, 25)
    held = set(numbers(data.validation(batch_size=64)))
    (batch,) = data.training(0, batch_size=75, seed=0)
    assert sorted([*held, *numbers([batch])]) == list(range(100))


def test_too_many_validation_images():
    assert refused(train_images=90, validation_images=11) == (
        "data_args.validation_images=11: tiny has 100 training images, and "
        "data_args.train_images=90 leaves 10; decrease either."
    )


@pytest.mark.parametrize("moved_first", [False, True])
def test_on_a_device_the_content_is_the_same(moved_first):
    device = torch.device("cpu")
    data = source(AUGMENTED)
    epoch(data)
    moved = (
        data.to(device).with_validation()
        if moved_first
        else data.with_validation().to(device, workers=3)
    )
    here = data.with_validation()
    assert (moved.train_size, moved.val_size, moved.test_size) == (90, 10, 30)
    assert_same(epoch(moved), epoch(here))
    assert_same(moved.validation(batch_size=4), here.validation(batch_size=4))
    assert_same(moved.testing(batch_size=4), here.testing(batch_size=4))


def test_pixels_are_scaled_and_normalized_per_channel():
    pixels = torch.arange(60).remainder(17).to(torch.uint8).view(5, 2, 3, 2)
    part = Images(pixels, torch.arange(5))
    settings = SmallImages(padding=0, flip=False, mean=(0.25, 0.5), std=(0.5, 2.0))
    data = InMemory("two", part, part, settings, classes=5, scale=16.0)
    (batch,) = data.testing(batch_size=5)
    assert batch.inputs.dtype == torch.float32
    for channel, (mean, std) in enumerate(((0.25, 0.5), (0.5, 2.0))):
        exact = (pixels[:, channel].double() / 16 - mean) / std
        assert torch.allclose(batch.inputs[:, channel].double(), exact, atol=1e-6)


def test_statistics_are_computed_from_the_training_images_in_use():
    train, test = images(0, 100, 4), images(FIRST_TEST, 30, 4)
    settings = SmallImages(padding=0, flip=False, train_images=50)
    data = InMemory("tiny", train, test, settings, classes=4, scale=64.0)
    (batch,) = data.training(0, batch_size=50, seed=0)
    assert abs(batch.inputs.double().mean()) < 1e-6
    assert abs(batch.inputs.double().std(correction=0) - 1) < 1e-6


def refused(**settings):
    arguments = {"padding": 0, "flip": False, "mean": (0.0,), "std": (1.0,)} | settings
    with pytest.raises(InputError) as caught:
        source(SmallImages(**arguments))
    return str(caught.value)


def test_limits_above_the_number_of_images():
    assert refused(train_images=101) == (
        "data_args.train_images=101: tiny has only 100 images; choose a smaller number, or "
        "omit it to use all."
    )
    assert refused(test_images=31) == (
        "data_args.test_images=31: tiny has only 30 images; choose a smaller number, or "
        "omit it to use all."
    )


def test_statistics_for_the_wrong_number_of_channels():
    assert refused(mean=(0.5, 0.5), std=(1.0, 1.0)) == (
        "data_args.mean=[0.5, 0.5]: the images of tiny have 1 channel; give one number per channel."
    )
    assert refused(mean=(), std=()) == (
        "data_args.mean=[]: the images of tiny have 1 channel; give one number per channel."
    )


@pytest.mark.parametrize("padding", [3, 10**9])
def test_too_much_padding(padding):
    assert refused(padding=padding) == (
        f"data_args.padding={padding}: the images of tiny are 3×4, so a crop could contain padding "
        "only; choose less than the shorter side."
    )
    assert source(SmallImages(padding=2, flip=False)).train_size == 100


def test_a_batch_larger_than_the_training_set():
    with pytest.raises(InputError, match=r"train\(batch_size=101\): tiny has 100 training images"):
        next(source().training(0, batch_size=101, seed=0))
    with pytest.raises(InputError, match=r"train\(batch_size=91\): tiny has 90 training images"):
        source().with_validation().steps_per_epoch(91)


def test_too_few_images_to_hold_some_out():
    with pytest.raises(InputError) as caught:
        source(train=5).with_validation()
    assert str(caught.value) == (
        "--data tiny: 5 images are too few to hold out a validation part; pass --select-on none."
    )


# --- crops and normalization


def random(seed=0):
    return torch.Generator().manual_seed(seed)


def window(image, padding, top, left, *, mirrored):
    """Pad one image, cut out a window of its size at (top, left), and mirror it if requested."""
    channels, height, width = image.shape
    canvas = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    canvas[:, padding : padding + height, padding : padding + width] = image
    cut = canvas[:, top : top + height, left : left + width]
    return torch.stack([cut[:, :, -1 - x] for x in range(width)], 2) if mirrored else cut


def draw_reference(images, chosen, generator, *, padding, flip):
    """Compute what `Crops.draw` returns, one image at a time."""
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
def test_crops_agree_with_the_reference(padding, flip, shape):
    images = torch.randint(1, 256, (50, *shape), dtype=torch.uint8, generator=random())
    before = images.clone()
    crops = Crops(images, padding=padding, flip=flip)
    for seed in range(3):
        chosen = torch.randint(50, (30,), generator=random(seed + 10))
        ours, numbers = crops.draw(chosen, random(seed))
        expected, theirs = draw_reference(images, chosen, random(seed), padding=padding, flip=flip)
        assert ours.dtype == torch.uint8
        assert torch.equal(ours, expected)
        assert torch.equal(numbers, theirs)
        assert sorted(numbers.tolist()) == sorted(chosen.tolist())
    assert torch.equal(images, before)


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_that_share_a_batch_crop_it_as_a_single_rank_would(ranks):
    images = torch.randint(256, (30, 1, 6, 6), dtype=torch.uint8, generator=random())
    crops = Crops(images, padding=2, flip=True)
    chosen = torch.randperm(30, generator=random())
    whole = dict(
        zip(*(part.tolist() for part in reversed(crops.draw(chosen, random()))), strict=True)
    )
    shared = {}
    for first in range(0, 30, 30 // ranks):
        part = chosen[first : first + 30 // ranks]
        ours, numbers = crops.draw(part, random(), batch_size=30, first=first)
        assert sorted(numbers.tolist()) == sorted(part.tolist())
        shared |= dict(zip(numbers.tolist(), ours.tolist(), strict=True))
    assert shared == whole


def test_without_padding_and_flip_images_are_unchanged_and_in_order():
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
    # Two adjacent pixels determine the shift and the orientation.
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


def test_the_returned_indices_belong_to_the_crops():
    images = torch.arange(1, 41, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 2, 5, 5)
    crops = Crops(images, padding=2, flip=True)
    ours, numbers = crops.draw(torch.randperm(40, generator=random()), random())
    assert torch.equal(ours.flatten(1).amax(1).long() - 1, numbers)


def test_another_seed_gives_other_crops():
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
def test_normalization_agrees_with_fp64(mean, std, scale):
    pixels = torch.arange(256, dtype=torch.uint8).view(8, 1, 8, 4).repeat(1, len(mean), 1, 1)
    ours = Normalization(mean, std, scale=scale)(pixels)
    assert ours.dtype == torch.float32
    values = pixels.numpy().transpose(0, 2, 3, 1).astype(np.float64)
    exact = ((values / scale - np.array(mean)) / np.array(std)).transpose(0, 3, 1, 2)
    largest = np.abs(exact).max((0, 2, 3)) + np.array(mean) / np.array(std)
    error = np.abs(ours.numpy() - exact).max((0, 2, 3))
    assert (error <= 2 * np.finfo(np.float32).eps * largest).all()


def test_normalization_does_not_change_the_pixels():
    pixels = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    before = pixels.clone()
    Normalization((0.5,) * 3, (0.5,) * 3, scale=255.0)(pixels)
    assert torch.equal(pixels, before)
