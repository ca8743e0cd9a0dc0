"""GraSP: its Hessian-gradient product, its samples, and the kept weights."""

import copy

import pytest
import torch
from torch import nn

import probmask
from probmask import InputError, Probe
from probmask.methods.grasp import GraSP, balanced, hessian_gradient
from reference.networks import (
    NETWORKS,
    build,
    loss_of,
    make_batches,
    sgd,
    state_of,
    train,
)
from reference.probing import assert_dense_without_data, attached, masks_of

BALANCED = sorted(set(NETWORKS) - {"unet", "language"})


def begin(name="conv", **settings):
    given = {key: settings.pop(key) for key in ("model", "seed", "probe") if key in settings}
    return attached(GraSP(**({"sparsity": 0.8} | settings)), name, **given)


def smooth_net():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3 * 36, 3),
    ).double()


def double(batches):
    return [(x.double(), y) for x, y in batches]


def weights_of(model):
    return [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def gradient(model, batches):
    losses = [loss_of(model, batch) for batch in batches]
    return torch.autograd.grad(torch.stack(losses).mean(), weights_of(model))


def test_the_product_is_the_change_of_the_gradient_along_itself():
    """H g = lim (g(w + ε g) - g(w - ε g)) / 2ε, over all layers and several batches."""
    model, batches = smooth_net(), double(make_batches("conv", 3))
    product = hessian_gradient(
        lambda: (loss_of(model, batch) for batch in batches), weights_of(model)
    )
    at = gradient(model, batches)
    moved = []
    for eps in (1e-5, -1e-5):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for w, g in zip(weights_of(other), at, strict=True):
                w += eps * g
        moved.append(gradient(other, batches))
    for hg, ahead, behind in zip(product, *moved, strict=True):
        assert torch.allclose(hg, (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-8)


def test_pruned_weights_have_the_largest_scores():
    """Scores against the explicit Hessian of a tiny layer: the largest -w (H g) are pruned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)).double()
    model[2].weight.requires_grad_(False)
    batch = (torch.randn(6, 3).double(), torch.tensor([0, 1, 0, 1, 0, 1]))
    plain = copy.deepcopy(model)

    def loss(w):
        outputs = plain[2](torch.tanh(batch[0] @ w.view(4, 3).T)) / 200
        return nn.functional.cross_entropy(outputs, batch[1])

    w = plain[0].weight.detach().flatten()
    hessian = torch.autograd.functional.hessian(loss, w)
    slope = torch.autograd.functional.jacobian(loss, w)
    score = -w * (hessian @ slope)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        GraSP(sparsity=0.5, samples_per_class=3),
        optimizer=optimizer,
        total_steps=3,
        exclude="2",
        probe=Probe([batch]),
        seed=1,
    )
    (mask,) = masks_of(sparsifier)
    goes = ~mask.flatten()
    assert int(goes.sum()) == 6
    assert score[goes].min() > score[~goes].max()


def test_samples_are_balanced_in_each_portion():
    labels = [0, 0, 0, 0, 1, 1, 2, 0], [1, 2, 2, 1, 1, 2, 0, 0]
    batches = [
        (torch.arange(8.0).view(8, 1) + 10 * i, torch.tensor(y)) for i, y in enumerate(labels)
    ]
    first, second = balanced(batches, 3, 2, 2)
    assert first[1].tolist() == second[1].tolist() == [0, 0, 1, 1, 2, 2]
    assert first[0].flatten().tolist() == [0, 1, 4, 5, 6, 11]
    assert second[0].flatten().tolist() == [2, 3, 10, 13, 12, 15]
    # too few examples of all classes but 0: portions are smaller, none is empty
    assert [len(y) for _, y in balanced(batches[:1], 3, 4, 3)] == [4 + 2 + 1, 1]


def test_labels_without_an_output_raise():
    for label in (-100, 3):
        batch = (torch.zeros(2, 6), torch.tensor([0, label]))
        with pytest.raises(InputError, match=f"a label {label}, but the network has 3 outputs"):
            begin("mlp", probe=Probe([batch]))


def test_batches_are_read_only_until_classes_have_enough_examples():
    read = []

    def stream():
        for batch in make_batches("conv", 40, size=16):
            read.append(1)
            yield batch

    class Batches:
        def __iter__(self):
            return stream()

    begin(probe=Probe(Batches()), samples_per_class=5)
    assert len(read) < 6


@pytest.mark.parametrize("name", BALANCED)
def test_the_budget_is_exact_on_any_network(name):
    model, optimizer, sparsifier = begin(name)
    start = [mask.clone() for mask in masks_of(sparsifier)]
    train(model, optimizer, make_batches(name, 2))
    summary = sparsifier.finalize()
    assert summary.kept == summary.size - round(0.8 * summary.size)
    for site, mask in zip(sparsifier.sites, start, strict=True):
        assert not bool(site.weight[~mask].any())


@pytest.mark.parametrize("name", ["unet", "language"])
def test_whole_batches_where_classes_cannot_be_balanced(name):
    with pytest.raises(InputError, match="pass samples_per_class=None to take whole batches"):
        begin(name)
    _, _, sparsifier = begin(name, samples_per_class=None, passes=2)
    size = sparsifier.summary().size
    assert sparsifier.summary().kept == size - round(0.8 * size)


def test_scoring_leaves_the_model_unchanged():
    model = build("conv")
    before, probe = state_of(model), Probe(make_batches("conv", 8))
    random = torch.get_rng_state()
    _, _, sparsifier = begin(model=model, probe=probe)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
    after = state_of(model)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(before[name], after[name])
    for site, mask in zip(sparsifier.sites, masks_of(sparsifier), strict=True):
        assert torch.equal(site.weight, before[site.name] * mask)


def test_xavier_changes_the_scores_and_not_the_weights():
    plain, drawn = begin("mlp"), begin("mlp", xavier_linear=True)
    again = begin("mlp", xavier_linear=True)
    fresh = build("mlp")
    pairs = list(zip(masks_of(plain[2]), masks_of(drawn[2]), strict=True))
    assert not all(torch.equal(a, b) for a, b in pairs)
    for i, mask, same in zip((0, 2, 4), masks_of(drawn[2]), masks_of(again[2]), strict=True):
        assert torch.equal(drawn[0][i].weight, fresh[i].weight * mask)
        assert torch.equal(mask, same)


def test_sparsity_zero_is_dense_training_and_needs_no_data():
    assert_dense_without_data(GraSP(sparsity=0))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"samples_per_class": 0},
            "GraSP(samples_per_class=0): must be a number of examples, an integer of at least 1.",
        ),
        (
            {"passes": 1.5},
            "GraSP(passes=1.5): must be a number of passes, an integer of at least 1.",
        ),
        (
            {"temperature": 0},
            "GraSP(temperature=0): must be a divisor of the outputs, from 0.001 to 1e+06.",
        ),
        ({"xavier_linear": "yes"}, "GraSP(xavier_linear='yes'): must be one of True, False."),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        GraSP(sparsity=0.9, **settings)
    assert str(caught.value) == text


def test_missing_data_raises():
    with pytest.raises(InputError, match=r"attach\(GraSP\): this method needs data"):
        probmask.attach(build("mlp"), GraSP(sparsity=0.9), total_steps=3)
    with pytest.raises(InputError, match=r"attach\(GraSP\): the probe contains no batch"):
        begin(probe=Probe([]))
