"""Allocation of a budget to layers: against the reference, by hand, and through `Spread`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference.allocation as reference
from probmask.core.allocation import Spread, erdos_renyi, largest_remainder, uniform
from probmask.core.selection import kept_counts
from probmask.errors import InputError

NAMES = ("a", "b", "c")

SHAPES = st.lists(
    st.lists(st.integers(1, 12), min_size=2, max_size=5).map(tuple), min_size=1, max_size=6
)


def resnet32() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"conv1": (32, 3, 3, 3)}
    before = 32
    for stage, width in enumerate((32, 64, 128), start=1):
        for block in range(5):
            name = f"stage{stage}.{block}"
            shapes[f"{name}.conv1"] = (width, before, 3, 3)
            shapes[f"{name}.conv2"] = (width, width, 3, 3)
            if before != width:
                shapes[f"{name}.shortcut"] = (width, before, 1, 1)
            before = width
    shapes["classifier"] = (10, 128, 1, 1)
    return shapes


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0, 1e6)), st.integers(0, 12)
        ),
        max_size=7,
    ),
    st.data(),
)
def test_largest_remainder_equals_the_reference(pairs, data):
    shares, caps = [s for s, _ in pairs], [c for _, c in pairs]
    total = data.draw(st.integers(0, sum(caps)))

    counts = largest_remainder(shares, total, caps)

    assert counts == reference.largest_remainder(shares, total, caps)
    assert sum(counts) == total
    assert all(0 <= k <= cap for k, cap in zip(counts, caps, strict=True))


@pytest.mark.parametrize(
    ("shares", "total", "caps", "expected"),
    [
        ([1, 1, 1], 4, [9, 9, 9], [2, 1, 1]),  # equal remainders: the earlier
        ([1, 1, 1], 5, [9, 9, 9], [2, 2, 1]),
        ([5, 3, 2], 10, [9, 9, 9], [5, 3, 2]),
        ([0.5, 0.5], 7, [1, 9], [1, 6]),  # the excess goes to the other
        ([8, 1, 1], 10, [2, 9, 9], [2, 4, 4]),
        ([1, 0, 0], 7, [4, 2, 4], [4, 1, 2]),  # share 0: only once the others are full
        ([0, 0], 3, [2, 4], [1, 2]),
        ([], 0, [], []),
    ],
)
def test_largest_remainder_by_hand(shares, total, caps, expected):
    assert largest_remainder(shares, total, caps) == expected


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8), st.data())
def test_uniform_keeps_the_same_fraction_to_within_one_weight(sizes, data):
    n = sum(sizes)
    keep = data.draw(st.integers(0, n))
    counts = uniform(sizes, keep)
    assert sum(counts) == keep
    for k, size in zip(counts, sizes, strict=True):
        assert 0 <= k <= size
        assert n == 0 or abs(k * n - keep * size) < n  # |k - keep·size/n| < 1, in integers


def test_uniform_is_exact_beyond_the_precision_of_floats():
    size = 2**60 + 1
    assert uniform([size, size, 1], 2 * size + 1) == [size, size, 1]
    assert uniform([size, size, 1], 2 * size) == [size, size - 1, 1]


@settings(deadline=None)
@given(SHAPES, st.booleans(), st.data())
def test_erdos_renyi_is_the_density_formula_to_within_one_weight(shapes, kernel, data):
    sizes = [math.prod(s) for s in shapes]
    keep = data.draw(st.integers(1, sum(sizes)))

    counts = erdos_renyi(shapes, keep, kernel=kernel)

    densities = reference.erdos_renyi_densities(shapes, keep, kernel=kernel)
    assert sum(counts) == keep
    for k, size, density in zip(counts, sizes, densities, strict=True):
        assert 0 <= k <= size
        assert abs(k - density * size) < 1 + 1e-6


def test_erk_at_90_percent_makes_three_layers_of_resnet32_dense():
    shapes = resnet32()
    sizes = {name: math.prod(s) for name, s in shapes.items()}
    n = sum(sizes.values())
    assert (n, len(shapes)) == (1_855_584, 34)

    keep = n - round(0.9 * n)
    counts = dict(zip(shapes, erdos_renyi(list(shapes.values()), keep, kernel=True), strict=True))

    assert sum(counts.values()) == keep
    dense = [name for name, k in counts.items() if k == sizes[name]]
    assert dense == ["conv1", "stage2.0.shortcut", "classifier"]


@pytest.mark.parametrize("kernel", [False, True])
def test_linear_layers_have_no_kernel_so_er_is_erk(kernel):
    # 60 + 40 of 2400 and 40 + 10 of 400 weights: two to one.
    assert erdos_renyi([(40, 60), (10, 40)], 300, kernel=kernel) == [200, 100]


def test_convolutions_of_every_rank():
    shapes = [(8, 4, 3), (8, 4, 3, 3), (8, 4, 3, 3, 3)]
    # ER: as the kernel sizes, 3 : 9 : 27. ERK: as the sums of dimensions, 15 : 18 : 21.
    assert erdos_renyi(shapes, 39, kernel=False) == [3, 9, 27]
    assert erdos_renyi(shapes, 54, kernel=True) == [15, 18, 21]


@pytest.mark.parametrize("keep", [0, 1, 1_855_584])
@pytest.mark.parametrize("kernel", [False, True])
def test_the_ends_of_the_range(keep, kernel):
    shapes = list(resnet32().values())
    assert sum(erdos_renyi(shapes, keep, kernel=kernel)) == keep


KEEP = "keep is the number of weights to keep, an integer from 0 to 10; "
SPARSITY = "for a sparsity pass n - round(sparsity * n)."
SHAPE = "the weight of a layer has the shape (out, in/groups, *kernel). Leave out biases and norms."
ERRORS = [
    (lambda: uniform([4, 6], 11), f"uniform(keep=11): {KEEP}{SPARSITY}"),
    (lambda: uniform([4, 6], 0.5), f"uniform(keep=0.5): {KEEP}{SPARSITY}"),
    (
        lambda: erdos_renyi([(2, 2), (2, 3)], -1, kernel=True),
        f"erdos_renyi(keep=-1): {KEEP}{SPARSITY}",
    ),
    (
        lambda: erdos_renyi([(2, 2), (6,)], 3, kernel=False),
        f"erdos_renyi(keep=3): shapes[1] is (6,); {SHAPE}",
    ),
    (
        lambda: largest_remainder([1, 1], 3, [1, 1]),
        "largest_remainder(total=3): total must be an integer from 0 to 2, the sum of the caps.",
    ),
    (
        lambda: largest_remainder([1], 1, [1, 1]),
        "largest_remainder(total=1): 1 shares for 2 caps; pass one cap for each share.",
    ),
    (
        lambda: largest_remainder([1, math.nan], 1, [1, 1]),
        "largest_remainder(total=1): shares[1] is nan; it must be finite and not negative.",
    ),
    (
        lambda: largest_remainder([1, 1], 1, [-1, 1]),
        "largest_remainder(total=1): caps[0] is -1; it must be finite and not negative.",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_wrong_input_raises(call, message):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == message


def values():
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(shape, generator=generator) for shape in ((4, 2), (5, 10), (4, 5, 2, 2))]


def test_global_selects_the_largest_of_all_layers():
    given = values()
    masks = Spread(allocation="global").select(given, 30, NAMES)
    cut = torch.cat([v.flatten() for v in given]).sort(descending=True).values[29]
    assert all(torch.equal(m, v >= cut) for m, v in zip(masks, given, strict=True))


@pytest.mark.parametrize("allocation", ["uniform", "er", "erk"])
def test_layer_budgets_select_the_largest_of_each_layer(allocation):
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
def test_dense_layers_do_not_change_the_total(allocation):
    spread = Spread(allocation=allocation, dense_first=True, dense_last=True)
    counts = kept_counts(spread.select(values(), 100, NAMES))
    assert counts == [8, 12, 80]


@pytest.mark.parametrize("keep", [88, 50])
def test_dense_layers_that_exhaust_the_budget_raise(keep):
    spread = Spread(allocation="global", dense_first=True, dense_last=True)
    spread.check("X", [8, 50, 80], 89)
    spread.check("X", [8, 80], 88)  # there are no other layers
    with pytest.raises(
        InputError,
        match=rf"^X: the dense layers alone hold 88 weights, the budget is {keep} of 138\. "
        r"Nothing is left for the other layers; lower sparsity, or make the dense layers sparse "
        r"too\.$",
    ):
        spread.check("X", [8, 50, 80], keep)


@pytest.mark.parametrize("allocation", ["uniform", "er", "erk"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_layer_counts_sum_to_the_budget(allocation, first, last):
    spread = Spread(allocation=allocation, dense_first=first, dense_last=last)
    counts = spread.counts(((8, 2, 3, 3), (8, 2, 3, 3), (12, 128), (3, 12)), 333)
    assert sum(counts) == 333
    assert (counts[0] == 144) >= first
    assert (counts[3] == 36) >= last
    if allocation == "uniform":
        dense = 144 * first + 36 * last
        assert counts[2] == pytest.approx((333 - dense) / (1860 - dense) * 1536, abs=1)


def test_scope_is_global_or_uniform():
    assert Spread.over("global") == Spread(allocation="global")
    assert Spread.over("layer", dense_last=True) == Spread(allocation="uniform", dense_last=True)


@pytest.mark.parametrize("allocation", ["global", "uniform", "er", "erk"])
def test_masks_shrink_monotonically_with_the_spare_fraction(allocation):
    """Rounding the layers' counts separately for each total would violate this."""
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
        (True, None, 30, {0}),  # an explicit setting holds for any budget
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
