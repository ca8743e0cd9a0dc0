"""The digits: a fixed split of all images of scikit-learn, and their batches."""

import sys

import numpy as np
import pytest
import torch

from probmask.data import Shard, load_data
from probmask.errors import InputError


@pytest.fixture(scope="module")
def data():
    return load_data("digits")


def raw(**settings):
    """The digits with pixels in [0, 1] and without augmentation."""
    return load_data("digits", None, {"padding": 0, "mean": [0], "std": [1], **settings})


def as_bytes(batch):
    return [image.tobytes() for image in (batch.inputs * 16).round().byte().numpy()]


def test_sizes(data):
    assert (data.train_size, data.val_size, data.test_size) == (1442, 0, 355)
    assert (data.name, data.classes, data.image_shape) == ("digits", 10, (1, 8, 8))
    assert data.steps_per_epoch(64) == 22


def test_every_image_is_in_exactly_one_part():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    everything = [
        (image.astype(np.uint8).tobytes(), int(label))
        for image, label in zip(bunch.images, bunch.target, strict=True)
    ]
    (train,) = raw().training(0, batch_size=1442, seed=0)
    (test,) = raw().testing(batch_size=355)
    ours = [
        pair
        for batch in (train, test)
        for pair in zip(as_bytes(batch), batch.labels.tolist(), strict=True)
    ]
    assert sorted(ours) == sorted(everything)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_part_contains_every_digit_about_equally_often(held_out):
    data = raw().with_validation() if held_out else raw()
    (train,) = data.training(0, batch_size=data.train_size, seed=0)
    parts = [(train.labels, data.train_size), (next(data.testing(batch_size=355)).labels, 355)]
    if held_out:
        assert (data.train_size, data.val_size) == (1298, 144)
        parts.append((next(data.validation(batch_size=144)).labels, 144))
    for labels, size in parts:
        counts = torch.bincount(labels, minlength=10)
        assert len(counts) == data.classes == 10
        assert (counts - size / 10).abs().max() < 0.05 * size / 10 + 1


def test_images_are_normalized(data):
    images = torch.cat([batch.inputs for batch in data.testing(batch_size=100)])
    assert images.shape == (355, 1, 8, 8)
    assert abs(images.mean().item()) < 0.05
    assert abs(images.std().item() - 1) < 0.05


def test_the_documented_statistics_are_those_of_the_training_images(data):
    computed = load_data("digits", None, {"mean": "none", "std": "none"}).settings
    assert round(computed.mean[0], 4) == data.settings.mean[0]
    assert round(computed.std[0], 4) == data.settings.std[0]


def test_settings_apply():
    few = raw(train_images=100, test_images=7)
    assert (few.train_size, few.test_size) == (100, 7)
    (test,) = raw().testing(batch_size=355)
    (first,) = few.testing(batch_size=355)
    assert torch.equal(first.inputs, test.inputs[:7])


def test_batches_are_the_same_every_time(data):
    first = list(data.training(3, batch_size=64, seed=5))
    again = list(load_data("digits").training(3, batch_size=64, seed=5))
    assert len(first) == len(again) == 22
    for ours, theirs in zip(first, again, strict=True):
        assert torch.equal(ours.inputs, theirs.inputs)
        assert torch.equal(ours.labels, theirs.labels)


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_divide_every_batch_in_order(data, ranks):
    whole = list(data.training(1, batch_size=64, seed=0))
    parts = [
        list(data.training(1, batch_size=64, seed=0, shard=Shard(rank, ranks)))
        for rank in range(ranks)
    ]
    for position, batch in enumerate(whole):
        labels = torch.cat([part[position].labels for part in parts])
        assert torch.equal(labels, batch.labels)


def test_a_directory_is_an_error(tmp_path):
    with pytest.raises(InputError) as caught:
        load_data("digits", tmp_path)
    assert str(caught.value) == (
        f"--data-dir {tmp_path}: the digits are part of scikit-learn and need no directory; omit "
        "this option."
    )


def test_without_scikit_learn_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install 'probmask\[train\]'"):
        load_data("digits")
