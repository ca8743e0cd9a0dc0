"""Integer grids: the scale with the least error, exact products, and grids found from values."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probmask.core.integer_grid import (
    calibrate,
    fake_quantized,
    from_grid,
    grid_of,
    largest_integer,
    narrow,
    quantized,
    round_to_grid,
    scale_of,
)
from reference.integer_grid import quantized_channel

BITS = st.integers(2, 8)
DTYPES = st.sampled_from([torch.float32, torch.float64])


@st.composite
def weights(draw, most=1000):
    """Return a matrix of any magnitude, with zeros, empty channels and equal values."""
    dtype = draw(DTYPES)
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 8))
    limit = 150 if dtype == torch.float32 else 1075
    values = []
    for _ in range(rows):
        exponent = draw(st.integers(max(-limit, -most), min(limit - 30, most)))
        fractions = st.one_of(st.floats(-1, 1), st.sampled_from([0.0, 1.0, -1.0]))
        row = draw(st.lists(fractions, min_size=columns, max_size=columns))
        values.append([math.ldexp(x, exponent) for x in row])
    return torch.tensor(values, dtype=dtype)


@settings(max_examples=300, deadline=None)
@given(weights(), BITS)
def test_rounding_keeps_zeros_and_signs_and_is_idempotent(tensor, bits):
    before = tensor.clone()
    rounded = quantized(tensor, bits)
    assert torch.equal(tensor, before)
    assert rounded.dtype == tensor.dtype
    assert torch.equal(rounded.sign(), tensor.sign())
    assert torch.equal(quantized(rounded, bits), rounded)
    for row in rounded:
        assert row.abs().unique().count_nonzero() <= largest_integer(bits)


@settings(max_examples=150, deadline=None)
@given(weights(most=149), BITS)  # the squares of the obvious one overflow beyond
def test_each_channel_equals_the_obvious_one(tensor, bits):
    tensor = tensor[:2, :5]
    for row, rounded in zip(tensor, quantized(tensor, bits), strict=True):
        assert rounded.tolist() == quantized_channel(row.tolist(), bits, tensor.dtype)


@settings(max_examples=200, deadline=None)
@given(st.integers(-400, 400), BITS, st.data())
def test_a_grid_is_found_from_its_values(code, bits, data):
    most = largest_integer(bits)
    nonzero = st.integers(-most, most).filter(bool)
    integers = torch.tensor(data.draw(st.lists(nonzero, min_size=1, max_size=9)))
    counts = torch.tensor([integers.numel()])
    values = from_grid(integers, torch.tensor([code]), counts, torch.float32)
    exact = integers.double() * scale_of(torch.tensor([code]))
    assert torch.equal(values.double(), exact)  # no rounding in fp32
    codes, found = grid_of(values, counts, bits)
    assert bool(found.all())
    again = round_to_grid(values, codes, counts, bits)
    assert torch.equal(from_grid(again, codes, counts, torch.float32), values)
    assert int(again.abs().max()) <= int(integers.abs().max())  # the coarsest grid


def test_random_weights_are_on_no_grid():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert not bool(grid_of(values, torch.full((10,), 100), 8)[1].any())


def test_the_scale_is_better_than_that_of_the_largest_weight():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    values += 0.5 * values.sign()  # small weights are pruned
    counts = torch.full((40,), 100)
    codes = calibrate(values, counts, 3)
    rounded = from_grid(round_to_grid(values, codes, counts, 3), codes, counts, torch.float32)
    largest = values.reshape(40, 100).abs().amax(1, keepdim=True) / 3
    plain = (values.reshape(40, 100) / largest).round() * largest
    assert (rounded - values).norm() < 0.9 * (plain.flatten() - values).norm()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, torch.finfo(torch.float32).max])
def test_what_has_no_finite_grid_stays(value):
    tensor = torch.tensor([[1.0, 0.3], [value, 0.7]])
    rounded = quantized(tensor, 2)
    assert rounded.isfinite().all() or rounded is tensor


def test_other_dtypes_and_empty_tensors_stay():
    for tensor in (torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(2, 2), torch.tensor(0.0)):
        assert torch.equal(quantized(tensor, 8), tensor)
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        tensor = torch.arange(6).reshape(2, 3).to(dtype)
        assert quantized(tensor, 2) is tensor


def test_the_memory_layout_stays():
    tensor = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    rounded = quantized(tensor, 4)
    assert rounded.stride() == tensor.stride()
    assert torch.equal(rounded, quantized(tensor.contiguous(), 4))


def test_gradients_pass_unchanged():
    tensor = torch.randn(3, 4, requires_grad=True)
    factors = torch.randn(3, 4)
    (fake_quantized(tensor, 2) * factors).sum().backward()
    assert torch.equal(tensor.grad, factors)
    assert torch.equal(fake_quantized(tensor, 2), quantized(tensor.detach(), 2))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), max_size=6), DTYPES)
def test_fp16_is_used_only_if_it_is_precise(values, dtype):
    tensor = torch.tensor(values, dtype=dtype)
    narrowed = narrow(tensor)
    if narrowed.dtype == torch.float16 and values:
        error = (narrowed.to(dtype) - tensor).abs()
        largest = tensor.abs().max()
        assert bool((error <= torch.maximum(tensor.abs() * 2**-11, largest * 2**-20)).all())
        assert torch.equal(narrow(narrowed.to(dtype)), narrowed)
    else:
        assert narrowed is tensor


def test_numbers_of_a_trained_network_are_narrowed():
    """Running variances of pruned channels decay to subnormal numbers."""
    assert narrow(torch.tensor([1.0, 0.25, 5.6e-45, -1e-9])).dtype == torch.float16
    assert narrow(torch.tensor([1e-9, 2e-9])).dtype == torch.float32
    assert narrow(torch.tensor([1e9])).dtype == torch.float32
