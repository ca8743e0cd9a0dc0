"""SET: drop the weights nearest to zero of either sign, grow at random."""

import pytest
import torch

from probmask import InputError
from probmask.masking.optimizers import WeightOptimizers
from probmask.methods.set import SET, without_nearest_zero
from reference.exchange_run import Run, assert_budget_throughout, batches


def test_the_number_of_weights_is_constant():
    assert_budget_throughout(SET, update_every=3)


def test_the_set_by_hand():
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4, -0.05, -0.6, -0.7, 0.01, 0.0, 0.0])
    active = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1, 1]).bool()
    # Half of four positives: 0.1, 0.2. Half of three negatives, rounded down: -0.05. One zero.
    left = without_nearest_zero(weight, active, 0.5)
    assert left.nonzero().flatten().tolist() == [2, 3, 5, 6, 8]
    assert torch.equal(without_nearest_zero(weight, active, 0.0), active)
    assert not without_nearest_zero(weight, active, 1.0).any()


def test_survivors_keep_momentum_and_grown_weights_start_from_zero():
    run = Run(SET(sparsity=0.8, update_every=4, drop_fraction=0.5)).train(batches(3))
    before, counts = run.active, run.counts
    run.train(batches(1, seed=9))
    assert run.counts == counts
    for index, (old, new, weight) in enumerate(zip(before, run.active, run.weights, strict=True)):
        grown = new & (weight == 0)
        assert bool((new & ~old).any())
        assert not bool((new & ~old & ~grown).any())
        assert int(grown.sum()) >= counts[index] // 2 - 1
        assert not run.momentum(index)[grown].any()
        assert run.momentum(index)[new & ~grown].any()


def test_growth_is_random_not_by_gradient():
    one, other = (Run(SET(sparsity=0.8, update_every=4), seed=seed) for seed in (1, 2))
    other.activate(one.active)
    with torch.no_grad():
        for a, b in zip(one.masker.weights, other.masker.weights, strict=True):
            b.copy_(a)
    one.train(batches(4))
    other.train(batches(4))
    assert any(not torch.equal(a, b) for a, b in zip(one.active, other.active, strict=True))


def test_exchanges_come_after_every_epoch_but_the_last():
    twentieth = list(range(1, 39, 2))
    assert Run(SET(sparsity=0.8)).exchanges(batches()) == twentieth
    assert Run(SET(sparsity=0.8), total_steps=1000).masker.every == 4
    assert Run(SET(sparsity=0.8, update_every=10)).exchanges(batches()) == [9, 19, 29]
    assert Run(SET(sparsity=0.8, update_every=10, stop_at=0.5)).exchanges(batches()) == [9]


def test_dense_layers_stay_dense():
    run = Run(SET(sparsity=0.8, dense_first=True, dense_last=True, drop_fraction=1.0))
    plain = run.weights[0]
    run.masker._exchange(1, WeightOptimizers(()))
    assert torch.equal(run.weights[0], plain)
    assert run.counts[0] == 144
    assert run.counts[3] == 36
    assert not run.weights[2].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allocation": "all"}, "SET(allocation='all'): must be one of 'uniform', 'er', 'erk'."),
        (
            {"drop_fraction": -0.1},
            "SET(drop_fraction=-0.1): must be a fraction of a layer, from 0 to 1.",
        ),
        ({"stop_at": 2}, "SET(stop_at=2): must be a fraction of the training, from 0 to 1."),
        (
            {"update_every": 1.5},
            "SET(update_every=1.5): must be a number of updates, an integer of at least 1.",
        ),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError) as error:
        SET(sparsity=0.9, **settings)
    assert str(error.value) == message
