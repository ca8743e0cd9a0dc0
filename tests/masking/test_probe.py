"""Ranks that measure on different data before training have the same masks."""

import pytest
import torch

import probmask
from reference import two_ranks
from reference.probing import look


@pytest.mark.slow
def test_all_ranks_have_the_same_masks(tmp_path):
    """The masks equal those of one rank with all data, even if initial weights differ."""
    first, second = two_ranks.run(look, tmp_path)
    for name in ("snip", "grasp"):
        for one, other, alone in zip(first[name][0], second[name][0], first[name][1], strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, alone)
    for one, other in zip(first["other weights"], second["other weights"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_probe_of_no_iterable_raises():
    with pytest.raises(probmask.InputError, match=r"Probe\(batches=3\): expected an iterable"):
        probmask.Probe(3)


@pytest.mark.parametrize("method", [probmask.methods.SNIP, probmask.TiedProbMask])
def test_batches_instead_of_a_probe_raise(method):
    model = torch.nn.Linear(4, 4)
    batches = [(torch.randn(2, 4), torch.tensor([0, 1]))]
    with pytest.raises(probmask.InputError, match=r"attach\(probe=list\): .*Probe\(batches\)"):
        probmask.attach(model, method(sparsity=0.5), total_steps=1, probe=batches)
