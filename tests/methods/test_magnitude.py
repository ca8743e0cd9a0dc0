"""One-shot magnitude pruning: dense before, the largest weights after."""

import pytest
import torch

import probmask
from probmask import InputError
from probmask.methods.magnitude import Magnitude
from reference.networks import assert_same_state, build, make_batches, sgd, state_of, train

STEPS = 12
LAYERS = (0, 2, 4)


def begin(name="mlp", **settings):
    model = build(name)
    optimizer = sgd(model)
    method = Magnitude(**({"sparsity": 0.8} | settings))
    return model, optimizer, probmask.attach(model, method, optimizer=optimizer, total_steps=STEPS)


def test_by_default_dense_training_is_pruned_at_the_end():
    model, optimizer, sparsifier = begin()
    dense = build("mlp")
    batches = make_batches("mlp", STEPS)
    train(model, optimizer, batches)
    train(dense, sgd(dense), batches)
    assert sparsifier.finalize().kept == 80
    joint = torch.cat([dense[i].weight.detach().abs().flatten() for i in LAYERS])
    cut = joint.sort(descending=True).values[79]
    with torch.no_grad():
        for i in LAYERS:
            dense[i].weight[dense[i].weight.abs() < cut] = 0.0
    assert_same_state(state_of(model), state_of(dense))


def test_after_the_pruning_only_the_largest_weights_are_trained():
    model, optimizer, sparsifier = begin(prune_at=0.5)
    batches = make_batches("mlp", STEPS)
    train(model, optimizer, batches[:5])
    assert not sparsifier.frozen
    train(model, optimizer, batches[5:6])
    assert sparsifier.frozen
    kept = [site.weight != 0 for site in sparsifier.sites]
    values = [site.weight.detach().clone() for site in sparsifier.sites]
    train(model, optimizer, batches[6:])
    assert sparsifier.finalize().kept == sum(int(k.sum()) for k in kept) == 80
    for i, mask, value in zip(LAYERS, kept, values, strict=True):
        assert not bool(model[i].weight[~mask].any())
        assert bool((model[i].weight[mask] != value[mask]).any())


def test_prune_at_zero_prunes_the_initial_weights():
    model, _, _ = begin(prune_at=0)
    fresh = build("mlp")
    joint = torch.cat([fresh[i].weight.detach().abs().flatten() for i in LAYERS])
    cut = joint.sort(descending=True).values[79]
    for i in LAYERS:
        assert torch.equal(model[i].weight != 0, fresh[i].weight.abs() >= cut)


def test_by_layer_each_keeps_the_same_fraction():
    model, optimizer, sparsifier = begin("depthwise", scope="layer", sparsity=0.5)
    train(model, optimizer, make_batches("depthwise", STEPS))
    summary = sparsifier.finalize()
    assert [layer.kept for layer in summary.layers] == [36, 36, 64, 24]


def test_dense_ends():
    model, optimizer, sparsifier = begin("depthwise", sparsity=0.5, dense_last=True)
    train(model, optimizer, make_batches("depthwise", STEPS))
    summary = sparsifier.finalize()
    assert (summary.kept, summary.layers[-1].kept) == (160, 48)
    with pytest.raises(InputError, match="dense layers alone hold 72 weights, the budget is 64"):
        begin("depthwise", dense_first=True)


@pytest.mark.parametrize("stop", [3, 9])
def test_resuming_is_bit_identical(stop):
    batches = make_batches("mlp", STEPS)
    whole = begin(prune_at=0.5)
    train(*whole[:2], batches)
    first, second = begin(prune_at=0.5), begin(prune_at=0.5)
    train(*first[:2], batches[:stop])
    for part, other in zip(second, first, strict=True):
        part.load_state_dict(other.state_dict())
    train(*second[:2], batches[stop:])
    assert whole[2].finalize() == second[2].finalize()
    assert_same_state(state_of(whole[0]), state_of(second[0]))


@pytest.mark.parametrize("prune_at", [0, 0.5])
def test_sparsity_zero_is_dense_training(prune_at):
    model, optimizer, sparsifier = begin(sparsity=0, prune_at=prune_at)
    dense = build("mlp")
    batches = make_batches("mlp", STEPS)
    train(model, optimizer, batches)
    train(dense, sgd(dense), batches)
    sparsifier.finalize()
    assert_same_state(state_of(model), state_of(dense))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scope": "row"}, "Magnitude(scope='row'): must be one of 'global', 'layer'."),
        (
            {"prune_at": 50},
            "Magnitude(prune_at=50): must be a fraction of the training, from 0 to 1.",
        ),
        ({"dense_last": 1.5}, "Magnitude(dense_last=1.5): must be one of True, False."),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        Magnitude(sparsity=0.9, **settings)
    assert str(caught.value) == text
