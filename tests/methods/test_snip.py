"""SNIP: its scores against autograd on a copy, and that scoring changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import probmask
from probmask import InputError, Probe
from probmask.methods.snip import SNIP
from reference.networks import (
    NETWORKS,
    assert_same_state,
    build,
    loss_of,
    make_batches,
    state_of,
    train,
)
from reference.probing import STEPS, assert_dense_without_data, attached, masks_of


def begin(name="conv", **settings):
    given = {key: settings.pop(key) for key in ("model", "seed", "probe") if key in settings}
    return attached(SNIP(**({"sparsity": 0.8} | settings)), name, **given)


@pytest.mark.parametrize("name", ["conv", "mlp", "depthwise", "tied", "transformer"])
@pytest.mark.parametrize("batches", [1, 3])
def test_the_weights_that_the_loss_depends_on_most_are_kept(name, batches):
    _, _, sparsifier = begin(name, batches=batches)
    twin = build(name)
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    losses = [loss_of(twin, batch) for batch in make_batches(name, 4, seed=3)[:batches]]
    torch.stack(losses).mean().backward()
    named = dict(twin.named_parameters())
    scores = [
        (named[site.name] * named[site.name].grad).abs().detach() for site in sparsifier.sites
    ]
    joint = torch.cat([score.flatten() for score in scores])
    keep = joint.numel() - round(0.8 * joint.numel())
    cut = joint.sort(descending=True).values[keep - 1]
    differing = sum(
        int((mask != (score >= cut)).sum())
        for mask, score in zip(masks_of(sparsifier), scores, strict=True)
    )
    assert differing <= 2  # a pair at the cut may change places by rounding
    assert sum(int(mask.sum()) for mask in masks_of(sparsifier)) == keep


def test_the_score_is_the_derivative_by_a_gate():
    """|w ∂L/∂w| = |∂L(c w)/∂c| at c = 1, weight by weight."""
    model = build("mlp").double()
    inputs, labels = make_batches("mlp", 1, seed=3)[0]
    batch = (inputs.double(), labels)
    _, _, sparsifier = begin("mlp", model=copy.deepcopy(model), probe=Probe([batch]))
    effects = []
    for i in (0, 2, 4):
        weight = model[i].weight
        for place in range(weight.numel()):
            changed = []
            for gate in (1 + 1e-5, 1 - 1e-5):
                other = copy.deepcopy(model)
                with torch.no_grad():
                    other[i].weight.view(-1)[place] *= gate
                changed.append(loss_of(other, batch).item())
            effects.append(abs(changed[0] - changed[1]) / 2e-5)
    chosen = torch.cat([mask.flatten() for mask in masks_of(sparsifier)])
    effects = torch.tensor(effects)
    assert effects[chosen].min() >= effects[~chosen].max() - 1e-8


@pytest.mark.parametrize("training", [True, False])
def test_scoring_leaves_the_model_unchanged(training):
    model = build("conv")
    model.append(nn.Dropout(0.5))
    model.train(training)
    model[0].eval()
    data = TensorDataset(*(torch.cat(x) for x in zip(*make_batches("conv", 4), strict=True)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    before, modes = state_of(model), [m.training for m in model.modules()]
    torch.manual_seed(1)
    random = torch.get_rng_state()
    _, _, sparsifier = begin(model=model, probe=Probe(loader))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    after = state_of(model)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "1.weight"):
        assert torch.equal(before[name], after[name])
    for site, mask in zip(sparsifier.sites, masks_of(sparsifier), strict=True):
        assert torch.equal(site.weight, before[site.name] * mask)
    sparsifier.finalize()
    assert [m.training for m in model.modules()] == modes


def test_batches_of_a_shuffled_loader_depend_on_the_seed_alone():
    data = TensorDataset(*(torch.cat(x) for x in zip(*make_batches("conv", 4), strict=True)))
    found = []
    for seed, global_seed in ((1, 1), (1, 2), (2, 1)):
        model = build("conv")
        torch.manual_seed(global_seed)
        loader = DataLoader(data, batch_size=8, shuffle=True)
        found.append(masks_of(begin(model=model, seed=seed, probe=Probe(loader))[2]))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def test_frozen_weights_and_a_custom_loss():
    model = build("mlp")
    model[0].weight.requires_grad_(False)
    batches = [(x, torch.randn(8, 3)) for x, _ in make_batches("mlp", 1)]
    _, _, sparsifier = begin("mlp", model=model, probe=Probe(batches, functional.mse_loss))
    assert sparsifier.summary().kept == 80
    assert not model[0]._parameters["weight"].requires_grad


@pytest.mark.parametrize("name", sorted(set(NETWORKS) - {"language"}))
def test_the_budget_is_exact_on_any_network(name):
    model, optimizer, sparsifier = begin(name)
    start = [mask.clone() for mask in masks_of(sparsifier)]
    train(model, optimizer, make_batches(name, 2))
    summary = sparsifier.finalize()
    assert summary.kept == summary.size - round(0.8 * summary.size)
    for site, mask in zip(sparsifier.sites, start, strict=True):
        assert not bool(site.weight[~mask].any())


def test_resuming_is_bit_identical_from_other_fresh_masks():
    batches = make_batches("conv", STEPS)
    whole = begin()
    train(*whole[:2], batches)
    first, second = begin(), begin(probe=Probe(make_batches("conv", 1, seed=8)))
    train(*first[:2], batches[:3])
    for part, other in zip(second, first, strict=True):
        part.load_state_dict(other.state_dict())
    train(*second[:2], batches[3:])
    assert whole[2].finalize() == second[2].finalize()
    assert_same_state(state_of(whole[0]), state_of(second[0]))


def test_sparsity_zero_is_dense_training_and_needs_no_data():
    assert_dense_without_data(SNIP(sparsity=0))


def test_invalid_settings_raise():
    with pytest.raises(
        InputError, match=r"SNIP\(batches=0\): must be a number of batches, an integer"
    ):
        SNIP(sparsity=0.9, batches=0)
    with pytest.raises(InputError, match=r"attach\(SNIP\): this method needs data"):
        probmask.attach(build("mlp"), SNIP(sparsity=0.9), total_steps=3)
    with pytest.raises(InputError, match=r"attach\(SNIP\): the probe contains no batch\."):
        begin("mlp", probe=Probe([]))
    with pytest.raises(InputError, match="a batch of the probe is a Tensor; expected pairs"):
        begin("mlp", probe=Probe([torch.zeros(8, 6)]))
