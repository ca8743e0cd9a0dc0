"""Shrinkage and tempered gradients: compiled and plain against their definitions in fp64."""

import numpy as np
import pytest
import torch

from probmask.core.shrinkage import (
    Growth,
    bound_pruned_gradient,
    kept_part,
    power_grow,
    power_shrink,
)

HALF = torch.tensor(0.5)

pytestmark = pytest.mark.usefixtures("backend")


def in_double(weight, theta, power):
    """Return the definition in fp64; it is inaccurate very close to the threshold."""
    ratio = (theta.double() / weight.double().abs()).clamp_max(1)
    return weight.double() * (1 - ratio**power).clamp_min(0) ** (1 / power)


@pytest.mark.parametrize("power", [1.0, 1.5, 3.0, 20.0, 100.0])
@pytest.mark.parametrize("theta", [0.0, 1e-30, 0.7, 2.0])
def test_it_equals_its_definition(theta, power):
    torch.manual_seed(0)
    weight = torch.randn(3000) * max(theta, 1e-20)
    theta = torch.tensor(theta)
    active = weight.abs() > theta
    found = power_shrink(weight, active, theta, torch.tensor(power))
    expected = torch.where(active, in_double(weight, theta, power), 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=4e-6, atol=0)
    assert not torch.signbit(found[~active]).any()


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_growth_equals_its_definition(dtype, fraction, power):
    torch.manual_seed(0)
    initial = torch.randn(40, 30, 3, 3).to(dtype)
    weight = (initial + 0.5 * torch.randn(40, 30, 3, 3)).float()
    weight = weight.contiguous(memory_format=torch.channels_last)
    growth = Growth(initial, torch.tensor(fraction), torch.tensor(power))
    found = growth(weight)
    w, start = weight.double(), initial.double()
    rest = (w.abs() ** power - fraction * start.abs() ** power).clamp_min(0)
    expected = w.sign() * rest ** (1 / power)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-3)
    clear = rest > 0.01 * w.abs() ** power  # fp32 has few digits for a small difference
    torch.testing.assert_close(found[clear].double(), expected[clear], rtol=1e-4, atol=0)
    assert bool((found.abs() <= weight.abs() * (1 + 1e-6)).all())
    assert torch.equal(found == 0, rest == 0) or fraction == 1
    assert found.is_contiguous(memory_format=torch.channels_last)
    for theta in (torch.tensor(0.0), torch.tensor(0.8)):
        active = found.abs() > theta
        shrunk = growth.shrink(weight, active, theta)
        torch.testing.assert_close(shrunk, power_shrink(found, active, theta, growth.power))


