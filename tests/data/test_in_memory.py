"""Batches as a function of seed, epoch and position; parts that have no image in common."""

import pytest
import torch

from probmask.data import Shard, SmallImages
from probmask.data.in_memory import Images, InMemory
from probmask.errors import InputError

PLAIN = SmallImages(padding=0, flip=False, mean=(0.0,), std=(1.0,))
AUGMENTED = SmallImages(padding=1, flip=True, mean=(0.0,), std=(1.0,))
# Test images have the numbers from here on.
FIRST_TEST = 200
CPU = torch.device("cpu")


def images(first, count, classes):
    """Images that are their own number all over, 3×4 pixels, with labels in no order."""
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
    """The numbers of the images that are shown, in order."""
    # Zeros may be left of a crop, but never all of it is zeros.
    return [
        round(value * 255)
        for batch in batches
        for value in batch.images.flatten(1).amax(1).tolist()
    ]


def assert_same(ours, theirs):
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def epoch(data, number=0, *, seed=0, **arguments):
    return list(data.training(number, batch_size=12, seed=seed, **arguments))


def test_sizes_and_shape():
    data = source()
    assert (data.train_size, data.val_size, data.test_size) == (100, 0, 30)
    assert (data.name, data.classes, data.image_shape) == ("tiny", 4, (1, 3, 4))
    assert data.steps_per_epoch(12) == 8
    assert data.unreadable == {}
    data.check(visible=True)


@pytest.mark.parametrize("settings", [PLAIN, AUGMENTED])
def test_an_epoch_shows_every_image_once_as_far_as_batches_fill(settings):
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


def test_making_batches_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    epoch(source(AUGMENTED))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("other", [{"number": 1, "seed": 0}, {"number": 0, "seed": 1}])
def test_another_epoch_or_seed_is_another_order_and_other_crops(other):
    data = source(SmallImages(padding=1, flip=False, mean=(0.0,), std=(1.0,)), train=96)
    ours, theirs = epoch(data), epoch(data, **other)
    assert numbers(ours) != numbers(theirs)
    assert sorted(numbers(ours)) == sorted(numbers(theirs))
    crops = [
        dict(zip(numbers(batches), torch.cat([b.images for b in batches]), strict=True))
        for batches in (ours, theirs)
    ]
    same = sum(torch.equal(crops[0][number], crops[1][number]) for number in range(1, 96))
    assert same < 30  # of nine shifts each, one is the same by chance


@pytest.mark.parametrize("settings", [PLAIN, AUGMENTED])
@pytest.mark.parametrize("start", [1, 4, 7, 8])
def test_from_the_middle_of_an_epoch_the_rest_is_the_same(settings, start):
    whole = epoch(source(settings), 2)
    rest = epoch(source(settings), 2, start=start)
    assert len(rest) == 8 - start
    if rest:
        assert_same(rest, whole[start:])


@pytest.mark.parametrize("settings", [PLAIN, AUGMENTED])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_part_every_batch(settings, ranks):
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
    # One image again and again, so that batches differ by their crops alone.
    pixels = torch.arange(1, 26, dtype=torch.uint8).view(1, 1, 5, 5).expand(64, 1, 5, 5)
    same = Images(pixels.contiguous(), torch.zeros(64, dtype=torch.long))
    data = InMemory("same", same, same, AUGMENTED, classes=1)
    batches = [
        batch.images.numpy().tobytes()
        for seed in (0, 1)
        for number in (0, 1)
        for rank in (0, 1)
        for batch in data.training(number, batch_size=32, seed=seed, shard=Shard(rank, 2))
    ]
    assert len(set(batches)) == len(batches) == 16


@pytest.mark.parametrize("batch_size", [1, 7, 30, 64])
def test_test_images_come_once_and_in_order_whatever_the_batch_size(batch_size):
    data = source(AUGMENTED).with_validation()
    assert numbers(data.testing(batch_size=batch_size)) == list(range(FIRST_TEST, FIRST_TEST + 30))
    held = numbers(data.validation(batch_size=batch_size))
    assert held == sorted(held)
    assert len(held) == data.val_size == 10


def test_without_validation_there_is_nothing_held_out():
    assert list(source().validation(batch_size=4)) == []


def test_validation_images_are_always_the_same_and_none_of_the_others():
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
def test_validation_images_are_of_each_class_its_share(classes):
    data = source(classes=classes, train=97).with_validation()
    labels = torch.cat([batch.labels for batch in data.validation(batch_size=64)])
    held = labels.bincount(minlength=classes)
    sizes = images(0, 97, classes).labels.bincount(minlength=classes)
    assert held.sum() == 10
    assert (held - sizes * 10 / 97).abs().max() < 1


