"""STR: the threshold's gradient, its decay, and the steering."""

import math

import pytest
import torch

from probmask import InputError
from probmask.core import schedules
from probmask.methods.str_ import STR, decay_factor, soft_threshold
from reference.networks import loss_of
from reference.sparse_training import SparseTraining, assert_exact_budget, assert_resumes


def logits_of(training):
    return torch.stack([masked.gate.detach().clone() for masked in training.masker.masked])


def kept_by_thresholds(training):
    pairs = zip(training.masker.weights, logits_of(training), strict=True)
    return sum(int((weight.detach().abs() > torch.sigmoid(s)).sum()) for weight, s in pairs)


def test_weights_are_shrunk_by_the_threshold():
    weight = torch.tensor([-2.0, -0.3, -0.1, 0.0, 0.1, 0.5])
    shrunk = soft_threshold(weight, torch.tensor(0.2))
    expected = weight.sign() * torch.relu(weight.abs() - 0.2)
    assert torch.allclose(shrunk, expected)
    assert not torch.signbit(shrunk[shrunk == 0]).any()


def test_the_gradients_are_those_of_the_definition():
    training = SparseTraining(STR(sparsity=0.5, s_init=-3.0), "mlp")
    training.gradients(training.batches[0])
    for masked, weight in zip(training.masker.masked, training.masker.weights, strict=True):
        value = weight.detach()
        threshold = torch.sigmoid(masked.gate.detach())
        above = value.abs() > threshold
        assert 0 < above.sum() < above.numel()
        # Above the threshold, w gets the gradient of the effective weight unchanged.
        slope = threshold * (1 - threshold)
        expected = -slope * (value.sign() * weight.grad)[above].sum()
        assert torch.allclose(masked.gate.grad, expected, atol=1e-7)
        assert not weight.grad[~above].any()


def test_the_threshold_gradient_against_finite_differences():
    training = SparseTraining(STR(sparsity=0.5, s_init=-3.0), "mlp")
    training.model.double()
    for masked in training.masker.masked:
        masked.gate.data = masked.gate.data.double()
    inputs, labels = training.batches[0]
    batch = (inputs.double(), labels)
    loss_of(training.model, batch).backward()
    for masked in training.masker.masked:
        with torch.no_grad():
            differences = []
            for move in (1e-6, -2e-6, 1e-6):
                masked.gate += move
                differences.append(loss_of(training.model, batch))
        slope = (differences[0] - differences[1]) / 2e-6
        assert torch.allclose(masked.gate.grad, slope, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("steps", [20, 200])
def test_decay_without_gradients_does_not_depend_on_the_length(steps):
    method = STR(sparsity=0.5, steer=False)
    training = SparseTraining(method, "mlp", steps=steps).go()
    # The gradient of the loss has an effect only above about s = -20.
    twin = method.s_init
    for done in range(steps):
        twin *= math.exp(-2 * 11.5 * schedules.cosine(done / steps) / steps)
        if twin > -30:
            break
    passed = SparseTraining(method, "mlp", steps=steps).go(done + 1)
    assert torch.allclose(logits_of(passed), torch.full((3,), twin), rtol=1e-4)
    assert logits_of(training).max() < 0


def test_pruning_starts_at_the_papers_epoch():
    fractions = torch.linspace(0, 1, 10_001).tolist()
    decayed = 0.0
    for fraction in fractions:
        decayed += 2 * 11.5 * schedules.cosine(fraction) / len(fractions)
        if 3200 * math.exp(-decayed) < 5.6:
            break
    assert 0.25 < fraction < 0.35  # ResNet-50: epoch 30 of 100


def test_the_factor_leaves_exactly_the_wanted_number():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(7, 5, generator=generator) * 0.4, torch.randn(40, generator=generator)]
    weights[1][3] = 0.0
    logits = [torch.tensor(-9.0), torch.tensor(-3.0)]
    always = sum(int((w.abs() >= 0.5).sum()) for w in weights)
    for count in range(always, 74):
        factor = decay_factor(weights, logits, count)
        # At the factor itself the next weight lies on its threshold, up to rounding.
        counts = [
            sum(
                int((w.abs().double() > torch.sigmoid(f * s.double())).sum())
                for w, s in zip(weights, logits, strict=True)
            )
            for f in (factor * (1 - 1e-5), factor * (1 + 1e-5))
        ]
        assert counts[0] <= count <= counts[1] <= count + 1


