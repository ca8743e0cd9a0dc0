"""Dynamic Network Surgery: pruning, restoring, and finding c for the budget."""

import copy

import pytest
import torch
from torch import nn

import probmask
from probmask import InputError
from probmask.masking.masker import Progress
from probmask.masking.optimizers import WeightOptimizers
from probmask.methods.dns import DNS
from probmask.methods.families.stored import count_active
from reference.networks import build, make_batches, sgd, step, train

STEPS = 20


def begin(name="depthwise", model=None, seed=5, **settings):
    model = build(name) if model is None else model
    optimizer = sgd(model)
    method = DNS(**({"sparsity": 0.8} | settings))
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=STEPS, seed=seed)
    return model, optimizer, sparsifier


def masks_of(sparsifier):
    return [mask.active.clone() for mask in sparsifier._masker.masked]


def surgery(sparsifier, update=10):
    """Call `after_update` without an update."""
    now = Progress(update, STEPS, STEPS)
    with torch.no_grad():
        sparsifier._masker.after_update(now, WeightOptimizers(()))


def test_a_worked_example_of_pruning_and_restoring():
    model = nn.Sequential(nn.Linear(6, 1, bias=False))
    with torch.no_grad():
        # mean 4 and deviation 2, so that c = 0.5 makes the threshold 5, the band 4.5 to 5.5
        model[0].weight.copy_(torch.tensor([[2.0, -2.0, 2.0, -6.0, 6.0, 6.0]]))
    _, _, sparsifier = begin(model=model, sparsity=0.5, c=0.5, gamma=0.0)
    surgery(sparsifier)
    assert masks_of(sparsifier)[0].int().tolist() == [[0, 0, 0, 1, 1, 1]]
    with torch.no_grad():
        # 5.6 is restored, 5.4 is not; 4.6 stays, 4.4 and -4.5 are pruned, by the initial statistics
        sparsifier.sites[0].weight.copy_(torch.tensor([[5.6, -5.4, 0.0, -4.6, 4.4, -4.5]]))
    surgery(sparsifier)
    assert masks_of(sparsifier)[0].int().tolist() == [[1, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_mask_for_the_budget_is_that_of_one_c(scope):
    """The mask equals that of the two thresholds for a c between two weights' limits."""
    model, optimizer, sparsifier = begin(ramp_begin=0.1, ramp_end=0.2, gamma=0.0, scope=scope)
    train(model, optimizer, make_batches("depthwise", 8))
    masker, before = sparsifier._masker, masks_of(sparsifier)
    with torch.no_grad():
        for weight in masker.weights:
            weight += 0.05 * torch.randn_like(weight)
    surgery(sparsifier)
    after = masks_of(sparsifier)
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert sum(int(a.sum()) for a in after) == 64
    limits = [
        (weight.detach().abs() / torch.where(active, 0.9, 1.1) - mean) / deviation
        for weight, active, (mean, deviation) in zip(
            masker.weights, before, masker.statistics, strict=True
        )
    ]
    for mask, active in zip(masker.masked, before, strict=True):
        mask.active.copy_(active)
    for group in [range(4)] if scope == "global" else [[i] for i in range(4)]:
        stays = torch.cat([limits[i][after[i]] for i in group]).min()
        goes = torch.cat([limits[i][~after[i]] for i in group]).max()
        assert stays > goes
        by_rule = masker._above(float(stays + goes) / 2)
        assert all(torch.equal(by_rule[i], after[i]) for i in group)


def test_pruned_weights_are_trained_and_return():
    model, optimizer, sparsifier = begin(ramp_begin=0.1, ramp_end=0.2, gamma=0.0)
    cut_once = [torch.zeros(site.shape, dtype=torch.bool) for site in sparsifier.sites]
    back = 0
    for done, batch in enumerate(make_batches("depthwise", 15), start=1):
        values = [site.weight.detach().clone() for site in sparsifier.sites]
        masks = masks_of(sparsifier)
        step(model, optimizer, batch)
        for site, value, active, cut in zip(sparsifier.sites, values, masks, cut_once, strict=True):
            if done > 6 and bool((~active).any()):
                assert bool((site.weight != value)[~active].any())
            cut |= ~active
        back += sum(int((c & a).sum()) for c, a in zip(cut_once, masks_of(sparsifier), strict=True))
    assert back > 0


def test_pruned_weights_get_the_gradient_of_the_effective_weight():
    model, optimizer, sparsifier = begin(ramp_begin=0.1, ramp_end=0.2, gamma=0.0)
    batches = make_batches("depthwise", 8)
    train(model, optimizer, batches)
    twin = copy.deepcopy(model)
    plain = build("depthwise")
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for (_, weight), active in zip(
            [(n, p) for n, p in plain.named_parameters() if p.dim() > 1],
            masks_of(sparsifier),
            strict=True,
        ):
            weight.masked_fill_(~active, 0.0)
    for network in (twin, plain):
        nn.functional.cross_entropy(network(batches[0][0]), batches[0][1]).backward()
    dense = [p.grad for p in plain.parameters() if p.dim() > 1]
    ours = [p.grad for p in twin.parameters() if p.dim() > 1]
    for a, b in zip(ours, dense, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_ramp_and_the_end():
    model, optimizer, sparsifier = begin(ramp_begin=0.2, ramp_end=0.6, freeze_at=0.8, gamma=0.0)
    masker = sparsifier._masker
    for done, batch in enumerate(make_batches("depthwise", STEPS), start=1):
        step(model, optimizer, batch)
        x = min(1.0, max(0.0, (done / STEPS - 0.2) / 0.4))
        assert count_active(masker, masker.masked) == pytest.approx(
            64 + 256 * (1 - x) ** 3, abs=0.501
        )
        assert sparsifier.frozen == (done >= 16)
    masks = masks_of(sparsifier)
    for site, active in zip(sparsifier.sites, masks, strict=True):
        assert not bool(site.weight[~active].any())
    assert sparsifier.finalize().kept == 64


def test_surgery_gets_rarer():
    masker = begin(gamma=9.0, ramp_begin=0.0)[2]._masker
    early = sum(masker._operates(step, 0.0) for step in range(200))
    late = sum(masker._operates(step, 1.0) for step in range(2000))
    assert early == 200
    assert 130 < late < 270  # probability 1/10
    assert begin(seed=6)[2]._masker._operates(3, 0.0) == masker._operates(3, 0.0)


@pytest.mark.parametrize("c", [-100.0, 0.5, 3.0])
def test_a_fixed_c_ends_at_the_budget_too(c):
    model, optimizer, sparsifier = begin(c=c)
    train(model, optimizer, make_batches("depthwise", 15))
    free = count_active(sparsifier._masker, sparsifier._masker.masked)
    assert (free == 320) == (c == -100.0)
    train(model, optimizer, make_batches("depthwise", 5))
    assert sparsifier.finalize().kept == 64


def test_a_layer_of_equal_weights_and_low_precision():
    model = build("mlp").bfloat16()
    nn.init.zeros_(model[4].weight)
    model, optimizer, sparsifier = begin("mlp", model=model)
    train(model, optimizer, [(x.bfloat16(), y) for x, y in make_batches("mlp", STEPS)])
    assert sparsifier.finalize().kept == 80


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"c": "big"},
            (
                "DNS(c='big'): must be a number of standard deviations, from -100 to 100; "
                "'big' is not a number."
            ),
        ),
        ({"band": 1}, "DNS(band=1): must be a fraction of the threshold, from 0 to 0.99."),
        (
            {"gamma": -1},
            "DNS(gamma=-1): must be a rate at which surgery becomes rarer, at least 0.",
        ),
        ({"scope": "net"}, "DNS(scope='net'): must be one of 'global', 'layer'."),
        (
            {"ramp_end": 0.95},
            "DNS(ramp_begin=0.38, ramp_end=0.95, freeze_at=0.92): the values must not decrease.",
        ),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        DNS(sparsity=0.9, **settings)
    assert str(caught.value) == text
