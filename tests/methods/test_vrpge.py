"""VRPGE: the mean of its estimator, its budget in weights, whole channels."""

import itertools
import math

import pytest
import torch
from torch import nn

from probmask import InputError
from probmask.methods.vrpge import VRPGE, policy_gradient
from reference.networks import loss_of
from reference.sparse_training import SparseTraining, assert_exact_budget


def test_the_estimator_averages_to_the_gradient_of_the_expected_loss():
    prob = torch.tensor([0.2, 0.5, 0.7], dtype=torch.float64)
    every = itertools.product((0, 1), repeat=3)
    masks = [torch.tensor(bits, dtype=torch.float64) for bits in every]
    losses = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def weight(mask, s):
        return torch.where(mask == 1, s, 1 - s).prod()

    estimate = torch.zeros(3, dtype=torch.float64)
    for (one, m), (other, n) in itertools.product(enumerate(masks), repeat=2):
        pair = torch.stack([losses[one], losses[other]])
        estimate += weight(m, prob) * weight(n, prob) * policy_gradient(pair, [m, n], prob)
    s = prob.clone().requires_grad_()
    sum(loss * weight(mask, s) for loss, mask in zip(losses, masks, strict=True)).backward()
    # The released code divides the score by the square root of s (1 - s).
    assert torch.allclose(estimate, s.grad * (prob * (1 - prob)).sqrt())


def test_the_estimator_for_two_masks_by_hand():
    prob = torch.tensor([0.5, 0.2])
    masks = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])]
    found = policy_gradient(torch.tensor([3.0, 1.0]), masks, prob)
    assert torch.allclose(found, torch.tensor([1.0 * (0.5 + 0.5) / 0.5, 0.0]))


def test_certain_channels_get_no_infinite_gradient():
    prob = torch.tensor([0.0, 1.0])
    masks = [torch.tensor([0.0, 1.0])] * 2
    assert not policy_gradient(torch.tensor([3.0, 1.0]), masks, prob).any()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_gives_no_gradient(broken):
    masks = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
    gradient = policy_gradient(torch.tensor([3.0, broken]), masks, torch.tensor([0.4, 0.6]))
    assert torch.equal(gradient, torch.zeros(2))


def test_probabilities_learn_from_the_losses_of_their_masks():
    training = SparseTraining(VRPGE(sparsity=0.6), "mlp")
    optimizer = training.optimizer
    optimizer.zero_grad()
    losses, masks = [], []
    for share in training.sparsifier.draws():
        masks.append([masked.drawn.clone() for masked, _ in training.masker.gated])
        loss = loss_of(training.model, training.batches[0])
        (share * loss).backward()
        losses.append(loss.detach())
        training.sparsifier.observe(loss)
    assert len(losses) == 2
    assert any(not torch.equal(*pair) for pair in zip(*masks, strict=True))
    training.sparsifier._act_on_gradients()
    for index, (masked, _) in enumerate(training.masker.gated):
        expected = policy_gradient(torch.stack(losses), [m[index] for m in masks], masked.gate)
        assert torch.equal(masked.gate.grad, expected)


def test_the_budget_of_the_probabilities_is_in_weights():
    training = SparseTraining(VRPGE(sparsity=0.7, freeze_at=None), steps=8)
    for done in range(9):
        expected = sum(m.gate.mean().item() * w.numel() for m, w in training.masker.gated)
        assert expected <= training.masker.left * (1 + 1e-5)
        training.go(done)


def test_masks_are_per_output_channel():
    training = SparseTraining(VRPGE(sparsity=0.6, dense_last=False), "unet")
    shapes = {
        name: tuple(masked.gate.shape)
        for name, masked in zip(training.masker.names, training.masker.masked, strict=True)
    }
    assert shapes["middle.0.weight"] == (16, 1, 1, 1)
    assert shapes["up.weight"] == (1, 8, 1, 1)


def test_whole_channels_are_kept_in_order_and_some_weights_of_the_last():
    training = SparseTraining(VRPGE(sparsity=0.55, dense_last=False), "mlp", steps=20)
    training.go()
    training.finish()
    partial = 0
    for layer in [module for module in training.model if isinstance(module, nn.Linear)]:
        kept = (layer.weight != 0).sum(1)
        partial += int(((kept > 0) & (kept < layer.weight.shape[1])).sum())
    assert partial <= 1


def test_channels_of_equal_probability_are_ordered_by_magnitude():
    training = SparseTraining(VRPGE(sparsity=0.5, dense_last=False), "mlp")
    training.sparsifier.summary()
    sizes = torch.cat([weight.detach().abs().mean(1) for weight in training.masker.weights])
    kept = torch.cat([masked.mask.all(1) for masked in training.masker.masked])
    none = torch.cat([~masked.mask.any(1) for masked in training.masker.masked])
    assert sizes[kept].min() > sizes[none].max()
    assert int((~kept & ~none).sum()) <= 1


def test_the_classifier_is_dense_if_the_budget_allows():
    low = SparseTraining(VRPGE(sparsity=0.5), "mlp")
    low.finish()
    assert low.summary.layers[-1].kept == 48
    high = SparseTraining(VRPGE(sparsity=0.9), "mlp").masker
    assert len(high.gated) == 3
    with pytest.raises(InputError, match="dense layers alone hold 48 weights, the budget is 40 "):
        SparseTraining(VRPGE(sparsity=0.9, dense_last=True), "mlp")


def test_frozen_masks_need_one_pass_per_update():
    training = SparseTraining(VRPGE(sparsity=0.6, freeze_at=0.5)).go(6)
    assert training.sparsifier.draw_count == 2
    training.go(7)
    assert training.sparsifier.frozen
    assert training.sparsifier.draw_count == 1
    training.go()


def test_missing_losses_raise():
    training = SparseTraining(VRPGE(sparsity=0.6), "mlp")
    for share in training.sparsifier.draws():
        (share * loss_of(training.model, training.batches[0])).backward()
    with pytest.raises(InputError, match=r"sparsifier.observe\(loss\)"):
        training.optimizer.step()


@pytest.mark.parametrize("network", ["depthwise", "unet", "transformer", "tied"])
def test_the_budget_is_exact(network):
    assert_exact_budget(VRPGE(sparsity=0.85), network)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"draws": 1},
            r"VRPGE\(draws=1\): must be a number of masks .* at least 2",
        ),
        ({"prob_lr": 0}, r"VRPGE\(prob_lr=0\)"),
        ({"freeze_at": 2}, r"VRPGE\(freeze_at=2\)"),
        ({"dense_last": 1.5}, r"VRPGE\(dense_last=1.5\)"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError, match=message):
        VRPGE(sparsity=0.9, **settings)
