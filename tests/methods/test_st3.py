"""ST-3: the quantile as threshold, soft thresholding, rescaled channels, the freeze."""

import math

import pytest
import torch

from probmask import InputError
from probmask.core import schedules
from probmask.methods.st3 import ST3, rescaled_shrink
from reference.masked_run import (
    SIZE,
    MaskedRun,
    assert_exact_budget,
    assert_resumes,
    effective_gradients,
    joined,
    magnitudes,
)


def twin(weight, threshold, *, rescale, channels=0):
    """Return the definition, computed entry by entry."""
    result = torch.zeros_like(weight)
    moved = weight.movedim(channels, 0)
    for o, channel in enumerate(moved):
        kept = channel[channel.abs() > threshold].abs().sum().item() / channel.numel()
        whole = channel.abs().sum().item() / channel.numel()
        scale = 1.01 / ((kept + 1e-6) / (whole + 1e-6) + 0.01) if rescale else 1.0
        shrunk = scale * (channel - channel.sign() * threshold)
        result.movedim(channels, 0)[o] = torch.where(channel.abs() > threshold, shrunk, 0.0)
    return result


@pytest.mark.parametrize("rescale", [True, False])
def test_the_effective_weight_is_the_definition(rescale):
    run = MaskedRun(ST3(sparsity=0.8, rescale=rescale, freeze_at=None)).go(16)
    threshold = torch.quantile(magnitudes(run).double(), 1 - 61 / SIZE).item()
    rows = zip(run.weights, run.masked, run.effective(), strict=True)
    for index, (weight, masked, effective) in enumerate(rows):
        assert masked.threshold.item() == pytest.approx(threshold, rel=1e-5)
        channels = 1 if index == 2 else 0  # a transposed convolution
        expected = twin(weight.detach(), threshold, rescale=rescale, channels=channels)
        torch.testing.assert_close(effective.detach(), expected, rtol=1e-4, atol=1e-7)


def test_every_weight_gets_the_gradient_without_the_scale():
    run = MaskedRun(ST3(sparsity=0.8)).go(14)
    effective, gradients = effective_gradients(run)
    assert any(bool((seen == 0).any()) for seen in effective)
    for weight, gradient in zip(run.weights, gradients, strict=True):
        assert torch.equal(weight.grad, gradient)


def test_the_budget_falls_cubically_from_the_dense_network():
    run = MaskedRun(ST3(sparsity=0.8, ramp_begin=0.25, ramp_end=0.75, freeze_at=None))
    for done in range(24):
        share = schedules.kept_fraction(done / 24, 61 / SIZE, begin=0.25, end=0.75)
        assert int(joined(masked.active for masked in run.masked).sum()) == round(share * SIZE)
        if done <= 6:
            assert all(e is w for e, w in zip(run.effective(), run.weights, strict=True))
        run.go(done + 1)


def test_sigma_compares_across_layers_by_their_dimensions():
    run = MaskedRun(ST3(sparsity=0.8, sigma=True, freeze_at=None)).go(16)
    scales = [math.sqrt(sum(weight.shape)) for weight in run.weights]
    scaled = [w.detach().abs() * s for w, s in zip(run.weights, scales, strict=True)]
    order = joined(scaled).sort(descending=True).values
    for masked, value, scale in zip(run.masked, scaled, scales, strict=True):
        assert torch.equal(masked.active, value >= order[60])
        assert order[61] <= masked.threshold.item() * scale * (1 + 1e-6)
        assert masked.threshold.item() * scale <= order[60] * (1 + 1e-6)


def test_evaluation_and_the_end_have_the_effective_weights_of_the_final_budget():
    run = MaskedRun(ST3(sparsity=0.8)).go(6)  # far from the end of the ramp
    run.model.eval()
    threshold = torch.quantile(magnitudes(run).double(), 1 - 61 / SIZE).item()
    evaluated = [weight.detach().clone() for weight in run.effective()]
    expected = twin(run.weights[0].detach(), threshold, rescale=True)
    torch.testing.assert_close(evaluated[0], expected, rtol=1e-4, atol=1e-7)
    run.model.train()
    assert (
        int(joined(masked.active for masked in run.masked).sum()) > 61
    )  # training is not affected
    run.sparsifier.finalize()
    for weight, seen in zip(run.weights, evaluated, strict=True):
        assert torch.equal(weight, seen)


def test_after_the_freeze_the_effective_weights_are_trained():
    run = MaskedRun(ST3(sparsity=0.8, freeze_at=0.5))
    run.go(11)
    assert not run.sparsifier.frozen
    run.go(12)
    assert run.sparsifier.frozen
    hard = [masked.mask.clone() for masked in run.masked]
    assert sum(int(mask.sum()) for mask in hard) == 61
    for effective, weight in zip(run.effective(), run.weights, strict=True):
        assert torch.equal(effective, weight)  # no weight is shrunk twice
    run.go().sparsifier.finalize()
    for mask, weight in zip(hard, run.weights, strict=True):
        assert torch.equal(weight != 0, mask)


def test_each_entry_of_a_vector_is_a_channel():
    weight, active = torch.tensor([1.0, -2.0, 0.1]), torch.tensor([True, True, False])
    effective = rescaled_shrink(weight, active, torch.tensor(0.5), axis=0)
    assert effective.tolist() == pytest.approx([0.5, -1.5, 0.0])


def test_with_sigma_it_ends_at_the_budget_and_resumes():
    method = ST3(sparsity=0.8, sigma=True)
    assert_exact_budget(method)
    assert_resumes(method)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ramp_begin": 5}, "ST3(ramp_begin=5): must be a fraction of the training, from 0 to 1."),
        (
            {"ramp_end": None},
            "must be a fraction of the training, from 0 to 1; None is not a number.",
        ),
        ({"freeze_at": 2}, "ST3(freeze_at=2): must be a fraction of the training, from 0 to 1."),
        ({"ramp_begin": 0.6}, "ST3(ramp_begin=0.6, ramp_end=0.47): the values must not decrease"),
        ({"sigma": "yes"}, "ST3(sigma='yes'): must be one of True, False."),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        ST3(**({"sparsity": 0.9} | settings))
    assert text in str(caught.value)
