"""Exact top-k: against a sort of all entries, with ties, minima, costs and odd values."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference.selection as reference
from probmask.core.selection import kept_counts, select_top, select_within
from probmask.errors import InputError, NonFiniteError

INF = math.inf
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FEW = st.sampled_from([-INF, -1.5, -1.0, -0.0, 0.0, 1e-45, 0.25, 1.0, INF])  # many ties
ANY = st.floats(allow_nan=False)


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        g.dtype == torch.bool and torch.equal(g, e) for g, e in zip(got, expected, strict=True)
    )


@st.composite
def tensor(draw, shape, dtype):
    """Return a tensor that is contiguous, transposed in memory, or has gaps between entries."""
    n = math.prod(shape)
    numbers = draw(st.lists(draw(st.sampled_from([FEW, ANY])), min_size=n, max_size=n))
    layout = draw(st.sampled_from(["contiguous", "transposed", "gaps"]))
    x = torch.tensor(numbers, dtype=dtype).reshape(shape)
    if layout == "transposed":
        return x.t().contiguous().t()
    return torch.stack([x, -x], dim=-1)[..., 0] if layout == "gaps" else x


@st.composite
def problem(draw):
    """Return values, ties or None, and minima or None, for up to five matrices, some empty."""
    sides = st.integers(0, 4)
    shapes = draw(st.lists(st.tuples(sides, sides), min_size=1, max_size=5))
    values = [draw(tensor(s, draw(st.sampled_from(DTYPES)))) for s in shapes]
    ties = [draw(tensor(s, draw(st.sampled_from(DTYPES)))) for s in shapes]
    minimum = [draw(st.integers(0, min(3, math.prod(s)))) for s in shapes]
    return values, draw(st.sampled_from([ties, None])), draw(st.sampled_from([minimum, None]))


@settings(deadline=None, max_examples=100)
@given(problem(), st.data())
def test_select_top_equals_the_reference(given_, data):
    values, ties, minimum = given_
    keep = data.draw(st.integers(sum(minimum or []), sum(v.numel() for v in values)))

    masks = select_top(values, keep, ties=ties, minimum=minimum)

    assert same(masks, reference.select_top(values, keep, ties, minimum))
    assert sum(kept_counts(masks)) == keep


@settings(deadline=None, max_examples=100)
@given(problem(), st.data())
def test_select_within_equals_the_reference(given_, data):
    values, ties, minimum = given_
    cost = data.draw(st.sampled_from([st.integers(1, 9), st.floats(1e-3, 9)]))
    costs = data.draw(st.lists(cost, min_size=len(values), max_size=len(values)))
    least = math.fsum(c * k for c, k in zip(costs, minimum, strict=True)) if minimum else 0
    total = math.fsum(c * v.numel() for c, v in zip(costs, values, strict=True))
    budget = data.draw(st.one_of(st.just(total), st.floats(least, max(least, total + 1))))

    masks = select_within(values, costs, budget, ties=ties, minimum=minimum)

    assert same(masks, reference.select_within(values, costs, budget, ties, minimum))
    assert math.fsum(c * k for c, k in zip(costs, kept_counts(masks), strict=True)) <= budget
    assert budget != total or sum(kept_counts(masks)) == sum(v.numel() for v in values)


@settings(deadline=None, max_examples=50)
@given(problem(), st.data())
def test_select_within_with_unit_costs_equals_select_top(given_, data):
    values, ties, minimum = given_
    keep = data.draw(st.integers(sum(minimum or []), sum(v.numel() for v in values)))
    within = select_within(values, [1] * len(values), keep, ties=ties, minimum=minimum)
    assert same(within, select_top(values, keep, ties=ties, minimum=minimum))


@pytest.mark.parametrize("decimals", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tensors_equal_a_full_lexicographic_sort(dtype, decimals):
    """Several chunks per tensor; one decimal makes long runs of equal values and equal ties."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(700, 500), (300_001,), (0, 5), (3, 3)]
    draw = [torch.randn(2, *s, generator=generator, dtype=dtype) for s in shapes]
    values, ties = zip(*[x.round(decimals=decimals) for x in draw], strict=True)
    keep = 123_457

    masks = select_top(values, keep, ties=ties)

    v, t = (torch.cat([x.flatten() for x in xs]).numpy() for xs in (values, ties))
    order = np.lexsort((np.arange(len(v)), -t, -v))
    expected = np.zeros(len(v), dtype=bool)
    expected[order[:keep]] = True
    assert np.array_equal(torch.cat([m.flatten() for m in masks]).numpy(), expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighboring_floats_are_distinguished(dtype, sign):
    steps = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    x = sign * (1 + steps.to(dtype) * torch.finfo(dtype).eps)
    (mask,) = select_top([x], 1234)
    assert set(x[mask].tolist()) == set(x.sort(descending=True).values[:1234].tolist())


def test_the_tie_rule():
    values = [torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.5, 0.5])]
    ties = [torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 3.0])]
    order = [(1, 1), (0, 1), (0, 0), (0, 2), (1, 0)]
    for keep in range(6):
        masks = select_top(values, keep, ties=ties)
        assert {(i, int(j)) for i, m in enumerate(masks) for j in m.nonzero()} == set(order[:keep])


