"""Every method trains weights that FSDP2 divides among ranks, or says at `attach` why it cannot."""

import pytest
import torch

from contracts.training import (
    KEEP,
    NAMES,
    SOME,
    Run,
    batches,
    train_all_sharded,
    train_some_sharded,
)
from reference import two_ranks

# These must work; the others may refuse.
SUPPORTED = [
    "ac-dc",
    "dense",
    "dnw",
    "feather",
    "gmp",
    "granet",
    "lr-rewind",
    "magnitude",
    "movement",
    "optg",
    "pbw",
    "probmask",
    "probmask paper",
    "probmask-tied",
    "random",
    "rigl",
    "set",
    "spartan",
    "st3",
    "str",
]


# The largest update of each method on four layers: a histogram of one selection over all layers has
# 2¹¹ + 1 counters, that of a selection in each layer 2⁸ + 1 per layer. docs/scaling.md has this
# table for any number of layers.
LAYERS = 4
ALL, EACH = 8 * (2**11 + 1), 8 * (2**8 + 1) * LAYERS
PER_LAYER = 8 * LAYERS  # bytes of a number per layer
MESSAGES = {
    "ac-dc": [*[ALL] * 3, PER_LAYER],
    "dense": [],
    "dnw": [*[EACH] * 4, PER_LAYER],
    "feather": [8, *[ALL] * 3, PER_LAYER, 4 * PER_LAYER],
    "gmp": [*[EACH] * 4, *[PER_LAYER] * 3],
    "granet": [*[ALL] * 27, *[8] * 12, *[PER_LAYER] * 3],
    "lr-rewind": [*[ALL] * 3, *[EACH] * 4, *[PER_LAYER] * 3],
    "magnitude": [*[ALL] * 3, *[PER_LAYER] * 3],
    "movement": [*[EACH] * 8, PER_LAYER],
    "optg": [*[ALL] * 6, PER_LAYER],
    "pbw": [*[ALL] * 3, *[PER_LAYER] * 3],
    "probmask-tied": [*[ALL] * 3, *[PER_LAYER] * 2, 2 * PER_LAYER, 4 * PER_LAYER],
    "random": [],
    "rigl": [*[ALL] * 24, *[8] * 12, PER_LAYER],
    "set": [*[ALL] * 48, *[8] * 28, *[24] * 4, *[PER_LAYER] * 2],
    "st3": [8, *[ALL] * 3, PER_LAYER, 4 * PER_LAYER, *[384] * 3],
    "str": [*[ALL] * 9, *[PER_LAYER] * 2],
}
# The number of steps of a projection, and of Newton's method, depends on the values: limits.
MOST_MESSAGES = {"probmask": 9 + 9, "probmask paper": 8, "spartan": 16}


# Training magnifies rounding errors of 1e-7 where its rules are steep: a ReLU near 0, the cubic
# threshold of Feather and TiedProbMask, the rescaled channels of ST-3.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.run(train_all_sharded, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return two_ranks.run(train_some_sharded, tmp_path_factory.mktemp("four"), ranks=4)


def test_every_other_method_refuses_with_a_reason(ranks):
    for found in ranks:
        refused = sorted(name for name in NAMES if isinstance(found[name], str))
        assert refused == sorted(set(NAMES) - set(SUPPORTED))
        for name in refused:
            assert "it cannot train weights that fully_shard has divided: " in found[name]


@pytest.mark.parametrize("name", SUPPORTED)
def test_two_ranks_end_where_one_process_ends(ranks, name):
    check_same_as_alone(ranks, name)


@pytest.mark.parametrize("name", SOME)
def test_four_ranks_end_where_one_process_ends(four_ranks, name):
    """The first dimensions of the weights are not all divisible by four."""
    check_same_as_alone(four_ranks, name)


@pytest.mark.parametrize("name", SUPPORTED)
def test_sharded_training_resumes_bit_for_bit(ranks, name):
    for found in ranks:
        for key, value in found[name]["final"].items():
            assert torch.equal(found[name]["resumed"][key], value), key


@pytest.mark.parametrize("name", SUPPORTED)
def test_an_update_sends_the_messages_that_the_docs_list(ranks, name):
    """No message has a size that grows with the number of weights, and all ranks send the same."""
    first, second = (found[name]["sent"] for found in ranks)
    assert first == second
    largest = max(first, key=sum)
    if name in MESSAGES:
        assert sorted(largest) == sorted(MESSAGES[name])
    else:
        assert len(largest) <= MOST_MESSAGES[name]
        assert sum(largest) <= 6 * ALL + 2**16
    assert max(map(max, filter(None, first)), default=0) <= 2**16


def check_same_as_alone(ranks, name):
    """Sums are rounded in another order, so weights agree to rounding; masks agree exactly."""
    alone = Run(name, steps=16, data=batches(16))
    alone.go(8)
    masks, metrics = alone.sparsifier.masks, alone.sparsifier.metrics()
    expected = alone.finish()
    for found in ranks:
        result = found[name]
        assert result["kept"] == (KEEP if name != "dense" else alone.summary.kept)
        assert result["metrics"] == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for site, mask in masks.items():
            assert torch.equal(result["masks"][site], mask), site
        for key, value in expected.items():
            assert torch.equal(result["final"][key] != 0, value != 0), key
            assert torch.allclose(result["final"][key], value, atol=TOLERANCE), key
