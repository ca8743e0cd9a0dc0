"""L0: the distribution of hard-concrete gates, the penalty, and its steering."""

import math

import pytest
import torch
from torch import nn

from probmask import InputError
from probmask.core.noise import logistic_
from probmask.methods.l0 import (
    L0,
    SHUT,
    hard_concrete,
    mean_gate,
    open_probability,
    settled_gate,
)
from reference.sparse_training import SparseTraining, assert_exact_budget, assert_resumes


@pytest.mark.parametrize("log_alpha", [-3.0, -0.5, 0.0, 2.0])
def test_the_expected_l0_against_sampling(log_alpha):
    noise = logistic_(torch.empty(200_000), 1)
    z = hard_concrete(torch.tensor(log_alpha), noise)
    assert z.min() >= 0
    assert z.max() <= 1
    expected = float(open_probability(torch.tensor(log_alpha)))
    assert float((z != 0).double().mean()) == pytest.approx(expected, abs=0.005)


def test_gates_are_exactly_zero_and_one_with_positive_probability():
    z = hard_concrete(torch.tensor(0.0), logistic_(torch.empty(10_000), 2))
    assert (z == 0).double().mean() > 0.1
    assert (z == 1).double().mean() > 0.1


def test_the_gate_of_evaluation():
    log_alpha = torch.tensor([-5.0, -2.5, 0.0, 2.5, 5.0])
    expected = [0.0, 0.0, 0.5, 1.0, 1.0]
    assert settled_gate(log_alpha).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("log_alpha", [-4.6, -2.0, 0.0, 2.0])
def test_the_mean_gate_against_sampling(log_alpha):
    z = hard_concrete(torch.tensor(log_alpha), logistic_(torch.empty(200_000), 3))
    found = float(mean_gate(torch.tensor(log_alpha)))
    assert found == pytest.approx(float(z.mean()), abs=0.02)
    assert found > 0


@pytest.mark.parametrize("gates", ["weight", "output"])
def test_the_penalty_is_lambda_times_the_expected_density(gates):
    method = L0(sparsity=0.8, strength=3.0, gates=gates, dense_first=False, dense_last=False)
    training = SparseTraining(method)
    total = size = 0.0
    for masked, weight in training.masker.gated:
        full = masked.gate.detach().expand_as(weight)
        noise = logistic_(torch.empty(400, *weight.shape), 5)
        total += float((hard_concrete(full, noise) != 0).double().mean(0).sum())
        size += weight.numel()
    assert training.sparsifier.penalty().item() == pytest.approx(3.0 * total / size, rel=0.01)


def test_gates_start_at_drop_init_and_stay_within_bounds():
    training = SparseTraining(L0(sparsity=0.8, drop_init=0.2, gate_lr=5.0, freeze_at=None), steps=8)
    gates = torch.cat([masked.gate.detach().flatten() for masked, _ in training.masker.gated])
    assert float(gates.mean()) == pytest.approx(math.log(4), abs=0.01)
    assert 0.005 < float(gates.std()) < 0.02
    training.go()
    gates = torch.cat([masked.gate.detach().flatten() for masked, _ in training.masker.gated])
    assert float(gates.abs().max()) == pytest.approx(math.log(100))


def test_every_update_has_different_noise():
    training = SparseTraining(L0(sparsity=0.8))
    masked = training.masker.gated[0][0]
    first = masked.drawn.clone()
    training.go(1)
    assert not torch.equal(first, masked.drawn)


def test_steering_brings_the_density_to_the_budget():
    training = SparseTraining(L0(sparsity=0.8), steps=600).go()
    assert training.masker.kept_now() == pytest.approx(training.masker.keep, rel=0.25)
    left = SparseTraining(L0(sparsity=0.8, steer=False, strength=0.0), steps=600).go()
    assert left.masker.kept_now() > 2 * training.masker.keep
    assert left.masker.pressure == 1


