"""DNW: per-layer top-k, straight-through gradients, weights that return."""

import pytest
import torch

from probmask import InputError
from probmask.methods.dnw import DNW
from reference.masked_run import SIZES, MaskedRun, assert_exact_budget, effective_gradients


def test_each_layer_computes_with_its_largest_weights_at_every_update():
    run = MaskedRun(DNW(sparsity=0.75))
    for until in range(1, 24):
        for weight, effective in zip(run.weights, run.effective(), strict=True):
            keep = weight.numel() // 4
            order = weight.detach().abs().flatten().sort(descending=True).values
            expected = torch.where(weight.detach().abs() >= order[keep - 1], weight.detach(), 0.0)
            assert torch.equal(effective.detach(), expected)
        run.go(until)


def test_the_gradient_of_the_effective_weight_goes_to_all_weights():
    run = MaskedRun(DNW(sparsity=0.75))
    effective, gradients = effective_gradients(run)
    for weight, seen, gradient in zip(run.weights, effective, gradients, strict=True):
        assert torch.equal(weight.grad, gradient)
        assert gradient[seen == 0].abs().max() > 0


def test_a_weight_that_has_grown_returns():
    run = MaskedRun(DNW(sparsity=0.75))
    weight, masked = run.weights[0], run.masked[0]
    outside = (~masked.active).nonzero()[0]
    with torch.no_grad():
        weight[tuple(outside)] = 10.0
    run.go(1)
    assert masked.active[tuple(outside)]
    assert int(masked.active.sum()) == weight.numel() // 4


def test_every_layer_has_the_same_fraction():
    kept = [layer.kept for layer in assert_exact_budget(DNW(sparsity=0.75)).layers]
    assert kept == [size // 4 for size in SIZES]


def test_dense_layers_leave_less_for_the_others():
    for allocation in ("uniform", "er", "erk", "global"):
        method = DNW(sparsity=0.5, dense_first=True, dense_last=True, allocation=allocation)
        kept = [layer.kept for layer in assert_exact_budget(method).layers]
        assert (kept[0], kept[-1]) == (SIZES[0], SIZES[-1])
        assert sum(kept) == sum(SIZES) // 2


def test_dense_layers_that_exceed_the_budget_raise():
    with pytest.raises(InputError, match=r"DNW\(sparsity=0\.9\): the dense layers alone hold 72"):
        MaskedRun(DNW(sparsity=0.9, dense_first=True))


@pytest.mark.parametrize("allocation", ["uniform", "er", "erk", "global"])
def test_every_allocation_ends_at_the_budget(allocation):
    assert_exact_budget(DNW(sparsity=0.83, allocation=allocation))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"allocation": "even"}, "must be one of 'uniform', 'er', 'erk', 'global'"),
        ({"dense_first": "no"}, "DNW(dense_first='no'): must be one of True, False."),
        ({"sparsity": 90}, "DNW(sparsity=90): sparsity is the fraction pruned"),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        DNW(**({"sparsity": 0.9} | settings))
    assert text in str(caught.value)


def test_keeping_nothing_raises():
    with pytest.raises(InputError, match=r"DNW\(sparsity=0\.9999\): none of the 304 weights would"):
        MaskedRun(DNW(sparsity=0.9999))
