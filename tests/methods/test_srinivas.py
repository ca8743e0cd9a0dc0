"""Srinivas: straight-through gradients of Bernoulli gates, the two penalties, two phases."""

import pytest
import torch

import probmask
from probmask import InputError
from probmask.masking.method import Phase
from probmask.methods.srinivas import Srinivas
from reference.networks import loss_of
from reference.sparse_training import SparseTraining, assert_exact_budget


def pairs_of(training):
    """Return masked weight and weight of each site."""
    return list(zip(training.masker.masked, training.masker.weights, strict=True))


def half_open(**settings):
    training = SparseTraining(Srinivas(sparsity=0.6, **settings), "mlp")
    for masked in training.masker.masked:
        masked.gate.data.fill_(0.5)
    training.sparsifier._prepare(0)
    return training


def test_gates_are_drawn_with_their_probability():
    training = half_open()
    drawn = torch.cat([masked.drawn.flatten() for masked in training.masker.masked])
    assert set(drawn.tolist()) == {0.0, 1.0}
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.08)


def test_the_gradient_passes_straight_through_the_draw():
    training = half_open()
    loss_of(training.model, training.batches[0]).backward()
    for masked, weight in pairs_of(training):
        open_ = masked.drawn == 1
        assert not weight.grad[~open_].any()
        # The weight's gradient is that of the effective weight where the gate is open.
        assert torch.allclose(masked.gate.grad[open_], (weight.grad * weight.detach())[open_])
        assert masked.gate.grad[~open_].any()


def test_the_penalty_against_its_formula():
    training = half_open(bimodality=2.0, strength=3.0)
    generator = torch.Generator().manual_seed(0)
    gates = []
    for masked in training.masker.masked:
        masked.gate.data.uniform_(generator=generator)
        gates.append(masked.gate.detach().flatten())
    training.masker.pressure = 5.0
    g = torch.cat(gates).double()
    expected = 2.0 * (g * (1 - g)).mean() + 5.0 * 3.0 * g.mean()
    assert training.sparsifier.penalty().item() == pytest.approx(float(expected), rel=1e-5)
    training.masker.pressure = 0.1
    expected = 0.1 * (2.0 * (g * (1 - g)).mean() + 3.0 * g.mean())
    assert training.sparsifier.penalty().item() == pytest.approx(float(expected), rel=1e-5)


def test_the_first_phase_trains_without_gates():
    method = Srinivas(sparsity=0.7)
    training = SparseTraining(method, steps=12, epochs=4)
    dense = SparseTraining(probmask.Dense(), steps=12, epochs=4)
    training.go(6)
    dense.go(6)
    assert training.masker.first_update == 6
    for masked in training.masker.masked:
        assert (masked.gate == 1).all()
    assert all(map(torch.equal, training.masker.weights, dense.masker.weights))
    training.go()
    assert any((masked.gate != 1).any() for masked in training.masker.masked)


def test_how_epochs_are_divided():
    assert Srinivas(sparsity=0.5).phases(10) == (Phase("train", 5), Phase("gates", 5))
    assert Srinivas(sparsity=0.5, pretrain=0.01).phases(3) == (
        Phase("train", 1),
        Phase("gates", 2),
    )
    assert Srinivas(sparsity=0.5, pretrain=0.9).phases(2) == (Phase("train", 1), Phase("gates", 1))
    assert Srinivas(sparsity=0.5).phases(1) == (Phase("gates", 1),)
    assert Srinivas(sparsity=0.5, pretrain=0).phases(7) == (Phase("gates", 7),)
    on_top = Srinivas(sparsity=0.5, pretrain=0.25, equal_epochs=False)
    assert on_top.phases(10) == (Phase("train", 10), Phase("gates", 30))


def test_gates_stay_probabilities():
    training = SparseTraining(Srinivas(sparsity=0.7, gate_lr=3.0, pretrain=0)).go(5)
    gates = torch.cat([masked.gate.detach().flatten() for masked in training.masker.masked])
    assert gates.min() == 0
    assert gates.max() == 1


def test_steering_brings_the_probabilities_to_the_budget():
    training = SparseTraining(Srinivas(sparsity=0.8), steps=200).go()
    assert training.masker.kept_now() == pytest.approx(training.masker.keep, rel=0.25)


def test_the_most_probable_weights_are_kept():
    training = SparseTraining(Srinivas(sparsity=0.8, freeze_at=None), steps=60).go()
    gates = torch.cat([masked.gate.detach().flatten() for masked in training.masker.masked])
    training.sparsifier.summary()
    hard = torch.cat([masked.mask.flatten() for masked in training.masker.masked])
    assert gates[hard].min() >= gates[~hard].max()


@pytest.mark.parametrize("network", ["depthwise", "unet", "transformer", "tied"])
def test_the_budget_is_exact(network):
    assert_exact_budget(Srinivas(sparsity=0.85), network, epochs=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bimodality": -1}, r"Srinivas\(bimodality=-1\)"),
        ({"strength": "much"}, r"Srinivas\(strength='much'\)"),
        (
            {"pretrain": 1},
            r"Srinivas\(pretrain=1\): must be a fraction of the epochs, from 0 to 0.95",
        ),
        ({"equal_epochs": 0.5}, r"Srinivas\(equal_epochs=0.5\)"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError, match=message):
        Srinivas(sparsity=0.9, **settings)