def test_holding_out_leaves_the_whole_as_it_was():
    data = source(AUGMENTED)
    before = epoch(data)
    part = data.with_validation()
    assert_same(epoch(data), before)
    assert (data.train_size, data.val_size) == (100, 0)
    held = set(numbers(part.validation(batch_size=64)))
    assert not held & set(numbers(epoch(part)))  # not those that were cropped before


def test_the_first_images_are_taken_where_fewer_are_wanted():
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


def test_validation_images_come_from_those_that_are_not_trained_on():
    whole = with_images(train_images=20, validation_images=15)
    data = whole.with_validation()
    assert (data.train_size, data.val_size, data.test_size) == (20, 15, 30)
    held = numbers(data.validation(batch_size=64))
    assert len(set(held)) == 15
    assert set(held) <= set(range(20, 100))
    assert held == sorted(held)
    # The training is the one without validation, to the bit.
    alone = with_images(train_images=20)
    assert_same(epoch(data), epoch(alone))
    assert (whole.train_size, whole.val_size) == (20, 0)
    assert numbers(whole.to(CPU).with_validation().validation(batch_size=64)) == held
    assert data.fingerprint() != alone.fingerprint()


def test_so_many_are_held_out_of_all_where_all_are_trained_on():
    data = with_images(validation_images=25).with_validation()
    assert (data.train_size, data.val_size) == (75, 25)
    held = set(numbers(data.validation(batch_size=64)))
    (batch,) = data.training(0, batch_size=75, seed=0)
    assert sorted([*held, *numbers([batch])]) == list(range(100))


def test_more_validation_images_than_there_are_are_refused():
    assert refused(train_images=90, validation_images=11) == (
        "data_args.validation_images=11: of the 100 training images of tiny, "
        "data_args.train_images=90 leaves 10; ask for fewer of either."
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


def test_pixels_are_scaled_and_normalised_channel_by_channel():
    pixels = torch.arange(60).remainder(17).to(torch.uint8).view(5, 2, 3, 2)
    part = Images(pixels, torch.arange(5))
    settings = SmallImages(padding=0, flip=False, mean=(0.25, 0.5), std=(0.5, 2.0))
    data = InMemory("two", part, part, settings, classes=5, scale=16.0)
    (batch,) = data.testing(batch_size=5)
    assert batch.images.dtype == torch.float32
    for channel, (mean, std) in enumerate(((0.25, 0.5), (0.5, 2.0))):
        exact = (pixels[:, channel].double() / 16 - mean) / std
        assert torch.allclose(batch.images[:, channel].double(), exact, atol=1e-6)


def test_statistics_are_of_the_scaled_training_images_taken():
    train, test = images(0, 100, 4), images(FIRST_TEST, 30, 4)
    settings = SmallImages(padding=0, flip=False, train_images=50)
    data = InMemory("tiny", train, test, settings, classes=4, scale=64.0)
    (batch,) = data.training(0, batch_size=50, seed=0)
    assert abs(batch.images.double().mean()) < 1e-6
    assert abs(batch.images.double().std(correction=0) - 1) < 1e-6


def refused(**settings):
    wanted = {"padding": 0, "flip": False, "mean": (0.0,), "std": (1.0,)} | settings
    with pytest.raises(InputError) as caught:
        source(SmallImages(**wanted))
    return str(caught.value)


def test_more_images_than_there_are_are_refused():
    assert refused(train_images=101) == (
        "data_args.train_images=101: tiny has only 100; ask for fewer or leave it out."
    )
    assert refused(test_images=31) == (
        "data_args.test_images=31: tiny has only 30; ask for fewer or leave it out."
    )


def test_statistics_for_other_channels_are_refused():
    assert refused(mean=(0.5, 0.5), std=(1.0, 1.0)) == (
        "data_args.mean=[0.5, 0.5]: tiny has 1 channel; give one number for each."
    )
    assert refused(mean=(), std=()) == (
        "data_args.mean=[]: tiny has 1 channel; give one number for each."
    )


@pytest.mark.parametrize("padding", [3, 10**9])
def test_padding_that_may_leave_nothing_of_an_image_is_refused(padding):
    assert refused(padding=padding) == (
        f"data_args.padding={padding}: tiny has images of 3×4 pixels, of which crops would show "
        "nothing; choose fewer than the shorter side."
    )
    assert source(SmallImages(padding=2, flip=False)).train_size == 100


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(InputError, match=r"batch_size=101: tiny has 100 training images"):
        next(source().training(0, batch_size=101, seed=0))
    with pytest.raises(InputError, match=r"batch_size=91: tiny has 90 training images"):
        source().with_validation().steps_per_epoch(91)


def test_too_few_images_to_hold_some_out_are_refused():
    with pytest.raises(InputError) as caught:
        source(train=5).with_validation()
    assert str(caught.value) == (
        "--data tiny: has 5 images, too few to hold out a validation part; pass --select-on none."
    )
