"""Methods with a penalty or a threshold but no budget: their own rules and the exact budget."""

import pytest
import torch

from probmask.methods import METHODS
from probmask.methods.l0 import settled_gate
from probmask.methods.sparse_vd import log_alpha
from reference.sparse_training import SparseTraining

RULES = {
    "autoprune": lambda masked, weight: masked.gate > 0,
    "l0": lambda masked, weight: settled_gate(masked.gate) > 0,
    "sparse-vd": lambda masked, weight: log_alpha(weight, masked.gate) < 3,
    "srinivas": lambda masked, weight: masked.gate > 0.5,
    "str": lambda masked, weight: weight.abs() > torch.sigmoid(masked.gate),
}


def with_random_gates(name, **settings):
    """Return a training whose gates have random values."""
    method = METHODS[name](sparsity=0.8, steer=False, freeze_at=None, **settings)
    training = SparseTraining(method, "mlp", steps=6).go()
    torch.manual_seed(0)
    for masked in training.masker.masked:
        if hasattr(masked, "gate"):
            shape = masked.gate.shape
            probs = name == "srinivas"
            masked.gate.data.copy_(torch.rand(shape) if probs else torch.randn(shape) * 3 - 2)
    return training


@pytest.mark.parametrize("name", sorted(RULES))
def test_without_exact_a_method_keeps_the_weights_of_its_own_rule(name):
    training = with_random_gates(name, exact=False)
    expected = [
        RULES[name](masked, weight.detach()).expand_as(weight) if hasattr(masked, "gate") else None
        for masked, weight in zip(training.masker.masked, training.masker.weights, strict=True)
    ]
    final = training.finish()
    kept = 0
    for layer, own in zip(training.summary.layers, expected, strict=True):
        if own is not None:
            assert torch.equal(final[layer.name] != 0, own)
            kept += int(own.sum())
        else:
            kept += layer.size
    assert training.summary.kept == kept != training.masker.keep


@pytest.mark.parametrize("name", sorted(RULES))
def test_with_exact_the_same_gates_give_the_budget(name):
    training = with_random_gates(name)
    training.finish()
    assert training.summary.kept == training.masker.keep
