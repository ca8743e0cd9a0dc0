import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probmask.core.noise import logistic_
from probmask.core.relaxation import bernoulli_mask, relaxed_mask, relaxed_slope

TEMPERATURES = [1.0, 0.9, 0.5, 0.3, 0.1, 0.03]


def in_fp64(prob, logistic, temperature):
    """Mask and slope by plain autograd in double precision, for 0 < s < 1."""
    s = prob.double().requires_grad_()
    logit = s.log() - torch.log1p(-s)
    mask = torch.sigmoid((logit + logistic.double()) / temperature.double())
    # The slope in logarithms: sigmoid'(x) = exp(-|x|) / (1 + exp(-|x|))^2 underflows otherwise.
    (slope,) = torch.autograd.grad(mask.sum(), s)
    return mask.detach(), slope


def slope_in_fp64_logs(prob, logistic, temperature):
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
    # fp64 autograd itself loses digits where its mask rounds to 1: judge it where it does not.
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
def test_nothing_is_ever_nan_or_infinite(prob, uniform, tau):
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
