"""Methods without a budget of their own, left to their own rules."""

import pytest
import torch

from probmask.core.hard_concrete import settled_gate
from probmask.core.variational import log_alpha
from probmask.methods import METHODS
from reference.sparse_training import SparseTraining

RULES = {
    "autoprune": lambda mask, weight: mask.gate > 0,
    "l0": lambda mask, weight: settled_gate(mask.gate) > 0,
    "sparse-vd": lambda mask, weight: log_alpha(weight, mask.gate) < 3,
    "srinivas": lambda mask, weight: mask.gate > 0.5,
    "str": lambda mask, weight: weight.abs() > torch.sigmoid(mask.gate),
}


def untied(name, **settings):
    """A training that stands where gates have gone different ways."""
    method = METHODS[name](sparsity=0.8, steer=False, freeze_at=None, **settings)
    training = SparseTraining(method, "mlp", steps=6).go()
    torch.manual_seed(0)
    for mask in training.masker.masks:
        if hasattr(mask, "gate"):
            values = torch.rand(mask.gate.shape) if name == "srinivas" else None
            if values is None:
                values = torch.randn(mask.gate.shape) * 3 - 2
            mask.gate.data.copy_(values)
    return training


@pytest.mark.parametrize("name", sorted(RULES))
def test_left_to_itself_a_method_keeps_what_its_own_rule_says(name):
    training = untied(name, exact=False)
    expected = [
        RULES[name](mask, weight.detach()).expand_as(weight) if hasattr(mask, "gate") else None
        for mask, weight in zip(training.masker.masks, training.masker.weights, strict=True)
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
def test_otherwise_the_budget_is_exact_from_the_same_gates(name):
    training = untied(name)
    training.finish()
    assert training.summary.kept == training.masker.keep