@pytest.mark.parametrize("power", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("theta", [0.0, 1e-30, 0.7, 2.0])
def test_growing_inverts_shrinking(theta, power):
    torch.manual_seed(0)
    size = torch.cat((torch.zeros(1), torch.rand(3000) * max(2 * theta, 1e-20)))
    theta, power = torch.tensor(theta), torch.tensor(power)
    grown = power_grow(size, theta, power)
    assert grown[0] == theta
    assert bool((grown >= torch.maximum(size, theta) * (1 - 1e-6)).all())
    # If almost all of a weight is cut off, fp32 has no digits left for the rest.
    representable = size > 0.3 * theta
    found = power_shrink(grown, grown > theta, theta, power)
    torch.testing.assert_close(found[representable], size[representable], rtol=1e-3, atol=0)


def test_power_three_is_feather():
    torch.manual_seed(0)
    weight, theta = torch.randn(3000), torch.tensor(0.7)
    active = weight.abs() > theta
    cubes = (weight.double().abs() ** 3 - theta.double() ** 3).clamp_min(0)
    found = power_shrink(weight, active, theta, torch.tensor(3.0))
    expected = torch.where(active, weight.sign() * cubes.pow(1 / 3), 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=4e-6, atol=0)


def test_it_is_accurate_close_to_the_threshold():
    theta = torch.tensor(0.37)
    weight = theta * (1 + torch.logspace(-6.5, -2, 400))
    every = torch.ones(400, dtype=torch.bool)
    for power in (1.0, 3.0, 30.0):
        found = power_shrink(weight, every, theta, torch.tensor(power))
        excess = (weight.double() - theta.double()) / weight.double()
        part = -torch.expm1(power * torch.log1p(-excess))
        torch.testing.assert_close(
            found.double(), weight.double() * part ** (1 / power), rtol=4e-6, atol=0
        )


def test_cube_roots_are_accurate():
    numba = pytest.importorskip("numba")
    from probmask.core.vector_math import cube_root

    @numba.njit
    def roots(x, out):
        for i in range(len(x)):
            out[i] = cube_root(x[i])

    bits = np.arange(0x00800000, 0x7F800000, 2003, dtype=np.int32)  # a sample of all normal numbers
    x = bits.view(np.float32)
    found = np.empty_like(x)
    roots(x, found)
    np.testing.assert_allclose(found.astype(np.float64), np.cbrt(x.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.02, 0.3, 0.62, 0.64, 1.0])
@pytest.mark.parametrize("theta", [0.0, 0.2])
def test_gathering_does_not_change_a_bit(part, theta):
    kernels = pytest.importorskip("probmask.core.shrinkage_kernels")
    torch.manual_seed(0)
    weight, active = torch.randn(5003), torch.rand(5003) < part
    given = weight.numpy(), active.numpy(), np.float32(theta), np.float32(2.5)
    found, plain = np.zeros((2, 5003), np.float32)
    kernels.power(*given, found)
    kernels._power(*given, plain)
    assert np.array_equal(found.view(np.int32), plain.view(np.int32))


def test_ties_at_the_threshold_are_zero_even_if_active():
    weight, every = torch.tensor([0.5, -0.5, 1.0]), torch.ones(3, dtype=torch.bool)
    found = power_shrink(weight, every, torch.tensor(0.5), torch.tensor(3.0))
    assert found[:2].tolist() == [0, 0]
    assert found[2].item() == pytest.approx(0.875 ** (1 / 3))


@pytest.mark.parametrize("power", [3.0, 7.0])
def test_memory_order_and_threads(power):
    torch.manual_seed(0)
    weight = torch.randn(64, 200, 3, 3)
    active, theta, power = weight.abs() > 1, torch.tensor(1.0), torch.tensor(power)
    plain = power_shrink(weight, active, theta, power)
    laid_out = weight.contiguous(memory_format=torch.channels_last)
    for mask in (active, active.contiguous(memory_format=torch.channels_last)):
        found = power_shrink(laid_out, mask, theta, power)
        assert torch.equal(found, plain)
    assert found.is_contiguous(memory_format=torch.channels_last)
    wide = power_shrink(weight.double(), active, theta, power)
    torch.testing.assert_close(plain.double(), wide, rtol=4e-6, atol=0)


@pytest.mark.parametrize("power", [1.0, 3.0, 100.0])
def test_a_threshold_of_zero_gives_the_weight_itself(power):
    torch.manual_seed(0)
    weight, every = torch.randn(3000), torch.ones(3000, dtype=torch.bool)
    assert torch.equal(power_shrink(weight, every, torch.tensor(0.0), torch.tensor(power)), weight)


def test_the_kept_part_has_the_hard_and_the_soft_limit():
    weight, theta = torch.tensor([0.1, -0.5, 0.6, -4.0]), torch.tensor(0.5)
    hard = kept_part(weight, theta, torch.tensor(500.0))
    assert hard.tolist() == pytest.approx([0, 0, 1, 1], abs=1e-6)
    soft = kept_part(weight, theta, torch.tensor(1.0))
    assert soft.tolist() == pytest.approx([0, 0, 1 / 6, 7 / 8])
    assert kept_part(weight, torch.tensor(0.0), torch.tensor(3.0)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("size", [(7,), (300, 40, 3, 3)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_a_pruned_weight_is_clamped_and_scaled(size, layout, dtype):
    torch.manual_seed(0)
    grad = torch.randn(size, dtype=dtype)
    grad.view(-1)[:3] = torch.tensor([1e6, -1e6, 0.0])
    active = torch.rand(size) < 0.3
    active.view(-1)[:3] = False
    if len(size) == 4:
        grad = grad.contiguous(memory_format=layout)
    given = grad.clone()
    rms = grad[active].double().square().mean().sqrt().item()
    expected = torch.where(active, grad, 0.5 * grad.clamp(-3 * rms, 3 * rms))
    for laid_out in (active, torch.empty_like(grad, dtype=torch.bool).copy_(active)):
        found = bound_pruned_gradient(grad, laid_out, HALF, most=3.0)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert torch.equal(grad, given)


def test_no_active_weight_gives_zero_and_nan_stays_nan():
    grad = torch.tensor([1.0, -2.0])
    assert bound_pruned_gradient(grad, torch.tensor([False, False]), HALF, most=3.0).tolist() == [
        0,
        0,
    ]
    grad = torch.tensor([1.0, torch.nan, 3.0])
    found = bound_pruned_gradient(grad, torch.tensor([True, False, False]), HALF, most=2.0)
    assert found[1].isnan()
    assert found[::2].tolist() == [1, 1]


def test_a_tempered_gradient_has_a_derivative():
    grad = torch.tensor([1.0, 0.5, 9.0], requires_grad=True)
    found = bound_pruned_gradient(grad, torch.tensor([True, False, False]), HALF, most=2.0)
    (slope,) = torch.autograd.grad(found[1], grad)
    assert slope.tolist() == [0, 0.5, 0]
