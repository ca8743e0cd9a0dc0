"""Held-out images: always the same, stratified by class, and evenly spaced."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probmask.data.splits import (
    evenly_spaced,
    select_stratified,
    select_test,
    select_unused_validation,
    select_validation,
    validation_count,
)
from probmask.errors import InputError

some_labels = st.lists(st.integers(0, 7), min_size=1, max_size=80)


@given(some_labels, st.data())
def test_each_class_is_selected_in_proportion_and_evenly_spaced(labels, data):
    count = data.draw(st.integers(0, len(labels)))
    marked = select_stratified(torch.tensor(labels), count).tolist()
    assert sum(marked) == count
    for label in set(labels):
        of_class = [mark for mark, other in zip(marked, labels, strict=True) if other == label]
        quota, size = sum(of_class), len(of_class)
        assert abs(quota - Fraction(count * size, len(labels))) < 1
        for k in range(size + 1):  # any first k images of the class contain their proportion
            assert sum(of_class[:k]) == k * quota // size


@given(some_labels, st.data())
def test_the_selection_is_deterministic(labels, data):
    count = data.draw(st.integers(0, len(labels)))
    first, second = (select_stratified(torch.tensor(labels), count) for _ in range(2))
    assert torch.equal(first, second)


def test_every_tenth_image_is_for_validation_and_every_fifth_for_testing():
    labels = torch.arange(40) // 20
    marked = select_validation("tiny", labels)
    assert marked.nonzero().flatten().tolist() == [9, 19, 29, 39]
    assert select_test("tiny", labels).nonzero().flatten().tolist() == [
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
def test_a_tenth_is_held_out_but_at_most_10000(images, held):
    assert validation_count(images) == held
    if 0 < held < 10_000:
        assert int(select_validation("tiny", torch.zeros(images, dtype=torch.long)).sum()) == held


def test_a_given_number_is_held_out():
    labels = torch.arange(40) // 20
    marked = select_validation("tiny", labels, 8)
    assert marked.nonzero().flatten().tolist() == [4, 9, 14, 19, 24, 29, 34, 39]
    with pytest.raises(InputError) as caught:
        select_validation("tiny", labels, 40)
    assert str(caught.value) == (
        "data_args.validation_images=40: tiny has 40 training images, and none would be left for "
        "training; choose a smaller number."
    )


@given(some_labels, st.data())
def test_unused_images_are_selected_in_proportion(labels, data):
    labels = torch.tensor(labels)
    flags = st.lists(st.booleans(), min_size=len(labels), max_size=len(labels))
    used = torch.tensor(data.draw(flags))
    left = labels[~used]
    count = data.draw(st.integers(0, len(left)))
    marked = select_unused_validation("tiny", labels, used, count)
    assert int(marked.sum()) == count
    assert not (marked & used).any()
    for label in set(left.tolist()):
        quota = int((marked & (labels == label)).sum())
        due = Fraction(count * int((left == label).sum()), len(left))
        assert abs(quota - due) < 1


def test_too_few_unused_images():
    used = torch.arange(40) < 35
    with pytest.raises(InputError) as caught:
        select_unused_validation("tiny", torch.zeros(40, dtype=torch.long), used, 6)
    assert str(caught.value) == (
        "data_args.validation_images=6: tiny has 40 training images, and "
        "data_args.train_images=35 leaves 5; decrease either."
    )


def test_too_few_images_to_hold_some_out():
    with pytest.raises(InputError) as caught:
        select_validation("tiny", torch.zeros(5, dtype=torch.long))
    assert str(caught.value) == (
        "--data tiny: 5 images are too few to hold out a validation part; pass --select-on none."
    )
    with pytest.raises(InputError) as caught:
        select_test("tiny", torch.zeros(2, dtype=torch.long))
    assert str(caught.value) == (
        "--data tiny: 2 images are too few to hold out a test part; add images, or a test part."
    )


@given(st.integers(1, 200), st.data())
def test_evenly_spaced_indices_are_distinct_and_cover_the_range(total, data):
    count = data.draw(st.integers(1, total))
    numbers = evenly_spaced(total, count).tolist()
    assert len(numbers) == count
    assert numbers[0] == 0
    assert numbers[-1] < total
    gaps = [after - before for before, after in pairwise(numbers)]
    assert all(gap in (total // count, -(-total // count)) for gap in gaps)
