"""Sparse momentum: growth by the momentum of layers and weights."""

import math

import pytest
import torch

from probmask import InputError
from probmask.core.allocation import largest_remainder
from probmask.masking.optimizers import WeightOptimizers
from probmask.methods.snfs import SNFS, growth
from reference.exchange_run import Run, assert_budget_throughout, assert_resumes, batches
from reference.networks import loss_of, sgd


def without_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_number_of_weights_is_constant():
    assert_budget_throughout(SNFS, update_every=3)


def test_tracked_momentum_resumes():
    assert_resumes(SNFS, make_optimizer=without_momentum, update_every=3)


def test_the_momentum_of_inactive_weights_is_that_of_the_dense_gradient():
    run = Run(SNFS(sparsity=0.8, update_every=100), weight_decay=0.0)
    expected = [torch.zeros_like(w) for w in run.weights]
    for batch in batches(5):
        run.optimizer.zero_grad()
        loss_of(run.model, batch).backward()
        for total, weight in zip(expected, run.masker.weights, strict=True):
            total.mul_(0.9).add_(weight.grad)
        run.optimizer.step()
    for index, (total, active) in enumerate(zip(expected, run.active, strict=True)):
        assert torch.equal(run.momentum(index), total)
        assert total[~active].any()
        assert not run.weights[index][~active].any()
        assert run.masker.own[index] is None


def test_momentum_is_tracked_for_optimizers_without_it():
    run = Run(SNFS(sparsity=0.8, update_every=100), make=without_momentum)
    expected = [torch.zeros_like(w) for w in run.weights]
    for batch in batches(5):
        run.optimizer.zero_grad()
        loss_of(run.model, batch).backward()
        for total, weight in zip(expected, run.masker.weights, strict=True):
            total.mul_(0.9).add_(weight.grad)
        run.optimizer.step()
    for total, own in zip(expected, run.masker.own, strict=True):
        assert torch.equal(own, total)


@pytest.mark.parametrize("make", [sgd, without_momentum])
def test_an_exchange_is_what_sorting_gives(make):
    run = Run(SNFS(sparsity=0.8, update_every=4), make=make).train(batches(3))
    twin = Run(SNFS(sparsity=0.8, update_every=100), make=make).train(batches(4))
    active = twin.active
    weights = [w.abs().flatten().tolist() for w in twin.weights]
    momenta = [(twin.momentum(i) if make is sgd else twin.masker.own[i]).abs() for i in range(4)]
    run.train([batches(4)[3]])
    part = 0.005 + 0.495 * (1 + math.cos(math.pi * 4 / 40)) / 2
    shares = [float(v[a].mean()) for v, a in zip(momenta, active, strict=True)]
    left = []
    for layer, on in zip(weights, active, strict=True):
        places = sorted(on.flatten().nonzero().flatten().tolist(), key=lambda j: (layer[j], -j))
        left.append(set(places[math.ceil(part * len(places)) :]))
    dropped = sum(int(a.sum()) for a in active) - sum(len(places) for places in left)
    caps = [math.floor(0.99 * (len(w) - len(k))) for w, k in zip(weights, left, strict=True)]
    counts = largest_remainder(shares, dropped, caps)
    for i, count in enumerate(counts):
        scores = momenta[i].flatten().tolist()
        off = sorted(set(range(len(scores))) - left[i], key=lambda j: (-scores[j], j))
        found = set(run.active[i].flatten().nonzero().flatten().tolist())
        assert found == left[i] | set(off[:count])


def test_grown_weights_start_at_zero_without_momentum():
    for make in (sgd, without_momentum):
        run = Run(SNFS(sparsity=0.8, update_every=4), make=make).train(batches(3))
        before = run.active
        run.train(batches(1, seed=5))
        for index, (old, new) in enumerate(zip(before, run.active, strict=True)):
            grown = new & ~old
            assert not run.weights[index][grown].any()
            momentum = run.momentum(index) if make is sgd else run.masker.own[index]
            assert not momentum[grown].any()
            assert momentum[~new].any()


def test_weights_move_to_where_momentum_is():
    run = Run(SNFS(sparsity=0.8, update_every=4)).train(batches(4))
    before = run.counts
    for index in range(4):
        run.momentum(index).fill_(10.0 if index == 0 else 0.1)
    run.masker._exchange(0.3, WeightOptimizers((run.optimizer,)))
    assert run.counts[0] > before[0]
    assert sum(run.counts) == sum(before)
    assert all(new < old for new, old in zip(run.counts[1:], before[1:], strict=True))


def test_dense_layers_stay_dense():
    run = Run(SNFS(sparsity=0.8, dense_first=True, dense_last=True)).train(batches())
    assert (run.counts[0], run.counts[3]) == (144, 36)
    assert sum(run.counts) == 372


def test_no_layer_is_filled_up():
    assert growth([1, 0, 0], 100, [50, 200, 200]) == [49, 26, 25]
    assert growth([1, 1], 100, [50, 50]) == [50, 50]  # unless the other layers are full


def test_a_growing_layer_that_is_nearly_dense_drops_only_what_it_has_room_for():
    run = Run(SNFS(sparsity=0.1))
    assert [round(c / s, 1) for c, s in zip(run.counts, (144, 144, 1536, 36), strict=True)] == [
        0.9
    ] * 4
    counts = run.masker._drop_counts(0.5, [1.0, 0.1, 0.1, 0.1])
    inactive = 144 - run.counts[0]
    assert counts[0] == math.ceil(inactive / 144 * run.counts[0])
    assert counts[1] == math.ceil(0.5 * run.counts[1])


def test_exchanges_come_after_every_epoch_but_the_last():
    assert Run(SNFS(sparsity=0.8)).exchanges(batches()) == list(range(1, 39, 2))
    assert Run(SNFS(sparsity=0.8), total_steps=1000).masker.every == 4


def test_adam_has_a_momentum():
    run = Run(SNFS(sparsity=0.8), make=lambda m: torch.optim.Adam(m.parameters()))
    run.train(batches(6))
    assert run.masker.own == [None] * 4
    assert sum(run.counts) == 372


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allocation": "all"}, "SNFS(allocation='all'): must be one of 'uniform', 'er', 'erk'."),
        (
            {"drop_fraction": 2},
            "SNFS(drop_fraction=2): must be a fraction of a layer, from 0 to 1.",
        ),
        (
            {"update_every": 0},
            "SNFS(update_every=0): must be a number of updates, an integer of at least 1.",
        ),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError) as error:
        SNFS(sparsity=0.9, **settings)
    assert str(error.value) == message
