"""Pruning by weight: which weights are pruned and when, and the fine-tuning."""

import pytest
import torch

import probmask
from probmask.masking.method import Phase
from probmask.methods.pbw import PBW
from reference.networks import build, make_batches, sgd, train

STEPS, PER_EPOCH = 10, 2  # five epochs: four of training, one of fine-tuning
PRUNED_AT = 8


def begin(name="mlp", model=None, sparsity=0.8, **settings):
    model = build(name) if model is None else model
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        PBW(sparsity=sparsity, **settings),
        optimizer=optimizer,
        total_steps=STEPS,
        steps_per_epoch=PER_EPOCH,
        seed=0,
    )
    return model, optimizer, sparsifier


def dense_weights(name="mlp", steps=PRUNED_AT):
    """Return a densely trained model, without any of our code."""
    model = build(name)
    train(model, sgd(model), make_batches(name, STEPS)[:steps])
    return model


def weights_of(model):
    return [p.detach() for p in model.parameters() if p.dim() > 1]


def pruned_mlp(**settings):
    """Return the masks right after the pruning."""
    model, optimizer, sparsifier = begin(**settings)
    train(model, optimizer, make_batches("mlp", STEPS)[:PRUNED_AT])
    assert sparsifier.frozen
    return [layer.weight != 0 for layer in (model[0], model[2], model[4])]


def test_dense_training_then_the_largest_weights_of_all_layers_are_kept():
    twin = dense_weights()
    sizes = torch.cat([w.abs().flatten() for w in weights_of(twin)])
    threshold = sizes.sort().values[int(0.8 * 400)]  # the value at index ⌊S n⌋
    for mask, weight in zip(pruned_mlp(), weights_of(twin), strict=True):
        assert torch.equal(mask, weight.abs() >= threshold)


def test_kept_weights_have_the_values_of_dense_training():
    model, optimizer, _ = begin()
    train(model, optimizer, make_batches("mlp", STEPS)[:PRUNED_AT])
    for layer, weight in zip((0, 2, 4), weights_of(dense_weights()), strict=True):
        mask = model[layer].weight != 0
        assert torch.equal(model[layer].weight[mask], weight[mask])


def test_hans_threshold_is_one_quality_times_each_layers_deviation():
    kept = pruned_mlp(scope="std")
    weights = weights_of(dense_weights())
    qualities = [w.abs() / w.std(correction=0) for w in weights]
    lowest = min(float(q[m].min()) for q, m in zip(qualities, kept, strict=True))
    highest = max(float(q[~m].max()) for q, m in zip(qualities, kept, strict=True))
    assert lowest > highest  # any quality between the two gives these masks
    assert sum(int(m.sum()) for m in kept) == 80
    assert any(not torch.equal(a, b) for a, b in zip(kept, pruned_mlp(), strict=True))


def test_by_layer_each_keeps_the_same_fraction():
    kept = pruned_mlp(scope="layer")
    assert [int(m.sum()) for m in kept] == [19, 51, 10]
    for mask, weight in zip(kept, weights_of(dense_weights()), strict=True):
        assert weight[mask].abs().min() >= weight[~mask].abs().max()


@pytest.mark.parametrize(
    ("settings", "whole"), [({"dense_first": True}, 0), ({"dense_last": True}, 2)]
)
@pytest.mark.parametrize("scope", ["global", "std", "layer"])
def test_layers_can_stay_dense(settings, whole, scope):
    kept = pruned_mlp(sparsity=0.7, scope=scope, **settings)
    assert kept[whole].all()
    assert sum(int(m.sum()) for m in kept) == 120


def test_dense_layers_that_exceed_the_budget_raise():
    with pytest.raises(probmask.InputError, match=r"PBW\(sparsity=0.8\): the dense layers .* 96 "):
        begin(dense_first=True)


def test_momentum_restarts_and_pruned_weights_never_return():
    model, optimizer, sparsifier = begin()
    batches = make_batches("mlp", STEPS)
    train(model, optimizer, batches[:PRUNED_AT])
    assert not optimizer.state
    masks = [model[i].weight != 0 for i in (0, 2, 4)]
    train(model, optimizer, batches[PRUNED_AT:])
    summary = sparsifier.finalize()
    assert summary.kept == 80
    for mask, i in zip(masks, (0, 2, 4), strict=True):
        assert torch.equal(model[i].weight != 0, mask)


