"""The released arithmetic: equal to its reference, and its two peculiarities."""

import pytest
import torch

from probmask.methods.probmask.official import official_mask, official_noise, official_project_
from reference import official as reference


def test_the_bisection_moves_all_probabilities_away_from_one():
    """While everything is kept, the bisection does not stop early and subtracts 2^-21."""
    probs = [torch.ones(1000, 500), torch.ones(700_000)]
    assert official_project_(probs, 1_200_000) == 2.0**-21
    assert all((prob == 1 - 2.0**-21).all() for prob in probs)


def test_the_slope_is_zero_at_one_and_positive_just_below():
    noise = official_noise(torch.rand(10_000), torch.rand(10_000))
    for tau in (1.0, 0.5, 0.03):
        prob = torch.ones(10_000, requires_grad=True)
        official_mask(prob, noise, torch.tensor(tau)).sum().backward()
        assert (prob.grad == 0).all()
    escaped = torch.full((10_000,), 1 - 2.0**-21, requires_grad=True)
    official_mask(escaped, noise, torch.tensor(1.0)).sum().backward()
    assert (escaped.grad > 0).float().mean() > 0.8


@pytest.mark.parametrize("keep", [0.5, 300.0, 3000.0, 5999.0])
def test_the_projection_is_bit_identical_to_the_reference(keep):
    torch.manual_seed(0)
    probs = [torch.rand(50, 60) * 1.2 - 0.1, torch.rand(3000) ** 3]
    expected = [prob.clone() for prob in probs]
    v = reference.shift(expected, keep)
    assert official_project_(probs, keep) == float(v)
    for prob, other in zip(probs, expected, strict=True):
        assert torch.equal(prob, other.sub_(v).clamp_(0, 1))


def test_an_inactive_budget_changes_nothing():
    prob = torch.full((10,), 0.3)
    assert official_project_([prob], 5.0) == 0
    assert (prob == torch.tensor(0.3)).all()
