"""Gradual magnitude pruning: its schedule, its thresholds, and that pruned weights never return."""

import pytest
import torch

import probmask
from probmask import InputError
from probmask.methods.gmp import GMP
from reference.networks import (
    build,
    make_batches,
    sgd,
    step,
    train,
)

STEPS = 20


def begin(name="depthwise", steps=STEPS, **settings):
    model = build(name)
    optimizer = sgd(model)
    method = GMP(**({"sparsity": 0.8} | settings))
    return model, optimizer, probmask.attach(model, method, optimizer=optimizer, total_steps=steps)


def masks_of(sparsifier):
    return [mask.active.clone() for mask in sparsifier._masker.masked]


def test_sparsity_follows_the_cubic():
    model, optimizer, sparsifier = begin(ramp_begin=0.2, ramp_end=0.8, update_every=2)
    sizes = [site.size for site in sparsifier.sites]
    final = [layer.kept for layer in sparsifier.summary().layers]
    for done, batch in enumerate(make_batches("depthwise", STEPS), start=1):
        before = [int(active.sum()) for active in masks_of(sparsifier)]
        step(model, optimizer, batch)
        after = [int(active.sum()) for active in masks_of(sparsifier)]
        if done < 4 or (done % 2 and done < 16):
            assert after == before
        else:
            x = min(1.0, (done / STEPS - 0.2) / 0.6)
            expected = [
                k + round((n - k) * (1 - x) ** 3) for n, k in zip(sizes, final, strict=True)
            ]
            assert after == expected
        assert sparsifier.frozen == (done >= 16)
    assert sparsifier.finalize().kept == sum(sizes) - round(0.8 * sum(sizes))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_smallest_weights_are_pruned_per_layer_or_globally(scope):
    model, optimizer, sparsifier = begin("mlp", ramp_begin=0.5, ramp_end=0.5, scope=scope)
    twin = build("mlp")
    plain = sgd(twin)
    for batch in make_batches("mlp", STEPS // 2):
        step(model, optimizer, batch)
        step(twin, plain, batch)
    sizes = [twin[i].weight.detach().abs().flatten() for i in (0, 2, 4)]
    if scope == "layer":  # 96, 256 and 48 weights; 80 stay, 19.2, 51.2 and 9.6 of them
        cuts = [
            x.sort(descending=True).values[k - 1] for x, k in zip(sizes, (19, 51, 10), strict=True)
        ]
    else:
        cuts = [torch.cat(sizes).sort(descending=True).values[79]] * 3
    for active, size, cut in zip(masks_of(sparsifier), sizes, cuts, strict=True):
        assert torch.equal(active.flatten(), size >= cut)


def test_pruned_weights_stay_pruned():
    model, optimizer, sparsifier = begin(update_every=1, ramp_begin=0.0, ramp_end=0.9)
    last = masks_of(sparsifier)
    for batch in make_batches("depthwise", STEPS):
        step(model, optimizer, batch)
        now = masks_of(sparsifier)
        assert not any(bool((new & ~old).any()) for new, old in zip(now, last, strict=True))
        for site, active in zip(sparsifier.sites, now, strict=True):
            assert not bool(site.weight[~active].any())
        last = now


def test_the_interval_is_the_papers_or_a_twentieth():
    for steps, expected in ((8, 1), (60, 3), (40_000, 2000), (128_000, 2000)):
        assert begin(steps=steps)[2]._masker.interval == expected
    assert begin(steps=60, update_every=7)[2]._masker.interval == 7


def test_dense_layers_leave_less_for_the_others():
    model, optimizer, sparsifier = begin(sparsity=0.5, dense_first=True, dense_last=True)
    train(model, optimizer, make_batches("depthwise", STEPS))
    summary = sparsifier.finalize()
    assert [layer.kept for layer in summary.layers[::3]] == [72, 48]
    assert summary.kept == summary.size - round(0.5 * summary.size)
    shares = [layer.kept / layer.size for layer in summary.layers[1:3]]
    assert shares[0] == pytest.approx(shares[1], abs=0.02)


def test_dense_layers_that_exceed_the_budget_raise():
    text = r"GMP\(sparsity=0\.9\): the dense layers alone hold 120 weights, the budget is 32 of 320"
    with pytest.raises(InputError, match=text):
        begin(sparsity=0.9, dense_first=True, dense_last=True)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scope": "all"}, "GMP(scope='all'): must be one of 'global', 'layer'."),
        ({"ramp_end": 2}, "GMP(ramp_end=2): must be a fraction of the training, from 0 to 1."),
        (
            {"ramp_begin": 0.7},
            "GMP(ramp_begin=0.7, ramp_end=0.59375): the values must not decrease.",
        ),
        (
            {"update_every": 0},
            "GMP(update_every=0): must be a number of updates, an integer of at least 1.",
        ),
        ({"dense_first": "no"}, "GMP(dense_first='no'): must be one of True, False."),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        GMP(sparsity=0.9, **settings)
    assert str(caught.value) == text
