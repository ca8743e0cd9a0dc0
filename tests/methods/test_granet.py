"""GraNet: the schedule of the sparsity, and exchanges by gradient."""

import math

import pytest
import torch

from probmask import InputError
from probmask.masking.method import number_kept
from probmask.methods.granet import GraNet
from reference.exchange_run import SIZES, Run, batches
from reference.networks import loss_of


def test_the_sparsity_rises_along_a_cubic():
    method = GraNet(sparsity=0.9, start_sparsity=0.5, prune_begin=0.1, prune_end=0.6)
    assert method.sparsity_at(0.0) == 0.5
    assert method.sparsity_at(0.1) == 0.5
    assert method.sparsity_at(0.35) == pytest.approx(0.5 + 0.4 * (1 - 0.5**3))
    assert method.sparsity_at(0.6) == 0.9
    assert method.sparsity_at(1.0) == 0.9
    assert GraNet(sparsity=0.9, prune_end=0.0).sparsity_at(0.0) == 0.9


def test_a_sparsity_below_the_start_sparsity_is_the_start_sparsity():
    run = Run(GraNet(sparsity=0.3))
    assert sum(run.counts) == 1860 - 558
    assert sum(run.train(batches()).counts) == 1860 - 558


def test_the_number_of_weights_follows_the_schedule_and_arrives_exactly():
    method = GraNet(sparsity=0.95, update_every=4)
    run = Run(method)
    expected = 930
    for number, batch in enumerate(batches()):
        if number % 4 == 0 and number > 0:
            expected = number_kept(method.sparsity_at(number / 40), 1860)
        run.train([batch])
        assert sum(run.counts) == expected
    assert expected == 93


def test_a_dense_start():
    run = Run(GraNet(sparsity=0.9, start_sparsity=0.0))
    assert run.counts == SIZES
    assert sum(run.train(batches()).counts) == 186


def test_every_exchange_is_a_global_cut_then_a_layerwise_exchange():
    method = GraNet(sparsity=0.9, update_every=5)
    run = Run(method)
    for number, batch in enumerate(batches()):
        run.optimizer.zero_grad()
        loss_of(run.model, batch).backward()
        weights = [w.abs().flatten().tolist() for w in run.weights]
        grads = [w.grad.abs().flatten().tolist() for w in run.masker.weights]
        active = [a.flatten().tolist() for a in run.active]
        run.optimizer.step()
        if number == 0 or number % 5:
            assert [a.flatten().tolist() for a in run.active] == active
            continue
        expected = twin(method, number / 40, weights, grads, active)
        found = [set(a.flatten().nonzero().flatten().tolist()) for a in run.active]
        assert found == expected


def twin(method, fraction, weights, grads, active):
    ranked = sorted(
        (
            (w, -i, -j)
            for i, layer in enumerate(weights)
            for j, w in enumerate(layer)
            if active[i][j]
        ),
        reverse=True,
    )
    cut = ranked[: number_kept(method.sparsity_at(fraction), 1860)]
    after = []
    part = 0.005 + 0.495 * (1 + math.cos(math.pi * fraction)) / 2
    for i, layer in enumerate(weights):
        on = sorted((-j for w, layer_, j in cut if layer_ == -i), key=lambda j: (layer[j], -j))
        count = math.ceil(part * len(on))
        left = set(on[count:])
        off = sorted(set(range(len(layer))) - left, key=lambda j: (-grads[i][j], j))
        after.append(left | set(off[:count]))
    return after


def test_weights_pruned_and_grown_again_start_from_zero():
    run = Run(GraNet(sparsity=0.9, update_every=5)).train(batches(5))
    before = run.weights
    run.train(batches(1, seed=4))
    for index, (old, new, active) in enumerate(zip(before, run.weights, run.active, strict=True)):
        fresh = active & (old == 0)
        assert not new[fresh].any()
        assert not run.momentum(index)[fresh].any()


def test_dense_gradients_only_when_they_are_needed():
    run = Run(GraNet(sparsity=0.9, update_every=10))
    for number, batch in enumerate(batches()):
        run.optimizer.zero_grad()
        loss_of(run.model, batch).backward()
        outside = any(
            bool(torch.any(w.grad[~a])) for w, a in zip(run.masker.weights, run.active, strict=True)
        )
        assert outside == (number in (10, 20, 30))
        run.optimizer.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start_sparsity": 2}, "GraNet(start_sparsity=2): must be a sparsity, from 0 to 1."),
        (
            {"prune_end": 80},
            "GraNet(prune_end=80): must be a fraction of the training, from 0 to 1.",
        ),
        (
            {"prune_begin": 0.6},
            "GraNet(prune_begin=0.6, prune_end=0.5): the values must not decrease.",
        ),
        (
            {"drop_fraction": 2},
            "GraNet(drop_fraction=2): must be a fraction of a layer, from 0 to 1.",
        ),
        (
            {"update_every": 0},
            "GraNet(update_every=0): must be a number of updates, an integer of at least 1.",
        ),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError) as error:
        GraNet(sparsity=0.9, **settings)
    assert str(error.value) == message
