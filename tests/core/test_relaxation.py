"""The relaxed mask against fp64; the masked draw, compiled and plain, against its reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probmask.core.noise import draw_key, logistic_
from probmask.core.relaxation import bernoulli_mask, masked_draw, relaxed_mask, relaxed_slope
from reference import masked_draw as reference

TEMPERATURES = [1.0, 0.9, 0.5, 0.3, 0.1, 0.03]
KEY = draw_key(5, 0, 7, 0, 3)


def in_fp64(prob, logistic, temperature):
    """Return mask and slope by plain autograd in fp64, for 0 < s < 1."""
    s = prob.double().requires_grad_()
    logit = s.log() - torch.log1p(-s)
    mask = torch.sigmoid((logit + logistic.double()) / temperature.double())
    (slope,) = torch.autograd.grad(mask.sum(), s)
    return mask.detach(), slope


def slope_in_fp64_logs(prob, logistic, temperature):
    """Return the slope from logarithms, where exp(-|x|) / (1 + exp(-|x|))^2 would underflow."""
    s, a = prob.double(), 1 / temperature.double()
    x = (a * (s.log() - torch.log1p(-s) + logistic.double())).abs()
    return torch.exp(a.log() - x - 2 * torch.log1p(torch.exp(-x)) - s.log() - torch.log1p(-s))


def grid():
    edges = [2.0**-20, 1e-4, 0.003, 0.05, 0.3, 0.5, 0.8, 0.97, 0.999, 1 - 2.0**-20]
    prob = torch.tensor(edges).repeat_interleave(400)
    return prob, logistic_(torch.empty(len(prob)), 1)


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_value_and_slope_agree_with_fp64_autograd(tau):
    prob, logistic = grid()
    temperature = torch.tensor(tau)
    leaf = prob.clone().requires_grad_()
    mask = relaxed_mask(leaf, logistic, temperature)
    (slope,) = torch.autograd.grad(mask.sum(), leaf)
    expected_mask, expected_slope = in_fp64(prob, logistic, temperature)
    torch.testing.assert_close(mask.double(), expected_mask, rtol=2e-4, atol=1e-6)
    # fp64 autograd loses digits where its mask rounds to 1: compare only where it does not.
    sound = expected_mask < 1 - 1e-6
    relative = (slope.double() - expected_slope)[sound].abs() / (expected_slope[sound] + 1e-30)
    assert relative.max() < (1e-4 if tau >= 0.1 else 4e-4)


@pytest.mark.parametrize("tau", TEMPERATURES)
def test_slope_is_accurate_where_the_mask_has_rounded_to_zero_or_one(tau):
    prob, logistic = grid()
    temperature = torch.tensor(tau)
    slope = relaxed_slope(prob, logistic, temperature).double()
    expected = slope_in_fp64_logs(prob, logistic, temperature)
    representable = expected > 1e-36
    assert (slope - expected)[representable].abs().div(expected[representable]).max() < 4e-4
    assert slope.isfinite().all()


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_at_the_ends_the_mask_ignores_the_noise_and_the_slope_is_the_exact_limit(end):
    logistic = torch.linspace(-8, 8, 33)
    prob = torch.full_like(logistic, end).requires_grad_()
    for tau in TEMPERATURES:
        mask = relaxed_mask(prob, logistic, torch.tensor(tau))
        (slope,) = torch.autograd.grad(mask.sum(), prob)
        assert (mask == end).all()
        if tau == 1:
            torch.testing.assert_close(slope, torch.exp(logistic if end == 0 else -logistic))
        else:
            assert (slope == 0).all()


@given(
    prob=st.floats(0, 1, width=32),
    uniform=st.floats(2.0**-24, 1 - 2.0**-24, width=32),
    tau=st.floats(0.03, 1.0),
)
def test_value_and_slope_are_finite(prob, uniform, tau):
    leaf = torch.tensor([prob], requires_grad=True)
    logistic = torch.tensor([uniform]).logit()
    mask = relaxed_mask(leaf, logistic, torch.tensor(tau))
    mask.backward()
    assert 0 <= mask.item() <= 1
    assert leaf.grad.isfinite().all()
    assert leaf.grad.item() >= 0


def test_the_slope_has_mean_one():
    """E[dm/ds] = d E[m]/ds, and E[m] tends to s: at low temperature the mean slope tends to 1."""
    logistic = logistic_(torch.empty(2_000_000), 7)
    slope = relaxed_slope(torch.full_like(logistic, 0.3), logistic, torch.tensor(0.1))
    assert slope.double().mean() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("prob", [0.0, 0.002, 0.05, 0.5, 0.83, 0.999, 1.0])
def test_the_hard_mask_is_bernoulli(prob):
    count = 1_000_000
    logistic = logistic_(torch.empty(count), 3)
    hits = int(bernoulli_mask(torch.full((count,), prob), logistic).sum())
    deviation = math.sqrt(count * prob * (1 - prob))
    assert abs(hits - count * prob) <= 5 * deviation


def test_the_relaxed_mask_tends_to_the_hard_one():
    prob, logistic = grid()
    soft = relaxed_mask(prob, logistic, torch.tensor(1e-4))
    far = (torch.logit(prob) + logistic).abs() > 0.01
    assert torch.equal(soft[far].round(), bernoulli_mask(prob, logistic)[far].float())


def problem(count=4000, dtype=torch.float32):
    """Return weights, gradients, and probabilities at 0, at 1, close to them and between."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(count, generator=generator).to(dtype)
    grad = torch.randn(count, generator=generator).to(dtype)
    prob = torch.rand(count, generator=generator)
    prob[0::8] = 0
    prob[1::8] = 1
    prob[2::8] = 10 ** -(8 * prob[2::8])
    prob[3::8] = 1 - 2.0**-24 * (1 + 100 * prob[3::8]).floor()
    return weight, prob, grad


