"""Selection and projection of sharded tensors give what they give for whole tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probmask.core.projection import project_
from probmask.core.selection import (
    cut_by_magnitude,
    nth_largest,
    select_in_each,
    select_top,
)
from probmask.errors import InputError, NonFiniteError
from reference.thread_shards import joined, on_shards

SHAPES = [(5, 3), (1, 4), (8, 2, 2)]  # the rows of the first two are not divisible
SIZE = 15 + 4 + 32
NAMES = ["a", "b", "c"]


def tensors(seed, *, levels=None, dtype=torch.float32):
    """Return random tensors, with few different values if ``levels`` is given."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return made if levels is None else [(x * levels).round() / levels for x in made]


def parts_of(values, shards):
    return [shards.part(value).clone() for value in values]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    keep=st.integers(0, SIZE),
    levels=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    tied=st.booleans(),
    least=st.sampled_from([None, [2, 0, 1], [15, 0, 0]]),
)
def test_the_masks_are_those_of_whole_tensors(ranks, seed, keep, levels, dtype, tied, least):
    values = tensors(seed, levels=levels, dtype=dtype)
    values[0][0, 0] = -0.0
    ties = tensors(seed + 1, levels=1) if tied else None
    keep = max(keep, sum(least or [0]))

    def select(shards):
        near = None if ties is None else parts_of(ties, shards)
        mine = parts_of(values, shards)
        return select_top(mine, keep, ties=near, minimum=least, shards=shards)

    expected = select_top(values, keep, ties=ties, minimum=least)
    assert equal(joined(on_shards(ranks, select)), expected)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_tensor_can_have_its_own_budget(ranks):
    values, counts = tensors(3, levels=2), [4, 0, 32]

    def select(shards):
        return select_in_each(parts_of(values, shards), counts, names=NAMES, shards=shards)

    assert equal(joined(on_shards(ranks, select)), select_in_each(values, counts, names=NAMES))


@pytest.mark.parametrize("keep", [0, 1, 20, SIZE])
def test_the_magnitude_cut_has_the_same_masks_and_threshold(keep):
    values, scales = tensors(5, levels=3), [1.0, 0.5, 2.0]
    masks, threshold = cut_by_magnitude(values, scales, keep, NAMES)

    def cut(shards):
        return cut_by_magnitude(parts_of(values, shards), scales, keep, NAMES, shards=shards)

    found = on_shards(4, cut)
    assert equal(joined([masks for masks, _ in found]), masks)
    assert [value for _, value in found] == [pytest.approx(threshold, rel=1e-12)] * 4


def test_a_value_has_the_same_rank():
    values = tensors(7)
    order = torch.cat([value.flatten() for value in values]).sort(descending=True).values
    for n in (1, 17, SIZE):
        found = on_shards(2, lambda s, n=n: nth_largest(parts_of(values, s), n, s, NAMES))
        assert found == [float(order[n - 1])] * 2


def test_every_rank_raises_if_one_has_a_nan_or_too_few_entries():
    values = tensors(1)
    values[0][0, 0] = torch.nan
    found = on_shards(2, lambda s: select_top(parts_of(values, s), 3, names=NAMES, shards=s))
    assert [type(error) for error in found] == [NonFiniteError] * 2
    assert "a contains NaN" in str(found[0])
    assert "another rank" in str(found[1])
    found = on_shards(2, lambda s: select_top(parts_of(tensors(1), s), 99, shards=s))
    assert [type(error) for error in found] == [InputError] * 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("keep", [0.0, 3.5, 20.0, 100.0])
def test_the_projection_is_that_of_whole_tensors(ranks, keep):
    values = [value.abs() for value in tensors(9)]
    expected = [value.clone() for value in values]
    project_(expected, keep)

    def project(shards):
        mine = parts_of(values, shards)
        project_(mine, keep, shards=shards)
        return mine

    for found, wanted in zip(joined(on_shards(ranks, project)), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=2e-6, atol=1e-7)


def test_few_small_tensors_are_sent():
    """One histogram of 16 KiB per digit of 11 bits, and the number of ties of each tensor."""
    values = [torch.randn(64, 64) for _ in range(3)]

    def select(shards):
        select_top(parts_of(values, shards), 1000, shards=shards)
        return shards.sent

    histogram = 8 * (2**11 + 1)
    assert on_shards(2, select) == [[histogram] * 3 + [8 * 3]] * 2
