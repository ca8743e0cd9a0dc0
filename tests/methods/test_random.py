"""Random pruning: the number of weights per layer, and uniformity."""

import pytest
import torch

import probmask
from probmask import InputError
from probmask.core.allocation import erdos_renyi
from probmask.methods.random import Random
from reference.networks import build, make_batches, sgd, train


def begin(name="depthwise", seed=5, **settings):
    model = build(name)
    optimizer = sgd(model)
    method = Random(**({"sparsity": 0.8} | settings))
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=10, seed=seed)
    return model, optimizer, sparsifier


def test_each_layer_keeps_the_number_of_its_allocation():
    shapes = [site.shape for site in begin()[2].sites]
    kept = {
        rule: [layer.kept for layer in begin(allocation=rule)[2].summary().layers]
        for rule in ("uniform", "er", "erk", "global")
    }
    assert all(sum(counts) == 64 for counts in kept.values())
    # 14.4, 14.4, 25.6 and 9.6 weights, the units that are left to the largest remainders
    assert kept["uniform"] == [14, 14, 26, 10]
    assert kept["er"] == erdos_renyi(shapes, 64, kernel=False)
    assert kept["erk"] == erdos_renyi(shapes, 64, kernel=True)
    assert kept["global"] != kept["uniform"]


def test_every_weight_is_kept_with_equal_probability():
    counts = torch.zeros(16, 16)
    for seed in range(100):
        counts += begin("mlp", seed=seed)[0][2].weight != 0
    # 100 draws of probability 0.2: mean 20, deviation 4
    assert counts.min() > 3
    assert counts.max() < 40
    assert counts.mean() == pytest.approx(20, abs=1)


def test_the_mask_depends_on_the_seed_alone_and_is_final():
    model, optimizer, sparsifier = begin()
    start = [site.weight != 0 for site in sparsifier.sites]
    again = [site.weight != 0 for site in begin()[2].sites]
    other = [site.weight != 0 for site in begin(seed=6)[2].sites]
    assert all(torch.equal(a, b) for a, b in zip(start, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(start, other, strict=True))
    train(model, optimizer, make_batches("depthwise", 10))
    end = [site.weight != 0 for site in sparsifier.sites]
    assert all(torch.equal(a, b) for a, b in zip(start, end, strict=True))
    assert sparsifier.finalize().kept == 64


def test_dense_ends():
    counts = [x.kept for x in begin(sparsity=0.5, dense_first=True)[2].summary().layers]
    assert (counts[0], sum(counts)) == (72, 160)
    with pytest.raises(InputError, match=r"Random\(sparsity=0\.8\): the dense layers alone hold"):
        begin(dense_first=True)


def test_invalid_settings_raise():
    with pytest.raises(
        InputError, match=r"Random\(allocation='er2'\): must be one of 'uniform', 'er', "
    ):
        Random(sparsity=0.9, allocation="er2")
    with pytest.raises(InputError, match=r"Random\(sparsity=0\.9999\): none of the 320 weights"):
        begin(sparsity=0.9999)