def drawn(weight, prob, grad, tau, **settings):
    weight, prob = weight.detach().requires_grad_(), prob.detach().requires_grad_()
    out = masked_draw(weight, prob, torch.tensor(KEY), torch.tensor(tau), **settings)
    out.backward(grad)
    return out.detach(), weight.grad, prob.grad


def expected(weight, prob, grad, tau):
    lists = [x.flatten().tolist() for x in (weight, prob, grad)]
    tau = torch.tensor(tau).item()  # rounded to fp32
    return [torch.tensor(x, dtype=torch.float64) for x in reference.masked_draw(*lists, KEY, tau)]


@pytest.mark.parametrize("tau", [1.0, 0.9, 0.5, 0.1, 0.03, 0.001])
def test_the_draw_equals_the_reference(backend, tau):
    given = problem()
    found = drawn(*given, tau)
    # An error of 1e-7 in a logarithm is a relative error of 1e-7 / tau in the power.
    # PyTorch takes several logarithms, the compiled code one.
    tolerance = (4e-6 + 3e-7 / tau) * (10 if backend == "plain" else 1)
    for mine, true in zip(found, expected(*given, tau), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=1e-18)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_straight_through_draw_differs_in_the_gradient_of_the_probability_only(backend, dtype):
    weight, prob, grad = problem(dtype=dtype)
    relaxed = drawn(weight, prob, grad, 0.3)
    out, grad_weight, grad_prob = drawn(weight, prob, grad, 0.3, straight_through=True)
    assert torch.equal(out, relaxed[0])
    assert torch.equal(grad_weight, relaxed[1])
    assert torch.equal(grad_prob, grad.float() * weight.float())


def mostly_closed(open_part, count=5003):
    """Return probabilities that are mostly 0 or 1, in some blocks all: the others are gathered."""
    weight, prob, grad = problem(count)
    generator = torch.Generator().manual_seed(2)
    closed = torch.rand(count, generator=generator) >= open_part
    prob = torch.where(closed, (prob > 0.6).float(), prob)
    prob[1000:2100] = 0
    return weight, prob, grad


@pytest.mark.parametrize("open_part", [0.0, 0.003, 0.05, 0.25])
@pytest.mark.parametrize("tau", [1.0, 0.5, 0.03])
def test_few_open_probabilities_equal_the_reference(backend, open_part, tau):
    given = mostly_closed(open_part)
    found = drawn(*given, tau)
    tolerance = (4e-6 + 3e-7 / tau) * (10 if backend == "plain" else 1)
    for mine, true in zip(found, expected(*given, tau), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=tolerance, atol=1e-18)


@pytest.mark.parametrize("open_part", [0.0, 0.003, 0.05, 0.25, 1.0])
@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gathering_does_not_change_a_bit(dtype, open_part, tau):
    kernels = pytest.importorskip("probmask.core.relaxation_kernels")
    weight, prob, grad = mostly_closed(open_part)
    weight, grad = weight.to(dtype) / 3, grad.to(dtype) / 3
    weight[17], prob[5], prob[6], grad[19] = torch.inf, torch.nan, -0.0, torch.nan
    w, s, g = (x.numpy() for x in (weight, prob, grad))
    places = np.arange(len(w), dtype=np.int32)
    given = 40, np.uint32(KEY[0]), np.uint32(KEY[1]), np.float32(1 / tau)
    found, plain = np.zeros((2, 3, len(w)), w.dtype)
    kernels.forward(w, s, found[0], *given)
    kernels._forward(w, s, places, plain[0], *given)
    ends = np.float32(tau == 1)
    kernels.backward(g, w, s, found[1], found[2], *given, ends)
    kernels._backward(g, w, s, places, plain[1], plain[2], *given, ends)
    number = ~np.isnan(plain)
    assert np.array_equal(number, ~np.isnan(found))
    assert np.array_equal(found[number].view(np.uint8), plain[number].view(np.uint8))