def test_negative_zero_equals_zero_and_infinities_are_numbers():
    (mask,) = select_top([torch.tensor([-0.0, 0.0, -INF, INF])], 2)
    assert mask.tolist() == [True, False, False, True]
    (mask,) = select_top([torch.tensor([-INF, -INF])], 1, ties=[torch.tensor([-INF, -1e38])])
    assert mask.tolist() == [False, True]


def test_the_minimum_is_taken_first_and_counts_towards_keep():
    values = [torch.tensor([9.0, 8.0, 7.0]), torch.tensor([1.0, 2.0])]
    assert kept_counts(select_top(values, 3, minimum=[0, 1])) == [2, 1]
    assert kept_counts(select_top(values, 3, minimum=[1, 0])) == [3, 0]


def test_cheaper_entries_further_down_are_still_kept():
    values = [torch.tensor([9.0, 6.0]), torch.tensor([8.0, 7.0]), torch.tensor([5.0, 4.0, 3.0])]
    # 9 costs 5, 8 costs 3: 2 of 10 are left; 7 (3) and 6 (5) no longer fit, 5 and 4 (1 each) do.
    masks = select_within(values, [5, 3, 1], 10)
    assert [m.tolist() for m in masks] == [[True, False], [True, False], [True, True, False]]


def test_no_tensors_and_empty_tensors():
    assert select_top([], 0) == []
    assert select_within([], [], 1.0) == []
    assert [m.shape for m in select_top([torch.empty(0, 3), torch.empty(0)], 0)] == [(0, 3), (0,)]


def test_an_infinite_budget_keeps_everything():
    assert kept_counts(select_within([torch.rand(3, 4)], [2.5], INF)) == [12]


def test_values_that_require_grad_do_not_change():
    x = torch.rand(3, 4, requires_grad=True)
    before = x.detach().clone()
    (mask,) = select_top([x], 5, ties=[x])
    assert not mask.requires_grad
    assert torch.equal(x, before)


X = [torch.arange(6.0).reshape(2, 3), torch.arange(4.0)]
NAN = [torch.zeros(3), torch.tensor([0.0, math.nan])]
SPARSITY = "for a sparsity pass n - round(sparsity * n)."
KEEP = "keep is the number of entries to keep, an integer from 0 to 10; " + SPARSITY
ERRORS = [
    (lambda: select_top(X, 11), f"select_top(keep=11): {KEEP}"),
    (lambda: select_top(X, -1), f"select_top(keep=-1): {KEEP}"),
    (lambda: select_top(X, 0.02), f"select_top(keep=0.02): {KEEP}"),
    (
        lambda: select_top(X, 5, minimum=[3, 3]),
        "select_top(keep=5): the minima require 6 entries, which exceeds the budget.",
    ),
    (
        lambda: select_within(X, [2, 1], 6, minimum=[3, 1]),
        "select_within(budget=6): the minima require 4 entries, which exceeds the budget.",
    ),
    (
        lambda: select_top(X, 9, minimum=[0, 5]),
        "select_top(keep=9): minimum[1] is 5; it must be from 0 to 4, the size of tensor 1.",
    ),
    (
        lambda: select_top(X, 9, minimum=[-1, 5]),
        "select_top(keep=9): minimum[0] is -1; it must be from 0 to 6, the size of tensor 0.",
    ),
    (
        lambda: select_top(X, 9, minimum=[1]),
        "select_top(keep=9): 1 minima for 2 tensors; pass one for each tensor.",
    ),
    (
        lambda: select_top(X, 9, ties=X[:1]),
        "select_top(keep=9): 1 ties for 2 tensors; pass one for each tensor.",
    ),
    (
        lambda: select_top(X, 9, ties=[X[0].t(), X[1]]),
        "select_top(keep=9): ties[0] has shape (3, 2), values[0] (2, 3); they must be the same.",
    ),
    (
        lambda: select_within(X, [1], 9),
        "select_within(budget=9): 1 costs for 2 tensors; pass one for each tensor.",
    ),
    (
        lambda: select_within(X, [1, 0.0], 9),
        "select_within(budget=9): costs[1] is 0.0; it must be positive and finite.",
    ),
    (
        lambda: select_within(X, [1, math.nan], 9),
        "select_within(budget=9): costs[1] is nan; it must be positive and finite.",
    ),
    (
        lambda: select_within(X, [1, 1], -0.5),
        "select_within(budget=-0.5): budget is the largest total cost of the kept entries, ≥ 0.",
    ),
    (
        lambda: select_within(X, [1, 1], math.nan),
        "select_within(budget=nan): budget is the largest total cost of the kept entries, ≥ 0.",
    ),
    (
        lambda: select_top([torch.arange(3)], 1),
        "select_top(keep=1): values[0] is torch.int64; pass floating-point tensors.",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_wrong_input_raises(call, message):
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("names", "where"),
    [(None, "values[1]"), (["conv1.weight", "fc.weight"], "values[1] (fc.weight)")],
)
def test_nan_raises_and_the_error_names_the_tensor(names, where, dtype):
    values = [x.to(dtype) for x in NAN]
    with pytest.raises(NonFiniteError) as error:
        select_top(values, 1, names=names)
    expected = f"select_top(keep=1): {where} contains NaN, which cannot be ordered. "
    expected += "Look for a loss or a gradient that diverged."
    assert str(error.value) == expected


def test_nan_among_the_ties_raises_even_if_no_tie_is_needed():
    with pytest.raises(NonFiniteError, match=r"ties\[1\] contains NaN"):
        select_within([torch.ones(3), torch.zeros(2)], [1, 1], 0, ties=NAN)
