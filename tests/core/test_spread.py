"""The spread of a budget over layers."""

import pytest
import torch

from probmask.core.allocation import Spread, erdos_renyi, uniform
from probmask.core.selection import kept_counts
from probmask.errors import InputError

NAMES = ("a", "b", "c")


def values():
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(shape, generator=generator) for shape in ((4, 2), (5, 10), (4, 5, 2, 2))]


def test_one_order_over_all_layers():
    given = values()
    masks = Spread(allocation="global").select(given, 30, NAMES)
    cut = torch.cat([v.flatten() for v in given]).sort(descending=True).values[29]
    assert all(torch.equal(m, v >= cut) for m, v in zip(masks, given, strict=True))


@pytest.mark.parametrize("allocation", ["uniform", "er", "erk"])
def test_the_largest_of_each_layer(allocation):
    given = values()
    shapes = [tuple(v.shape) for v in given]
    counts = (
        uniform([8, 50, 80], 30)
        if allocation == "uniform"
        else erdos_renyi(shapes, 30, kernel=allocation == "erk")
    )
    masks = Spread(allocation=allocation).select(given, 30, NAMES)
    assert kept_counts(masks) == counts
    for mask, v in zip(masks, given, strict=True):
        assert v[mask].min() > v[~mask].max()


@pytest.mark.parametrize("allocation", ["global", "uniform", "er", "erk"])
def test_dense_layers_are_whole_and_the_total_is_the_same(allocation):
    spread = Spread(allocation=allocation, dense_first=True, dense_last=True)
    counts = kept_counts(spread.select(values(), 100, NAMES))
    assert counts == [8, 12, 80]


@pytest.mark.parametrize("keep", [88, 50])
def test_dense_layers_that_leave_nothing_are_refused(keep):
    spread = Spread(allocation="global", dense_first=True, dense_last=True)
    spread.check("X", [8, 50, 80], 89)
    spread.check("X", [8, 80], 88)  # there are no others
    with pytest.raises(
        InputError,
        match=rf"^X: the dense layers alone hold 88 weights, the budget is {keep} of 138 and must "
        r"leave some for the others; lower sparsity, or make them sparse too\.$",
    ):
        spread.check("X", [8, 50, 80], keep)


@pytest.mark.parametrize("allocation", ["uniform", "er", "erk"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_the_numbers_of_the_layers_make_up_the_budget(allocation, first, last):
    spread = Spread(allocation=allocation, dense_first=first, dense_last=last)
    counts = spread.counts(((8, 2, 3, 3), (8, 2, 3, 3), (12, 128), (3, 12)), 333)
    assert sum(counts) == 333
    assert (counts[0] == 144) >= first
    assert (counts[3] == 36) >= last
    if allocation == "uniform":
        dense = 144 * first + 36 * last
        assert counts[2] == pytest.approx((333 - dense) / (1860 - dense) * 1536, abs=1)


def test_a_scope_is_one_order_or_the_same_fraction_of_each_layer():
    assert Spread.over("global") == Spread(allocation="global")
    assert Spread.over("layer", dense_last=True) == Spread(allocation="uniform", dense_last=True)


@pytest.mark.parametrize("allocation", ["global", "uniform", "er", "erk"])
def test_no_layer_grows_as_the_spare_part_shrinks(allocation):
    """As it would if the layers' numbers were rounded anew for each total."""
    given, spread = values(), Spread(allocation=allocation)
    for keep in range(10, 130, 37):
        last = [torch.ones_like(v, dtype=torch.bool) for v in given]
        for part in range(12, -1, -1):
            masks = spread.select(given, keep, NAMES, spare=part / 12)
            assert not any(bool((m & ~old).any()) for m, old in zip(masks, last, strict=True))
            last = masks
        assert sum(kept_counts(last)) == keep


@pytest.mark.parametrize(
    ("first", "last", "keep", "dense"),
    [
        (False, None, 20, {2}),  # the last layer holds half of the budget
        (False, None, 19, set()),
        (None, None, 60, {0, 2}),
        (None, None, 59, set()),  # neither: together they hold more than half
        (True, None, 30, {0}),  # what is asked for stays, whatever the budget
        (True, True, 1, {0, 2}),
        (False, False, 60, set()),
    ],
)
def test_layers_are_dense_where_the_budget_has_room(first, last, keep, dense):
    spread = Spread.fitting("layer", (20, 100, 10), keep, dense_first=first, dense_last=last)
    assert spread.allocation == "uniform"
    assert spread.dense(3) == dense


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_ties_decide_between_equal_values(allocation):
    ties = values()
    given = [torch.zeros_like(tie) for tie in ties]
    spread = Spread(allocation=allocation)
    chosen = spread.select(given, 30, NAMES, ties=ties)
    expected = spread.select(ties, 30, NAMES)
    assert all(torch.equal(a, b) for a, b in zip(chosen, expected, strict=True))