def test_a_weight_counts_as_kept_if_its_gate_is_open_in_evaluation():
    masker = SparseTraining(L0(sparsity=0.8, dense_first=False, dense_last=False)).masker
    masked, weight = masker.gated[0]
    gates = torch.linspace(-4.6, 4.6, 24)[torch.arange(weight.numel()) % 24].view(weight.shape)
    gates = gates[(gates - SHUT).abs() > 1].repeat(2)[: weight.numel()].view(weight.shape)
    gate = masked.gate.requires_grad_(False).copy_(gates)
    in_use = int((settled_gate(gate) > 0).sum())
    assert 0 < in_use < weight.numel()
    assert float(masked.number_open(weight)) == pytest.approx(in_use, rel=0.02)
    gate.fill_(SHUT - 1)  # closed in evaluation, although open in one draw of seven
    assert float(masked.number_open(weight)) < 0.05 * weight.numel()
    assert float(open_probability(gate).sum()) > 0.13 * weight.numel()


def test_kept_weights_are_multiplied_by_their_gates():
    training = SparseTraining(L0(sparsity=0.7, freeze_at=None), steps=20).go()
    expected = [
        weight.detach() * torch.where(z > 0, z, mean_gate(masked.gate.detach()))
        for masked, weight in training.masker.gated
        for z in [settled_gate(masked.gate.detach())]
    ]
    names = [site.name for site in training.sparsifier.sites]
    gated = [n for n, m in zip(names, training.masker.masked, strict=True) if hasattr(m, "gate")]
    final = training.finish()
    for name, value in zip(gated, expected, strict=True):
        kept = final[name] != 0
        assert torch.equal(final[name][kept], value[kept])


def test_a_gate_per_output_prunes_whole_outputs():
    method = L0(sparsity=0.6, gates="output", dense_first=False, dense_last=False)
    training = SparseTraining(method, "mlp", steps=20)
    assert [tuple(m.gate.shape) for m, _ in training.masker.gated] == [(16, 1), (16, 1), (3, 1)]
    training.finish()
    partial = 0
    for layer in [module for module in training.model if isinstance(module, nn.Linear)]:
        kept = (layer.weight != 0).sum(1)
        partial += int(((kept > 0) & (kept < layer.weight.shape[1])).sum())
    assert partial <= 1


def test_first_and_last_layer_are_dense_if_the_budget_allows():
    low = SparseTraining(L0(sparsity=0.25), "mlp").masker
    assert [hasattr(masked, "gate") for masked in low.masked] == [False, True, False]
    high = SparseTraining(L0(sparsity=0.9), "mlp").masker
    assert all(hasattr(masked, "gate") for masked in high.masked)
    forced = SparseTraining(L0(sparsity=0.8, dense_last=True), "mlp")
    forced.finish()
    assert forced.summary.layers[-1].kept == 48
    with pytest.raises(InputError, match="dense layers alone hold 144 weights, the budget is 40 "):
        SparseTraining(L0(sparsity=0.9, dense_first=True, dense_last=True), "mlp")


def test_kept_weights_are_trained_after_an_early_freeze():
    training = SparseTraining(L0(sparsity=0.8, freeze_at=0.5)).go(7)
    assert training.sparsifier.frozen
    assert training.sparsifier.penalty() == 0
    hard = [masked.mask.clone() for masked in training.masker.masked]
    training.go()
    assert all(map(torch.equal, hard, [masked.mask for masked in training.masker.masked]))


@pytest.mark.parametrize("network", ["depthwise", "unet", "transformer", "tied"])
@pytest.mark.parametrize("gates", ["weight", "output"])
def test_the_budget_is_exact(network, gates):
    assert_exact_budget(L0(sparsity=0.85, gates=gates), network)


def test_it_resumes_bit_for_bit_if_it_is_never_frozen():
    assert_resumes(L0(sparsity=0.8, freeze_at=None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gates": "input"}, r"L0\(gates='input'\): must be one of 'weight', 'output'"),
        ({"strength": -1}, r"L0\(strength=-1\)"),
        ({"drop_init": 0}, r"L0\(drop_init=0\)"),
        ({"dense_first": "yes"}, r"L0\(dense_first='yes'\)"),
        ({"steer": None}, r"L0\(steer=None\)"),
        ({"freeze_at": 2}, r"L0\(freeze_at=2\): must be a fraction of the training, from 0 to 1"),
        ({"gate_lr": 0}, r"L0\(gate_lr=0\)"),
        ({"ramp_begin": 0.7}, "the values must not decrease"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError, match=message):
        L0(sparsity=0.9, **settings)


def test_keeping_nothing_raises():
    with pytest.raises(InputError, match="none of the 400 weights would be kept"):
        SparseTraining(L0(sparsity=0.9999), "mlp")
