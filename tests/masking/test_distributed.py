"""Two ranks have different noise but the same network."""

import re

import pytest
import torch

import probmask
import probmask.methods
from reference import two_ranks
from reference.networks import build, make_batches

# Running statistics differ between ranks until the next forward pass broadcasts them.
OWN = ("running_mean", "running_var")
CASES = ["common seed", "own seeds", "tied", "tied, frozen", "attached to DDP"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.run(two_ranks.train_both_ways, tmp_path_factory.mktemp("ranks"))


def different(one, other):
    assert one.keys() == other.keys()
    return [
        name
        for name, value in one.items()
        if not name.endswith(OWN) and not torch.equal(value, other[name])
    ]


@pytest.mark.parametrize("case", ["common seed", "own seeds"])
def test_each_rank_draws_its_own_noise(ranks, case):
    assert not torch.equal(ranks[0][case]["noise"], ranks[1][case]["noise"])


@pytest.mark.parametrize("case", CASES)
def test_probabilities_and_weights_are_the_same_on_both_ranks(ranks, case):
    one, other = (rank[case] for rank in ranks)
    assert any(name.endswith(":prob") for name in one["state"]) == (not case.startswith("tied"))
    assert different(one["state"], other["state"]) == []


def test_training_continues_after_the_freeze(ranks):
    size = 36 + 432
    for case, first in (("common seed", 10), ("tied", 14), ("tied, frozen", 9)):
        for rank in ranks:
            assert rank[case]["frozen"] == [count >= first for count in range(1, 15)]
            assert sum(rank[case]["kept"]) == size - round(0.7 * size)


@pytest.mark.parametrize("case", CASES)
def test_the_final_network_is_the_same_on_both_ranks(ranks, case):
    """This holds for a sampled mask too, and without a seed passed by the user."""
    assert ranks[0][case]["kept"] == ranks[1][case]["kept"]
    assert different(ranks[0][case]["final"], ranks[1][case]["final"]) == []


def test_a_model_wrapped_in_ddp_before_is_trained_as_one_wrapped_after(ranks):
    """Accelerate wraps the model first. The names of the sites are those of the plain model."""
    for rank in ranks:
        assert different(rank["attached to DDP"]["final"], rank["common seed"]["final"]) == []


def test_ranks_that_differ_are_found(tmp_path):
    """One weight of rank 1 was changed by 1e-6. Of two ranks, either may be named."""
    errors = two_ranks.run(two_ranks.disagree, tmp_path)
    assert errors[0] == errors[1]
    assert re.match("after 1 updates, rank [01] differs from the other ranks in ", errors[0])
    assert "conv" in errors[0] or "weight" in errors[0]


def test_batchnorm_statistics_are_those_of_the_batches_of_all_ranks(tmp_path):
    one, other = two_ranks.run(two_ranks.share_statistics, tmp_path)
    model = build("conv", seed=0)
    sparsifier = probmask.attach(
        model,
        probmask.methods.Magnitude(sparsity=0.7),
        total_steps=14,
        seed=3,
    )
    with pytest.warns(probmask.errors.EarlyEndWarning):
        sparsifier.finalize(data=make_batches("conv", 4, seed=7))
    assert one
    for name, value in model.named_buffers():
        assert torch.equal(one[name], other[name])
        assert torch.allclose(one[name].double(), value.double(), rtol=1e-6, atol=1e-7)
