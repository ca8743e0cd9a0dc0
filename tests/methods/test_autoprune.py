"""AutoPrune: the gradients it defines, and that the sign of a decides."""

import pytest
import torch
from torch import nn

from probmask import InputError
from probmask.methods.autoprune import AutoPrune, slope, surrogate
from reference.networks import build, loss_of
from reference.sparse_training import SparseTraining, assert_exact_budget


def pairs_of(training):
    """Return masked weight and weight of each site."""
    return list(zip(training.masker.masked, training.masker.weights, strict=True))


def half_in(kind="softplus"):
    training = SparseTraining(AutoPrune(sparsity=0.6, surrogate=kind), "mlp")
    generator = torch.Generator().manual_seed(0)
    for masked in training.masker.masked:
        masked.gate.data.normal_(generator=generator)
    return training


@pytest.mark.parametrize("kind", ["softplus", "leaky"])
def test_the_gradients_are_those_of_the_definition(kind):
    training = half_in(kind)
    loss_of(training.model, training.batches[0]).backward()
    twin = build("mlp")
    layers = [module for module in twin if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for layer, (masked, weight) in zip(layers, pairs_of(training), strict=True):
            layer.weight.copy_(weight * (masked.gate > 0))
    loss_of(twin, training.batches[0]).backward()
    for layer, (masked, weight) in zip(layers, pairs_of(training), strict=True):
        effective = layer.weight.grad
        a = masked.gate.detach()
        inside = a > 0
        assert torch.allclose(weight.grad, effective * inside, atol=1e-7)
        h = torch.sigmoid(a) if kind == "softplus" else torch.where(inside, 1.0, 0.01)
        expected = effective * weight.detach().sign() * h
        assert torch.allclose(masked.gate.grad, expected, atol=1e-7)
        assert masked.gate.grad[~inside].any()  # pruned weights can return


@pytest.mark.parametrize("kind", ["softplus", "leaky"])
def test_the_slope_is_that_of_the_surrogate(kind):
    a = torch.tensor([-2.0, -0.1, 0.3, 4.0], requires_grad=True)
    surrogate(a, kind).sum().backward()
    assert torch.allclose(a.grad, slope(a.detach(), kind))


def test_the_penalty_against_its_formula():
    training = half_in()
    training.masker.pressure = 2.0
    a = torch.cat([masked.gate.detach().flatten() for masked in training.masker.masked])
    expected = 2.0 * torch.nn.functional.softplus(a.double()).mean()
    assert training.sparsifier.penalty().item() == pytest.approx(float(expected), rel=1e-5)


def test_every_weight_is_kept_at_the_start():
    training = SparseTraining(AutoPrune(sparsity=0.6), "mlp")
    assert training.masker.kept_now() == training.masker.size


def test_steering_brings_the_count_to_the_budget():
    training = SparseTraining(AutoPrune(sparsity=0.8), steps=200).go()
    assert training.masker.kept_now() == pytest.approx(training.masker.keep, rel=0.25)


def test_the_weights_with_the_largest_a_are_kept():
    training = SparseTraining(AutoPrune(sparsity=0.8, freeze_at=None), steps=60).go()
    a = torch.cat([masked.gate.detach().flatten() for masked in training.masker.masked])
    training.sparsifier.summary()
    hard = torch.cat([masked.mask.flatten() for masked in training.masker.masked])
    assert a[hard].min() >= a[~hard].max()


@pytest.mark.parametrize("network", ["depthwise", "unet", "transformer", "tied"])
def test_the_budget_is_exact(network):
    assert_exact_budget(AutoPrune(sparsity=0.85), network)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"surrogate": "relu"},
            r"AutoPrune\(surrogate='relu'\): must be one of 'softplus', 'leaky'",
        ),
        ({"strength": -1}, r"AutoPrune\(strength=-1\)"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError, match=message):
        AutoPrune(sparsity=0.9, **settings)
