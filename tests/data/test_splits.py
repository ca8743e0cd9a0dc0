"""Held-out images: always the same, of each class its share, spread over the file."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probmask.data.splits import (
    beside_training,
    evenly,
    evenly_by_class,
    for_testing,
    for_validation,
    validation_count,
)
from probmask.errors import InputError

some_labels = st.lists(st.integers(0, 7), min_size=1, max_size=80)


@given(some_labels, st.data())
def test_each_class_gives_its_share_evenly_spread(labels, data):
    count = data.draw(st.integers(0, len(labels)))
    marked = evenly_by_class(torch.tensor(labels), count).tolist()
    assert sum(marked) == count
    for label in set(labels):
        of_class = [mark for mark, other in zip(marked, labels, strict=True) if other == label]
        quota, size = sum(of_class), len(of_class)
        assert abs(quota - Fraction(count * size, len(labels))) < 1
        for k in range(size + 1):  # of any first k images of the class as many as are due
            assert sum(of_class[:k]) == k * quota // size


@given(some_labels, st.data())
def test_the_same_images_are_taken_every_time(labels, data):
    count = data.draw(st.integers(0, len(labels)))
    first, second = (evenly_by_class(torch.tensor(labels), count) for _ in range(2))
    assert torch.equal(first, second)


def test_of_ordered_images_every_tenth_is_for_validation():
    labels = torch.arange(40) // 20
    marked = for_validation("tiny", labels)
    assert marked.nonzero().flatten().tolist() == [9, 19, 29, 39]
    assert for_testing("tiny", labels).nonzero().flatten().tolist() == [
        4,
        9,
        14,
        19,
        24,
        29,
        34,
        39,
    ]


@pytest.mark.parametrize(
    ("images", "held"),
    [
        (0, 0),
        (5, 0),
        (6, 1),
        (1_442, 144),
        (50_000, 5_000),
        (100_000, 10_000),
        (1_281_167, 10_000),
    ],
)
def test_a_tenth_is_held_out_but_no_more_than_tell_networks_apart(images, held):
    assert validation_count(images) == held
    if 0 < held < 10_000:
        assert int(for_validation("tiny", torch.zeros(images, dtype=torch.long)).sum()) == held


def test_as_many_as_are_asked_for_are_held_out():
    labels = torch.arange(40) // 20
    marked = for_validation("tiny", labels, 8)
    assert marked.nonzero().flatten().tolist() == [4, 9, 14, 19, 24, 29, 34, 39]
    with pytest.raises(InputError) as caught:
        for_validation("tiny", labels, 40)
    assert str(caught.value) == (
        "data_args.validation_images=40: tiny has 40 training images, and some must be left to "
        "train on; ask for fewer."
    )


@given(some_labels, st.data())
def test_beside_the_training_of_each_class_its_share_of_what_is_left(labels, data):
    labels = torch.tensor(labels)
    flags = st.lists(st.booleans(), min_size=len(labels), max_size=len(labels))
    trained = torch.tensor(data.draw(flags))
    left = labels[~trained]
    asked = data.draw(st.integers(0, len(left)))
    marked = beside_training("tiny", labels, trained, asked)
    assert int(marked.sum()) == asked
    assert not (marked & trained).any()
    for label in set(left.tolist()):
        quota = int((marked & (labels == label)).sum())
        due = Fraction(asked * int((left == label).sum()), len(left))
        assert abs(quota - due) < 1


def test_more_than_the_training_leaves_are_refused():
    trained = torch.arange(40) < 35
    with pytest.raises(InputError) as caught:
        beside_training("tiny", torch.zeros(40, dtype=torch.long), trained, 6)
    assert str(caught.value) == (
        "data_args.validation_images=6: of the 40 training images of tiny, "
        "data_args.train_images=35 leaves 5; ask for fewer of either."
    )


def test_too_few_images_are_refused():
    with pytest.raises(InputError) as caught:
        for_validation("tiny", torch.zeros(5, dtype=torch.long))
    assert str(caught.value) == (
        "--data tiny: has 5 images, too few to hold out a validation part; pass --select-on none."
    )
    with pytest.raises(InputError) as caught:
        for_testing("tiny", torch.zeros(2, dtype=torch.long))
    assert str(caught.value) == (
        "--data tiny: has 2 images, too few to hold out a test part; bring more, or a test part."
    )


@given(st.integers(1, 200), st.data())
def test_evenly_takes_different_images_all_over(total, data):
    count = data.draw(st.integers(1, total))
    numbers = evenly(total, count).tolist()
    assert len(numbers) == count
    assert numbers[0] == 0
    assert numbers[-1] < total
    gaps = [after - before for before, after in pairwise(numbers)]
    assert all(gap in (total // count, -(-total // count)) for gap in gaps)