@pytest.mark.parametrize("end", [0.0, 1.0])
@pytest.mark.parametrize("tau", [1.0, 0.9999, 0.001])
def test_at_the_ends_the_mask_is_exact_and_only_temperature_one_has_a_slope(backend, end, tau):
    weight, _, grad = problem()
    out, to_weight, to_prob = drawn(weight, torch.full_like(weight, end), grad, tau)
    assert torch.equal(out, weight * end)
    assert torch.equal(to_weight, grad * end)
    assert (to_prob != 0).all() if tau == 1 else (to_prob == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_another_precision_are_rounded_once(backend, dtype):
    weight, prob, grad = problem(dtype=dtype)
    out, to_weight, to_prob = drawn(weight, prob, grad, 0.5)
    assert (out.dtype, to_weight.dtype, to_prob.dtype) == (dtype, dtype, torch.float32)
    unit = max(torch.finfo(dtype).eps, 5e-6)
    true = expected(weight, prob, grad, 0.5)
    least = 1e-6 if dtype == torch.float16 else 1e-18
    for mine, exact in zip((out, to_weight, to_prob), true, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2 * unit, atol=least)


def test_the_memory_order_is_kept_and_changes_no_value(backend):
    weight, prob, grad = (x[:3456].reshape(16, 24, 3, 3) for x in problem())
    plain = drawn(weight, prob, grad, 0.5)
    laid_out = [x.contiguous(memory_format=torch.channels_last) for x in (weight, prob, grad)]
    for mine, true in zip(drawn(*laid_out, 0.5), plain, strict=True):
        assert torch.equal(mine, true)
        assert mine.is_contiguous(memory_format=torch.channels_last)
    strided = [torch.stack([x, x], -1)[..., 0] for x in (weight, prob, grad)]
    for mine, true in zip(drawn(*strided, 0.5), plain, strict=True):
        assert torch.equal(mine, true)
    expanded = drawn(weight, prob, grad[:1, :1].expand_as(weight), 0.5)
    copied = drawn(weight, prob, grad[:1, :1].expand_as(weight).clone(), 0.5)
    for mine, true in zip(expanded, copied, strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (7, 11)])
def test_any_shape(backend, shape):
    weight, prob = torch.randn(shape), torch.full(shape, 0.5)
    out, to_weight, to_prob = drawn(weight, prob, torch.ones(shape), 0.5)
    assert out.shape == to_weight.shape == to_prob.shape == shape


def test_the_number_of_threads_changes_no_bit():
    given = problem(200_003)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(drawn(*given, 0.3))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_weight_that_is_not_trained_gets_no_gradient(backend):
    weight, prob, _ = problem()
    prob.requires_grad_()
    masked_draw(weight, prob, torch.tensor(KEY), torch.tensor(0.5)).sum().backward()
    assert weight.grad is None
    assert prob.grad is not None


def test_a_nan_probability_gives_nan(backend):
    out, *_ = drawn(torch.ones(3), torch.tensor([0.5, torch.nan, 0.5]), torch.ones(3), 0.5)
    assert out.isnan().tolist() == [False, True, False]


def test_the_backward_pass_saves_no_new_tensor():
    weight, prob, _ = problem()
    weight.requires_grad_(), prob.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        masked_draw(weight, prob, torch.tensor(KEY), torch.tensor(0.5))
    assert {x.data_ptr() for x in kept if x.numel() > 2} == {weight.data_ptr(), prob.data_ptr()}


def test_fake_tensors_get_plain_operations():
    with torch._subclasses.FakeTensorMode():
        weight, prob = torch.empty(8, requires_grad=True), torch.empty(8, requires_grad=True)
        key = torch.zeros(2, dtype=torch.int64)
        masked_draw(weight, prob, key, torch.tensor(0.5)).sum().backward()
        assert prob.grad.shape == (8,)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(backend, default):
    weight, prob = torch.randn(40, requires_grad=True), torch.full((40,), 0.3, requires_grad=True)

    def gradients():
        masked_draw(weight, prob, torch.tensor(KEY), torch.tensor(0.5)).sum().backward()
        found = weight.grad, prob.grad
        weight.grad = prob.grad = None
        return found

    expected = gradients()
    torch.set_default_dtype(default)
    try:
        found = gradients()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)
