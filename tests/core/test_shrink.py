"""Feather's rule: compiled and plain against its definition in fp64."""

import pytest
import torch

from probmask.core.shrink import cubic_shrink

pytestmark = pytest.mark.usefixtures("way")


@pytest.mark.parametrize("theta", [0.0, 1e-30, 0.7, 2.0])
def test_it_is_the_root_of_the_difference_of_cubes(theta):
    torch.manual_seed(0)
    weight = torch.randn(3000) * max(theta, 1e-20)
    theta = torch.tensor(theta)
    active = weight.abs() > theta
    w = weight.double()
    cubes = (w.abs() ** 3 - theta.double() ** 3).clamp_min(0)
    expected = torch.where(active, w.sign() * cubes.pow(1 / 3), 0.0)
    found = cubic_shrink(weight, active, theta)
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=0)
    assert not torch.signbit(found[~active]).any()


def test_ties_at_the_threshold_are_zero_even_if_active():
    weight, every = torch.tensor([0.5, -0.5, 1.0]), torch.ones(3, dtype=torch.bool)
    found = cubic_shrink(weight, every, torch.tensor(0.5))
    assert found[:2].tolist() == [0, 0]
    assert found[2].item() == pytest.approx(0.875 ** (1 / 3))


def test_layouts_and_threads():
    torch.manual_seed(0)
    weight = torch.randn(64, 200, 3, 3)
    active, theta = weight.abs() > 1, torch.tensor(1.0)
    plain = cubic_shrink(weight, active, theta)
    laid_out = weight.contiguous(memory_format=torch.channels_last)
    assert torch.equal(cubic_shrink(laid_out, active, theta), plain)
    wide = cubic_shrink(weight.double(), active, theta)
    torch.testing.assert_close(plain.double(), wide, rtol=3e-6, atol=0)
