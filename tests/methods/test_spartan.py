"""Spartan: the soft top-k, its gradient against autograd, the schedules, the fixed mask."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from probmask import InputError
from probmask.masking.optimizers import WeightOptimizers
from probmask.methods.spartan import Spartan, soft_top
from reference.masked_run import SIZE, MaskedRun, effective_gradients, joined, magnitudes, network

KEEP = 61


def bisected(values, keep, sharpness):
    """Return the soft top-k by plain bisection, in fp64."""
    low, high = -1e4, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        total = torch.sigmoid(sharpness * values - middle).sum()
        low, high = (middle, high) if total > keep else (low, middle)
    return torch.sigmoid(sharpness * values - low)


def differentiable(values, keep, sharpness):
    """Return the soft top-k for autograd: a Newton step from the solution has its derivative."""
    start = bisected(values.detach(), keep, sharpness)
    dual = (sharpness * values.detach() - torch.logit(start)).mean()
    mask = torch.sigmoid(sharpness * values - dual)
    slope = (mask * (1 - mask)).sum().detach()
    return torch.sigmoid(sharpness * values - (dual + (mask.sum() - keep) / slope))


# The soft top-k


@pytest.mark.parametrize("sharpness", [1e-3, 1.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("keep", [1, 40, 299])
def test_the_soft_mask_has_the_requested_sum_and_equals_bisection(keep, sharpness):
    torch.manual_seed(3)
    values = [torch.randn(10, 20).abs(), torch.randn(100).abs() * 0.1]
    masks = soft_top(values, keep, sharpness)
    assert joined(masks).double().sum().item() == pytest.approx(keep, rel=1e-6)
    if sharpness < 1e5:
        expected = bisected(joined(values).double(), keep, sharpness).float()
        torch.testing.assert_close(joined(masks), expected, rtol=1e-5, atol=1e-7)


def test_the_soft_mask_of_equal_values_and_of_all_values():
    assert soft_top([torch.zeros(8)], 2, 10.0)[0].tolist() == pytest.approx([0.25] * 8)
    assert soft_top([torch.rand(8)], 8, 10.0)[0].tolist() == [1.0] * 8


# Training


def test_the_effective_weight_is_the_definition():
    run = MaskedRun(Spartan(sparsity=0.8)).go(12)
    values = magnitudes(run).double()
    soft = bisected(values, KEEP, run.masker._sharpness)
    cut = values.sort(descending=True).values[KEEP - 1]
    expected = torch.where(values >= cut, joined(run.weights) * soft, 0.0).float()
    effective = joined(run.effective())
    torch.testing.assert_close(effective, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("stop", [2, 12])
def test_the_gradient_is_that_of_autograd(stop):
    """It passes through the product and the solution of Σ m = K, and ignores the cut."""
    run = MaskedRun(Spartan(sparsity=0.8, sharpness_end=40.0)).go(stop)
    run.backward()
    with torch.no_grad():
        run.masker.after_backward(run.sparsifier.now, WeightOptimizers([run.optimizer]))

    twin = network().double()
    weights = [weight.detach().double().requires_grad_() for weight in run.weights]
    values = torch.cat([weight.abs().flatten() for weight in weights])
    keep = int(joined(masked.active for masked in run.masked).sum())
    assert KEEP <= keep < SIZE
    soft = differentiable(values, keep, run.masker._sharpness)
    parts = soft.split([weight.numel() for weight in weights])
    named = {}
    for masked, weight, name, part in zip(
        run.masked, weights, run.masker.names, parts, strict=True
    ):
        product = weight * part.view(weight.shape)
        named[name] = product - torch.where(masked.active, 0.0, product).detach()
    biases = {
        name: value.detach().double()
        for name, value in run.model.state_dict().items()
        if name.endswith("bias")
    }
    images, labels = run.data[0]
    logits = functional_call(twin, named | biases, (images.double(),))
    functional.cross_entropy(logits, labels).backward()
    for weight, expected in zip(run.weights, weights, strict=True):
        torch.testing.assert_close(weight.grad, expected.grad.float(), rtol=1e-3, atol=1e-6)


def test_budget_and_sharpness_change_linearly():
    run = MaskedRun(Spartan(sparsity=0.8, ramp_end=0.25, freeze_at=0.75))
    for done in range(24):
        kept = SIZE - round(min(1.0, done / 6) * (SIZE - KEEP))
        assert int(joined(masked.active for masked in run.masked).sum()) == kept
        sharpness = run.sparsifier.metrics()["sharpness"]
        assert sharpness == pytest.approx(1 + 9 * min(1.0, done / 18))
        if done == 0:
            assert all(e is w for e, w in zip(run.effective(), run.weights, strict=True))
        run.go(done + 1)


def test_the_fixed_mask_keeps_its_soft_values_and_stops_other_gradients():
    run = MaskedRun(Spartan(sparsity=0.8, freeze_at=0.5)).go(12)
    soft = [masked.soft.clone() for masked in run.masked]
    active = [masked.active.clone() for masked in run.masked]
    assert 0 < joined(soft).min() < joined(soft).max() < 1
    _, gradients = effective_gradients(run)
    for weight, gradient, m, a in zip(run.weights, gradients, soft, active, strict=True):
        assert torch.equal(weight.grad, torch.where(a, gradient * m, 0.0))
    run.go()
    last = [weight.detach().clone() for weight in run.weights]
    run.sparsifier.finalize()
    for weight, before, m, a in zip(run.weights, last, soft, active, strict=True):
        assert torch.equal(weight, torch.where(a, before * m, 0.0))


def test_evaluation_uses_the_final_budget_and_does_not_change_training():
    run, other = (MaskedRun(Spartan(sparsity=0.8)).go(3) for _ in range(2))
    run.model.eval()
    effective = joined(run.effective())
    assert int(effective.count_nonzero()) == KEEP
    run.model.train()
    for one in (run, other):
        one.go()
    assert torch.equal(joined(run.weights), joined(other.weights))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"ramp_end": 20},
            "Spartan(ramp_end=20): must be a fraction of the training, from 0 to 1.",
        ),
        (
            {"freeze_at": None},
            "must be a fraction of the training, from 0 to 1; None is not a number.",
        ),
        (
            {"sharpness_end": 0},
            "Spartan(sharpness_end=0): must be a sharpness, from 1e-06 to 1e+09.",
        ),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        Spartan(**({"sparsity": 0.9} | settings))
    assert text in str(caught.value)
