"""Edge-popup: the straight-through gradient of its scores, and fixed weights."""

import math

import pytest
import torch
from torch import nn

import probmask
from probmask import InputError
from probmask.methods.edge_popup import EdgePopup
from reference.networks import build
from reference.sparse_training import SparseTraining, assert_exact_budget


def test_the_gradient_passes_straight_through_to_the_scores():
    training = SparseTraining(EdgePopup(sparsity=0.6), "mlp")
    training.gradients(training.batches[0])
    # A copy with the effective weights as plain parameters gives their gradients.
    twin = build("mlp")
    layers = [module for module in twin if isinstance(module, nn.Linear)]
    with torch.no_grad():
        for layer, masked, weight in zip(
            layers, training.masker.masked, training.masker.weights, strict=True
        ):
            layer.weight.copy_(weight * masked.drawn)
    inputs, labels = training.batches[0]
    nn.functional.cross_entropy(twin(inputs), labels).backward()
    for layer, masked, weight in zip(
        layers, training.masker.masked, training.masker.weights, strict=True
    ):
        expected = layer.weight.grad * weight * masked.gate.detach().sign()
        assert torch.allclose(masked.gate.grad, expected, atol=1e-7)
        assert masked.gate.grad.count_nonzero() > masked.drawn.sum()  # also for inactive weights


def test_the_mask_is_the_top_of_each_layer():
    training = SparseTraining(EdgePopup(sparsity=0.7), "mlp").go(3)
    counts = [int(masked.drawn.sum()) for masked in training.masker.masked]
    sizes = [weight.numel() for weight in training.masker.weights]
    assert all(abs(count - 0.3 * size) <= 1 for count, size in zip(counts, sizes, strict=True))
    for masked in training.masker.masked:
        scores = masked.gate.detach().abs()
        assert scores[masked.drawn == 1].min() > scores[masked.drawn == 0].max()


def test_one_budget_for_all_layers():
    training = SparseTraining(EdgePopup(sparsity=0.7, scope="global"), "depthwise").go(3)
    chosen = [masked.gate.detach().abs()[masked.drawn == 1] for masked in training.masker.masked]
    others = [masked.gate.detach().abs()[masked.drawn == 0] for masked in training.masker.masked]
    assert torch.cat(chosen).min() > torch.cat(others).max()


def test_weights_are_not_trained_but_biases_are():
    training = SparseTraining(EdgePopup(sparsity=0.6), "mlp")
    weights = [weight.detach().clone() for weight in training.masker.weights]
    bias = training.model[0].bias.detach().clone()
    scores = [masked.gate.detach().clone() for masked in training.masker.masked]
    training.go()
    assert all(map(torch.equal, weights, training.masker.weights))
    assert not torch.equal(bias, training.model[0].bias)
    assert not any(map(torch.equal, scores, [masked.gate for masked in training.masker.masked]))
    assert not any(weight.requires_grad for weight in training.masker.weights)


def test_scores_are_updated_by_sgd():
    method = EdgePopup(sparsity=0.6, momentum=0.0, weight_decay=0.01)
    training = SparseTraining(method, "mlp", lr=0.3)
    before = [masked.gate.detach().clone() for masked in training.masker.masked]
    training.gradients(training.batches[0])
    grads = [masked.gate.grad.clone() for masked in training.masker.masked]
    training.optimizer.step()
    for masked, start, grad in zip(training.masker.masked, before, grads, strict=True):
        assert torch.allclose(masked.gate, start - 0.3 * (grad + 0.01 * start))


def test_scores_start_uniform_within_the_root_of_the_fan_in():
    training = SparseTraining(EdgePopup(sparsity=0.6), "depthwise")
    for masked, weight in zip(training.masker.masked, training.masker.weights, strict=True):
        bound = 1 / math.sqrt(weight[0].numel())
        assert 0.5 * bound < masked.gate.abs().max() <= bound
    twin = SparseTraining(EdgePopup(sparsity=0.6), "depthwise", seed=4)
    assert not torch.equal(training.masker.masked[0].gate, twin.masker.masked[0].gate)


def test_signed_constants_are_scaled_by_the_kept_fraction():
    training = SparseTraining(EdgePopup(sparsity=0.75, weights="signed", scaled=True), "mlp")
    normal = SparseTraining(EdgePopup(sparsity=0.75), "mlp")
    for weight, drawn, kept in zip(
        training.masker.weights, normal.masker.weights, training.masker.kept_fractions, strict=True
    ):
        assert kept == pytest.approx(0.25, abs=0.01)
        constant = math.sqrt(2 / weight.shape[1] / kept)
        assert torch.allclose(weight, drawn.sign() * constant)


def test_given_weights_do_not_change():
    training = SparseTraining(EdgePopup(sparsity=0.6, weights="given"), "mlp")
    assert torch.equal(training.masker.weights[0], build("mlp")[0].weight)


@pytest.mark.parametrize("network", ["depthwise", "unet", "transformer", "tied"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_budget_is_exact(network, scope):
    assert_exact_budget(EdgePopup(sparsity=0.85, scope=scope), network)


def test_sparsity_zero_keeps_the_random_network():
    training = SparseTraining(EdgePopup(sparsity=0.0), "mlp")
    weights = [weight.detach().clone() for weight in training.masker.weights]
    final = training.finish()
    assert torch.equal(final["0.weight"], weights[0])


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_weight_without_fan_in_needs_given_weights():
    with pytest.raises(InputError, match=r"scale has 1 dimension.*weights='given'"):
        probmask.attach(Scale(), EdgePopup(sparsity=0.5), total_steps=4, include=["scale"])
    method = EdgePopup(sparsity=0.5, weights="given")
    probmask.attach(Scale(), method, total_steps=4, include=["scale"]).finalize()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "xavier"}, r"EdgePopup\(weights='xavier'\): must be one of"),
        ({"scaled": 2}, r"EdgePopup\(scaled=2\)"),
        ({"scope": "row"}, r"EdgePopup\(scope='row'\)"),
        ({"momentum": 1}, r"EdgePopup\(momentum=1\)"),
        ({"weight_decay": -1}, r"EdgePopup\(weight_decay=-1\)"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError, match=message):
        EdgePopup(sparsity=0.9, **settings)
