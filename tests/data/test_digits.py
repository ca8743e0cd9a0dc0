"""The digits: sizes, labels, and batches that depend on nothing but seed, epoch and position."""

import sys

import pytest
import torch

from probmask.data import DATA, Shard, load_data
from probmask.errors import InputError


@pytest.fixture(scope="module")
def data():
    return load_data("digits")


def assert_same(a, b):
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.images, y.images)
        assert torch.equal(x.labels, y.labels)


def test_sizes_are_those_of_the_docstring(data):
    assert (data.train_size, data.test_size) == (1442, 355)
    assert data.image_shape == (1, 8, 8)
    assert data.steps_per_epoch(64) == 22
    documented = DATA["digits"].__doc__ or ""
    assert "1,442 training and 355 test" in documented


def test_training_and_test_images_are_the_whole_set_each_once(data):
    from sklearn.datasets import load_digits

    def hashes(pixels):
        return sorted(pixels.reshape(len(pixels), -1).to(torch.uint8).numpy().tobytes())

    everything = torch.from_numpy(load_digits().images)
    ours = torch.cat([data._train.pixels, data._test.pixels]).flatten(1)
    assert hashes(ours) == hashes(everything)


def test_both_parts_hold_every_digit(data):
    (test,) = data.testing(batch_size=355)
    train = torch.cat([b.labels for b in data.training(0, batch_size=1442, seed=0)])
    for labels, least in ((test.labels, 20), (train, 120)):
        counts = torch.bincount(labels, minlength=10)
        assert len(counts) == data.classes == 10
        assert counts.min() >= least


def test_images_are_normalised(data):
    images = torch.cat([batch.images for batch in data.testing(batch_size=100)])
    assert images.shape == (355, 1, 8, 8)
    assert abs(images.mean().item()) < 0.05
    assert abs(images.std().item() - 1) < 0.05


def test_testing_gives_the_same_images_whatever_the_batch_size(data):
    one = torch.cat([batch.images for batch in data.testing(batch_size=7)])
    other = torch.cat([batch.images for batch in data.testing(batch_size=355)])
    assert torch.equal(one, other)


def test_batches_depend_on_seed_epoch_and_position_only(data):
    first = list(data.training(3, batch_size=64, seed=5))
    torch.manual_seed(99)
    torch.rand(10)
    assert_same(first, list(load_data("digits").training(3, batch_size=64, seed=5)))


def test_making_batches_leaves_the_global_generator_alone(data):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    list(data.training(0, batch_size=256, seed=0))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("start", [1, 10, 21, 22])
def test_from_the_middle_of_an_epoch_the_rest_is_the_same(data, start):
    whole = list(data.training(2, batch_size=64, seed=0))
    rest = list(data.training(2, batch_size=64, seed=0, start=start))
    assert len(rest) == 22 - start
    if rest:
        assert_same(rest, whole[start:])


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_part_every_batch_in_order(data, ranks):
    whole = list(data.training(1, batch_size=64, seed=0))
    parts = [
        list(data.training(1, batch_size=64, seed=0, shard=Shard(rank, ranks)))
        for rank in range(ranks)
    ]
    for position, batch in enumerate(whole):
        labels = torch.cat([part[position].labels for part in parts])
        assert torch.equal(labels, batch.labels)


def test_another_epoch_or_seed_is_another_order_and_another_crop(data):
    def first(epoch, seed):
        return next(data.training(epoch, batch_size=1442, seed=seed))

    base = first(0, 0)
    for other in (first(1, 0), first(0, 1)):
        assert not torch.equal(base.labels, other.labels)
        # The same image, found by its place in the original order, is cropped differently.
        assert sorted(base.labels.tolist()) == sorted(other.labels.tolist())
        assert not torch.equal(
            base.images.sum((1, 2, 3)).sort().values, other.images.sum((1, 2, 3)).sort().values
        )


def test_an_unknown_data_set_gets_the_nearest_name():
    with pytest.raises(InputError, match="--data digit: no such data set; did you mean 'digits'"):
        load_data("digit")


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install 'probmask\[train\]'"):
        load_data("digits")
