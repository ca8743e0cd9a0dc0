"""Feather: the cubic threshold and the gradient of pruned weights."""

import pytest
import torch

from probmask import InputError
from probmask.methods.feather import Feather, cubic_shrink
from reference.masked_run import SIZE, MaskedRun, effective_gradients, joined, magnitudes


def twin(weight, threshold):
    """Return the definition in fp64."""
    cubed = (weight.double().abs() ** 3 - threshold**3).clamp_min(0)
    return (weight.double().sign() * cubed ** (1 / 3)).float()


def test_the_effective_weight_is_the_definition():
    run = MaskedRun(Feather(sparsity=0.8)).go(16)
    threshold = torch.quantile(magnitudes(run).double(), 1 - 61 / SIZE).item()
    for weight, effective in zip(run.weights, run.effective(), strict=True):
        expected = twin(weight.detach(), threshold)
        torch.testing.assert_close(effective.detach(), expected, rtol=1e-3, atol=1e-6)


def test_small_weights_do_not_underflow():
    weight = torch.tensor([2e-20, -3e-20, 1e-20, 0.0])
    active = torch.tensor([True, True, False, False])
    effective = cubic_shrink(weight, active, torch.tensor(1e-20))
    expected = torch.tensor([7 ** (1 / 3), -(26 ** (1 / 3)), 0.0, 0.0])
    torch.testing.assert_close(effective * 1e20, expected)


@pytest.mark.parametrize(
    ("sparsity", "outside", "factor"), [(0.8, None, 1.0), (0.96, None, 0.5), (0.8, 0.25, 0.25)]
)
def test_pruned_weights_get_a_fraction_of_the_gradient(sparsity, outside, factor):
    run = MaskedRun(Feather(sparsity=sparsity, outside=outside)).go(16)
    _, gradients = effective_gradients(run)
    for weight, masked, gradient in zip(run.weights, run.masked, gradients, strict=True):
        expected = torch.where(masked.active, gradient, factor * gradient)
        assert torch.equal(weight.grad, expected)


def test_the_ramp_takes_the_first_half():
    run = MaskedRun(Feather(sparsity=0.8))
    counts = []
    for done in range(24):
        counts.append(int(joined(masked.active for masked in run.masked).sum()))
        run.go(done + 1)
    assert counts[0] == SIZE
    assert counts[:12] == sorted(counts[:12], reverse=True)
    assert counts[3] == round(61 + (SIZE - 61) * 0.75**3)
    assert set(counts[12:]) == {61}


def test_the_weights_at_the_end_are_the_effective_ones():
    run = MaskedRun(Feather(sparsity=0.8)).go()
    expected = [weight.detach().clone() for weight in run.effective()]
    run.sparsifier.finalize()
    for weight, seen in zip(run.weights, expected, strict=True):
        assert torch.equal(weight, seen)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"ramp_end": 50},
            "Feather(ramp_end=50): must be a fraction of the training, from 0 to 1.",
        ),
        ({"outside": -1}, "Feather(outside=-1): must be a fraction of the gradient, from 0 to 1."),
        (
            {"ramp_begin": 0.6},
            "Feather(ramp_begin=0.6, ramp_end=0.5): the values must not decrease",
        ),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        Feather(**({"sparsity": 0.9} | settings))
    assert text in str(caught.value)
