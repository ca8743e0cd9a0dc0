"""Zeros that something fills after a network is finished are noticed where it is used next."""

import copy
import pickle

import pytest
import torch
from torch import nn

import probmask


def finished():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=1).finalize()
    return model


def fill(model):
    """Change a weight as peft merges adapters: no hook and no version counter notices it."""
    model[0].weight.data += 1.0
    return model


def uses(directory):
    example = torch.zeros(1, 8)
    return {
        "save": lambda model: probmask.save(model, directory / "x.safetensors", overwrite=True),
        "freeze_masks": probmask.freeze_masks,
        "runtime.compile": lambda model: probmask.runtime.compile(model, example, layers="dense"),
    }


@pytest.mark.parametrize("caller", uses(None))
def test_filled_zeros_are_reported(tmp_path, caller):
    use = uses(tmp_path)[caller]
    use(finished())
    kept = int(finished()[0].weight.count_nonzero())
    text = rf"{caller}\(model\): .* nonzero: 0.weight \(64 nonzero weights instead of {kept}\)\. "
    for model in (finished(), pickle.loads(pickle.dumps(finished()))):
        with pytest.warns(probmask.RefilledWeightsWarning, match=text):
            use(fill(model))


def test_a_network_that_was_never_finished_or_is_pruned_again_has_no_warning(tmp_path):
    use = uses(tmp_path)["save"]
    use(fill(nn.Sequential(nn.Linear(8, 8))))
    use(fill(copy.deepcopy(finished())))
    model = fill(finished())
    probmask.attach(model, probmask.TiedProbMask(sparsity=0.1), total_steps=1).finalize()
    use(model)
