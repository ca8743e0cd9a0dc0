"""Lottery tickets: rounds against a simple loop, rewinding, and the division of epochs."""

import copy

import pytest
import torch
from torch import nn

import probmask
from probmask.masking.method import Phase
from probmask.methods.families.stored import active_masks, count_active
from probmask.methods.lottery import Lottery
from reference.networks import assert_same_state, build, make_batches, sgd, state_of, train

PER_EPOCH = 2


def begin(name="conv", epochs=6, sparsity=0.5, model=None, **settings):
    model = build(name) if model is None else model
    optimizer = sgd(model)
    settings = {"dense_last": False} | settings
    sparsifier = probmask.attach(
        model,
        Lottery(sparsity=sparsity, **settings),
        optimizer=optimizer,
        total_steps=epochs * PER_EPOCH,
        steps_per_epoch=PER_EPOCH,
        seed=0,
    )
    return model, optimizer, sparsifier


def run(name="conv", epochs=6, **settings):
    model, optimizer, sparsifier = begin(name, epochs, **settings)
    train(model, optimizer, make_batches(name, epochs * PER_EPOCH))
    return model, sparsifier.finalize()


def obvious(rewind_step, keep_after, epochs):
    """The published loop on a plain model: train, prune, load the early state_dict, repeat."""
    model, trainings = build("conv"), len(keep_after) + 1
    batches = make_batches("conv", epochs * PER_EPOCH)
    length = epochs // trainings * PER_EPOCH
    weights = [model[0].weight, model[4].weight]
    masks = [torch.ones_like(w) for w in weights]
    early = None
    for round_ in range(trainings):
        optimizer = sgd(model)
        for i, (inputs, labels) in enumerate(batches[round_ * length : (round_ + 1) * length]):
            if round_ == 0 and i == rewind_step:
                early = copy.deepcopy(model.state_dict())
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            for weight, mask in zip(weights, masks, strict=True):
                weight.grad.mul_(mask)
            optimizer.step()
        if round_ == len(keep_after):
            return model
        sizes = [w.detach().abs() * m for w, m in zip(weights, masks, strict=True)]
        ranked = torch.cat([s.flatten() for s in sizes]).sort(descending=True).values
        masks = [(s >= ranked[keep_after[round_] - 1]).float() for s in sizes]
        model.load_state_dict(early)
        with torch.no_grad():
            for weight, mask in zip(weights, masks, strict=True):
                weight.mul_(mask)
    raise AssertionError


