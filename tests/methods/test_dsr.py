"""DSR: the adaptive threshold, and growth in proportion to the surviving weights."""

import pytest
import torch

from probmask import InputError
from probmask.masking.optimizers import WeightOptimizers
from probmask.methods.dsr import DSR, adapted
from reference.exchange_run import Run, assert_budget_throughout, assert_resumes, batches


def test_large_exchanges_keep_the_number_constant_and_resume_exactly():
    assert_budget_throughout(DSR, threshold=0.1, exchange_fraction=0.5)
    assert_resumes(DSR, threshold=0.1, exchange_fraction=0.5)


def test_the_threshold_doubles_or_halves_outside_the_tolerance():
    assert adapted(1.0, 89, 100, 0.1) == 2
    assert adapted(1.0, 90, 100, 0.1) == 1
    assert adapted(1.0, 110, 100, 0.1) == 1
    assert adapted(1.0, 111, 100, 0.1) == 0.5


def exchange_by_hand(**settings):
    """Two layers of interest: one with large weights, one with small; H = 0.1."""
    run = Run(DSR(sparsity=0.9, threshold=0.1, **settings))
    with torch.no_grad():
        for index, weight in enumerate(run.masker.weights):
            weight.copy_(torch.where(run.active[index], 0.2, 0.0))
        small = run.masker.weights[2]
        places = run.active[2].nonzero()[:50]
        small[tuple(places.T)] = 0.05
    before = run.active
    run.masker._exchange(1, WeightOptimizers(()))
    return run, before


def test_an_exchange_by_hand():
    run, before = exchange_by_hand()
    dropped = 50
    survived = [int(b.sum()) - (dropped if i == 2 else 0) for i, b in enumerate(before)]
    assert sum(run.counts) == 186
    for index, count in enumerate(run.counts):
        assert abs(count - survived[index] - dropped * survived[index] / sum(survived)) < 1
        stay = before[index] & (run.weights[index] == 0.2)
        assert int(stay.sum()) == survived[index]
        assert not run.weights[index][run.active[index] & ~stay].any()
    assert run.masker.threshold == 0.05  # 50 dropped, 18.6 wanted


def test_too_few_dropped_raises_the_threshold():
    run, _ = exchange_by_hand(exchange_fraction=0.9)
    assert run.masker.threshold == 0.2
    assert run.sparsifier.metrics()["threshold"] == 0.2


def test_a_layer_never_loses_all_weights():
    run = Run(DSR(sparsity=0.9, threshold=1e6))
    best = [int(w.abs().argmax()) for w in run.weights]
    run.masker._exchange(1, WeightOptimizers(()))
    for index, weight in enumerate(run.weights):
        assert weight.flatten().nonzero().flatten().tolist() == [best[index]]
    assert sum(run.counts) == 186


def test_dense_layers_stay_dense():
    run = Run(DSR(sparsity=0.8, threshold=0.2, dense_first=True, dense_last=True))
    run.train(batches())
    assert (run.counts[0], run.counts[3]) == (144, 36)
    assert sum(run.counts) == 372


def test_the_threshold_adapts_to_the_number_of_weights_to_exchange():
    run = Run(DSR(sparsity=0.5, update_every=1), total_steps=100)
    dropped = []
    for batch in batches(12):
        before = run.active
        run.train([batch])
        dropped.append(
            sum(int((old & ~new).sum()) for old, new in zip(before, run.active, strict=True))
        )
    assert dropped[0] < 40
    assert max(dropped) > 60


def test_exchanges_become_rarer_and_stop():
    run = Run(DSR(sparsity=0.8, threshold=0.05, update_every=1, stop_at=0.9))
    # From 12.5, 40 and 70 % of 40 updates on: every second, fourth, eighth of them.
    expected = [1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32]
    assert [update + 1 for update in run.exchanges(batches())] == expected
    assert Run(DSR(sparsity=0.8), total_steps=800).masker.every == 10
    assert Run(DSR(sparsity=0.8), total_steps=10**6).masker.every == 100


def test_grown_weights_start_without_momentum():
    run = Run(DSR(sparsity=0.8, threshold=0.1, update_every=1)).train(batches(1))
    for index, (weight, active) in enumerate(zip(run.weights, run.active, strict=True)):
        grown = active & (weight == 0)
        assert grown.any()
        assert not run.momentum(index)[grown].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 0}, "DSR(threshold=0): must be a magnitude, at least 1e-30."),
        ({"tolerance": -1}, "DSR(tolerance=-1): must be a relative deviation, from 0 to 1."),
        (
            {"exchange_fraction": 20_000},
            "DSR(exchange_fraction=20000): must be a fraction of the kept weights, from 0 to 1.",
        ),
        ({"stop_at": 190}, "DSR(stop_at=190): must be a fraction of the training, from 0 to 1."),
        (
            {"update_every": 0},
            "DSR(update_every=0): must be a number of updates, an integer of at least 1.",
        ),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError) as error:
        DSR(sparsity=0.9, **settings)
    assert str(error.value) == message