def test_steering_follows_the_cubic_to_the_budget():
    training = SparseTraining(STR(sparsity=0.9, freeze_at=None), steps=80)
    size = sum(site.size for site in training.sparsifier.sites)
    training.go(20)
    assert kept_by_thresholds(training) == size
    training.go(60)
    wanted = 0.1 * size
    assert abs(kept_by_thresholds(training) - wanted) <= 0.2 * wanted
    training.go()
    assert abs(kept_by_thresholds(training) - wanted) <= 0.1 * wanted


def test_the_kept_weights_are_shrunk():
    training = SparseTraining(STR(sparsity=0.8, freeze_at=None), steps=40).go()
    expected = [
        soft_threshold(weight.detach(), torch.sigmoid(s))
        for weight, s in zip(training.masker.weights, logits_of(training), strict=True)
    ]
    final = training.finish()
    for layer, shrunk in zip(training.summary.layers, expected, strict=True):
        kept = final[layer.name] != 0
        assert kept.any()
        assert torch.equal(final[layer.name][kept], shrunk[kept])


def test_the_kept_weights_are_trained_after_freeze_at():
    training = SparseTraining(STR(sparsity=0.8, freeze_at=0.5), steps=40).go(19)
    assert not training.masker.frozen
    training.go(20)
    assert training.masker.frozen
    masks = [masked.mask.clone() for masked in training.masker.masked]
    before = [weight.detach().clone() for weight in training.masker.weights]
    logits = logits_of(training)
    final = training.go().finish()
    assert torch.equal(logits_of(training), logits)  # thresholds no longer apply
    for layer, mask, weight in zip(training.summary.layers, masks, before, strict=True):
        assert torch.equal(final[layer.name] != 0, mask)
        assert not mask.any() or not torch.equal(final[layer.name][mask], weight[mask])
    assert sum(int(mask.sum()) for mask in masks) == training.masker.keep


def test_one_threshold_for_all_layers():
    training = SparseTraining(STR(sparsity=0.8, scope="global", s_init=-3.0, decay=1.0), steps=20)
    training.go()
    logits = logits_of(training)
    assert (logits == logits[0]).all()
    layers = SparseTraining(STR(sparsity=0.8, s_init=-3.0, decay=1.0), steps=20).go()
    assert len(set(logits_of(layers).tolist())) > 1


def test_thresholds_train_at_the_rate_of_the_weights():
    method = STR(sparsity=0.8, s_init=-3.0, decay=0.0, momentum=0.0, steer=False)
    training = SparseTraining(method, "mlp", lr=0.2, weight_decay=0.0)
    before = logits_of(training)
    training.gradients(training.batches[0])
    grads = torch.stack([masked.gate.grad.clone() for masked in training.masker.masked])
    training.optimizer.step()
    assert torch.allclose(logits_of(training), before - 0.2 * grads)


@pytest.mark.parametrize("network", ["depthwise", "unet", "transformer", "tied"])
@pytest.mark.parametrize("steer", [True, False])
def test_the_budget_is_exact(network, steer):
    assert_exact_budget(STR(sparsity=0.85, steer=steer), network)


def test_it_resumes_bit_for_bit():
    assert_resumes(STR(sparsity=0.8, s_init=-20.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"s_init": 100.0}, r"STR\(s_init=100.0\)"),
        ({"decay": -1.0}, r"STR\(decay=-1.0\)"),
        ({"scope": "row"}, r"STR\(scope='row'\): must be one of 'layer', 'global'"),
        ({"steer": 2}, r"STR\(steer=2\)"),
        ({"momentum": 1.0}, r"STR\(momentum=1.0\)"),
        ({"ramp_begin": 0.7, "ramp_end": 0.3}, "the values must not decrease"),
        ({"sparsity": 90}, "for 90 % pass 0.9"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError, match=message):
        STR(**({"sparsity": 0.9} | settings))


def test_keeping_nothing_raises():
    with pytest.raises(InputError, match="none of the 400 weights would be kept"):
        SparseTraining(STR(sparsity=0.9999), "mlp")