@pytest.mark.parametrize(("rewind_to", "step"), [(0.0, 0), (0.5, 1), (0.9, 1)])
def test_it_is_the_published_loop(rewind_to, step):
    """Trainings of one epoch; the rounds keep 371, 295 and 234 of 468: 468 / 2^(r/3)."""
    twin = obvious(step, [371, 295, 234], epochs=4)
    model, summary = run(epochs=4, rewind_to=rewind_to)
    assert summary.kept == 234
    for (name, one), (_, other) in zip(
        model.state_dict().items(), twin.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(one.abs(), other.abs(), msg=name)  # -0.0 is 0.0


@pytest.mark.parametrize(("sparsity", "whole"), [(0.6, True), (0.8, False), (0.9, False)])
def test_the_classifier_stays_dense_if_it_holds_at_most_half_of_the_budget(sparsity, whole):
    _, summary = run("depthwise", sparsity=sparsity, dense_last=None)
    assert Lottery(sparsity=sparsity).dense_last is None
    assert summary.layers[-1].size == 48
    assert (summary.layers[-1].kept == 48) == whole
    assert summary.kept == 320 - round(sparsity * 320)


def test_a_dense_classifier_that_exceeds_the_budget_raises():
    with pytest.raises(
        probmask.InputError, match=r"Lottery\(sparsity=0.5\): the dense layers .*432"
    ):
        begin(dense_last=True)


def test_the_whole_network_is_rewound_and_the_optimizer_restarts():
    model, optimizer, sparsifier = begin(epochs=4, rewind_to=0.5)
    batches = make_batches("conv", 8)
    train(model, optimizer, batches[:1])
    early = state_of(model)
    train(model, optimizer, batches[1:2])  # the end of the first training
    found = state_of(model)
    kept = 0
    for name, tensor in found.items():
        if name in ("0.weight", "4.weight"):
            mask = tensor != 0
            kept += int(mask.sum())
            assert torch.equal(tensor[mask], early[name][mask])
        else:
            assert torch.equal(tensor, early[name]), name
    assert kept == 371
    assert int(found["1.num_batches_tracked"]) == 1
    assert not optimizer.state
    assert not sparsifier.frozen


def test_weights_loaded_after_attach_are_rewound_to():
    model, optimizer, _ = begin(epochs=2, rewind_to=0, sparsity=0.1)
    other = [p.detach().clone() for p in build("conv", seed=5).parameters()]
    with torch.no_grad():
        for parameter, value in zip(
            [model[0]._parameters["weight"], model[1].weight, model[1].bias],
            other,
            strict=False,
        ):
            parameter.copy_(value)
    train(model, optimizer, make_batches("conv", 2))
    kept = model[0].weight != 0
    assert torch.equal(model[0].weight[kept], other[0][kept])
    assert torch.equal(model[1].weight, other[1])


def test_masks_of_later_rounds_are_subsets_of_earlier_ones():
    for scope in ("global", "layer"):
        model, optimizer, sparsifier = begin("depthwise", epochs=8, sparsity=0.9, scope=scope)
        masker = sparsifier._masker
        before, counts = [a.clone() for a in active_masks(masker.masked)], []
        for batch in make_batches("depthwise", 16):
            train(model, optimizer, [batch])
            assert all(
                (a <= b).all() for a, b in zip(active_masks(masker.masked), before, strict=True)
            )
            before = [a.clone() for a in active_masks(masker.masked)]
            counts.append(count_active(masker, masker.masked))
        assert counts[-1] == 32
        assert sorted(set(counts), reverse=True) == pytest.approx(
            [320 * 0.1 ** (r / 7) for r in range(8)], abs=2
        )


def test_by_layer_each_keeps_the_same_fraction():
    _, summary = run("depthwise", sparsity=0.75, scope="layer")
    assert [layer.kept for layer in summary.layers] == [18, 18, 32, 12]


# Rounds and epochs


def rounds(**settings):
    return len(Lottery(**settings).phases(60)) - 1


def test_each_round_prunes_at_most_prune_per_round():
    assert rounds(sparsity=0.2) == 1
    assert rounds(sparsity=0.36) == 2
    assert rounds(sparsity=0.37) == 3
    assert rounds(sparsity=0.95) == 14
    assert rounds(sparsity=0.95, prune_per_round=0.5) == 5
    assert rounds(sparsity=0.01) == 1


def test_the_epochs_are_divided_among_all_trainings():
    phases = Lottery(sparsity=0.95).phases(64)
    assert [phase.epochs for phase in phases] == [4] * 11 + [5] * 4
    assert phases[0] == Phase("training 1", 4)
    for epochs in range(2, 40):
        lengths = [phase.epochs for phase in Lottery(sparsity=0.95).phases(epochs)]
        assert sum(lengths) == epochs
        assert min(lengths) >= 1
        assert len(lengths) == min(15, epochs)


def test_each_training_can_have_all_epochs():
    phases = Lottery(sparsity=0.36, equal_epochs=False).phases(10)
    assert [phase.epochs for phase in phases] == [10, 10, 10]
    assert Lottery(sparsity=0).phases(10) == (Phase("train", 10),)


def test_fewer_epochs_make_fewer_and_larger_rounds():
    model, optimizer, sparsifier = begin("mlp", epochs=3, sparsity=0.96)
    masker, counts = sparsifier._masker, []
    for batch in make_batches("mlp", 6):
        train(model, optimizer, [batch])
        counts.append(count_active(masker, masker.masked))
    assert counts == [400, 80, 80, 16, 16, 16]
    with pytest.raises(
        probmask.InputError,
        match=r"takes 2 epochs, not 1; .*omit steps_per",
    ):
        Lottery(sparsity=0.9).phases(1)


# Contracts of every method


@pytest.mark.parametrize("name", ["depthwise", "conv3d", "transformer", "tied", "recurrent"])
def test_the_budget_is_exact(name):
    _, summary = run(name, sparsity=0.873)
    assert summary.kept == summary.size - round(0.873 * summary.size)


@pytest.mark.parametrize("steps", [0, 1, 4, 7])
@pytest.mark.parametrize("settings", [{}, {"dense_last": True}, {"scope": "layer"}])
def test_the_budget_is_exact_if_training_ends_early(steps, settings):
    model, optimizer, sparsifier = begin("depthwise", sparsity=0.8, **settings)
    train(model, optimizer, make_batches("depthwise", steps))
    assert sparsifier.finalize().kept == 64


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_resuming_is_bit_identical_when_rewinding_to_a_later_update(stop):
    settings = {"epochs": 4, "rewind_to": 0.5}
    batches = make_batches("conv", 8)
    whole, first, second = (begin(**settings) for _ in range(3))
    train(whole[0], whole[1], batches)
    train(first[0], first[1], batches[:stop])
    for part, other in zip(second, first, strict=True):
        part.load_state_dict(copy.deepcopy(other.state_dict()))
    train(second[0], second[1], batches[stop:])
    whole[2].finalize()
    second[2].finalize()
    assert_same_state(state_of(whole[0]), state_of(second[0]))


def test_a_copy_is_independent():
    model, optimizer, _ = begin(epochs=4)
    batches = make_batches("conv", 8)
    train(model, optimizer, batches[:1])
    twin = copy.deepcopy(model)
    state = state_of(twin)
    assert twin[0]._masked_weights["weight"]._source.model is twin
    train(model, optimizer, batches[1:])
    assert_same_state(state, state_of(twin))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rewind_to": 1},
            r"Lottery\(rewind_to=1\): must be a fraction of the first training, from 0 to 0.99",
        ),
        (
            {"prune_per_round": 0},
            r"Lottery\(prune_per_round=0\): must be the fraction of the remaining",
        ),
        ({"scope": "std"}, r"Lottery\(scope='std'\): must be one of 'global', 'layer'\."),
        ({"equal_epochs": 2}, r"Lottery\(equal_epochs=2\): must be one of True, False\."),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(probmask.InputError, match=message):
        Lottery(**{"sparsity": 0.9} | settings)