def test_fine_tuning_is_plain_training_of_the_kept_weights():
    model, optimizer, sparsifier = begin()
    batches = make_batches("mlp", STEPS)
    train(model, optimizer, batches[:PRUNED_AT])
    twin = build("mlp")
    masks = [model[i].weight.detach() != 0 for i in (0, 2, 4)]
    with torch.no_grad():
        for i in (0, 2, 4):
            twin[i].weight.copy_(model[i].weight)
            twin[i].bias.copy_(model[i].bias)
    its_optimizer = sgd(twin)
    for batch in batches[PRUNED_AT:]:
        its_optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(batch[0]), batch[1]).backward()
        for mask, i in zip(masks, (0, 2, 4), strict=True):
            twin[i].weight.grad *= mask
        its_optimizer.step()
    train(model, optimizer, batches[PRUNED_AT:])
    sparsifier.finalize()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["depthwise", "conv", "conv3d", "transformer", "tied"])
@pytest.mark.parametrize("scope", ["global", "std", "layer"])
def test_the_budget_is_exact(name, scope):
    model, optimizer, sparsifier = begin(name, sparsity=0.873, scope=scope)
    train(model, optimizer, make_batches(name, STEPS))
    summary = sparsifier.finalize()
    assert summary.kept == summary.size - round(0.873 * summary.size)


@pytest.mark.parametrize("steps", [0, 3, PRUNED_AT])
def test_the_budget_is_exact_if_training_ends_early(steps):
    model, optimizer, sparsifier = begin("depthwise", dense_last=True)
    train(model, optimizer, make_batches("depthwise", steps))
    summary = sparsifier.finalize()
    assert summary.kept == summary.size - round(0.8 * summary.size)
    assert summary.layers[-1].kept == summary.layers[-1].size


def test_half_precision_weights_are_pruned_too():
    for scope in ("global", "std", "layer"):
        model, optimizer, sparsifier = begin(model=build("mlp").bfloat16(), scope=scope)
        batches = [(x.bfloat16(), y) for x, y in make_batches("mlp", STEPS)]
        train(model, optimizer, batches)
        assert sparsifier.finalize().kept == 80


def test_the_epochs_are_those_of_both_phases():
    method = PBW(sparsity=0.9)
    for epochs, (training, tuning) in {2: (1, 1), 3: (2, 1), 60: (48, 12), 200: (160, 40)}.items():
        assert method.phases(epochs) == (
            Phase("train", training),
            Phase("fine-tune", tuning, "constant", 0.01),
        )


def test_the_phases_can_be_chosen():
    method = PBW(sparsity=0.9, fine_tune=0.5, fine_tune_rate=1.0, fine_tune_schedule="cosine")
    assert method.phases(9)[1] == Phase("fine-tune", 4, "cosine", 1.0)
    on_top = PBW(sparsity=0.9, equal_epochs=False)
    assert [phase.epochs for phase in on_top.phases(160)] == [160, 40]
    assert [phase.epochs for phase in on_top.phases(1)] == [1, 1]
    assert PBW(sparsity=0).phases(7) == (Phase("train", 7),)
    with pytest.raises(probmask.InputError, match=r"PBW: trains, .* takes 2 epochs, not 1; train"):
        method.phases(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "all"}, r"PBW\(scope='all'\): must be one of 'global', 'std', 'layer'\."),
        (
            {"fine_tune": 1.0},
            r"PBW\(fine_tune=1.0\): must be a fraction of all epochs, from 0 to 0.99\.",
        ),
        (
            {"fine_tune_rate": -1},
            r"PBW\(fine_tune_rate=-1\): must be a factor of the learning rate, at least 0\.",
        ),
        (
            {"fine_tune_schedule": "step"},
            r"PBW\(fine_tune_schedule='step'\): must be one of 'constant'",
        ),
        ({"dense_last": "yes"}, r"PBW\(dense_last='yes'\): must be one of True, False\."),
        ({"sparsity": 90}, r"PBW\(sparsity=90\): .*; for 90 % pass 0\.9\."),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(probmask.InputError, match=message):
        PBW(**{"sparsity": 0.9} | settings)


def test_a_layer_that_loses_all_its_weights_causes_a_warning():
    """One threshold for all layers is prone to layer collapse at high sparsity."""
    model, _, sparsifier = begin("depthwise", sparsity=0.9)
    with torch.no_grad():
        model[-1]._parameters["weight"].mul_(1e-3)
    with pytest.warns(
        probmask.LayerCollapseWarning, match=r"^\S+\.weight is losing all of its weights\.$"
    ):
        assert sparsifier.finalize().layers[-1].kept == 0
