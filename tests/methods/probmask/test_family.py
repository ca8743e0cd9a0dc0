"""Both ProbMask methods: budgets, initial weights, the freeze, layer collapse, summaries."""

import pytest
import torch
from torch import nn

import probmask
from probmask.masking.macs import macs_per_weight
from probmask.masking.sites import find_sites
from reference.networks import (
    assert_same_state,
    build,
    make_batches,
    sgd,
    state_of,
    step,
    train,
)
from reference.probmask_run import STEPS, begin, method_of, ranking, run, starve

# The budget


@pytest.mark.parametrize("sparsity", [0.5, 0.873, 0.95])
def test_each_layer_has_its_own_budget(form, sparsity):
    model, sparsifier = run(form=form, scope="layer", sparsity=sparsity)
    summary = sparsifier.finalize()
    assert summary.kept == 400 - round(sparsity * 400)
    for layer in summary.layers:
        assert abs(layer.kept - summary.kept / 400 * layer.size) < 1
    assert [int(model[i].weight.count_nonzero()) for i in (0, 2, 4)] == [
        layer.kept for layer in summary.layers
    ]


def test_the_global_budget_moves_between_layers(form):
    _, sparsifier = run(form=form, min_keep_per_layer=1)
    shares = [layer.kept / layer.size for layer in sparsifier.finalize().layers]
    assert max(shares) - min(shares) > 0.05


def test_sparsity_zero_is_dense_training_bit_for_bit(form):
    for name in ("unet", "transformer", "tied"):
        plain = build(name)
        train(plain, sgd(plain), make_batches(name, STEPS))
        model, sparsifier = run(name, form=form, sparsity=0)
        summary = sparsifier.finalize()
        assert summary.kept == summary.size
        assert_same_state(state_of(model), state_of(plain))


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.01},
        {"form": "learned", "clip_norm": 0.01},
        {"form": "learned", "compat": "official"},
    ],
    ids=str,
)
def test_sparsity_zero_does_not_clip_gradients(settings):
    plain = build("mlp")
    train(plain, sgd(plain), make_batches("mlp", STEPS))
    model, sparsifier = run("mlp", sparsity=0, steps_per_epoch=4, **settings)
    sparsifier.finalize()
    assert_same_state(state_of(model), state_of(plain))


def test_sparsity_zero_equals_the_dense_method_bit_for_bit(form):
    dense = build("unet")
    optimizer = sgd(dense)
    method = probmask.Dense()
    sparsifier = probmask.attach(dense, method, optimizer=optimizer, total_steps=STEPS)
    train(dense, optimizer, make_batches("unet", STEPS))
    sparsifier.finalize()
    model, sparsifier = run("unet", form=form, sparsity=0.0)
    sparsifier.finalize()
    assert_same_state(state_of(model), state_of(dense))


# FLOPs


def flops(name, example, sparsity, **settings):
    model = build(name)
    costs = macs_per_weight(model, find_sites(model), example)
    model, optimizer, sparsifier = begin(
        name, model=model, cost="flops", sparsity=sparsity, example_inputs=example, **settings
    )
    train(model, optimizer, make_batches(name, STEPS))
    summary = sparsifier.finalize()
    spent = [cost * layer.kept for cost, layer in zip(costs, summary.layers, strict=True)]
    total = [cost * layer.size for cost, layer in zip(costs, summary.layers, strict=True)]
    return costs, summary, spent, sum(total)


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_a_budget_of_multiplications_is_met(form, sparsity):
    example = torch.randn(1, 1, 8, 8)
    costs, summary, spent, total = flops("unet", example, sparsity, min_keep_per_layer=1, form=form)
    budget = (1 - sparsity) * total
    assert sum(spent) <= budget
    open_ = [
        cost for cost, layer in zip(costs, summary.layers, strict=True) if layer.kept < layer.size
    ]
    assert sum(spent) + min(open_) > budget
    assert sparsity - 0.01 < 1 - sum(spent) / total < sparsity + 0.01


def test_a_transformer_can_be_budgeted_in_multiplications(form):
    example = torch.randint(20, (1, 5))
    _, _, spent, total = flops("transformer", example, 0.5, min_keep_per_layer=1, form=form)
    assert 0.49 < sum(spent) / total <= 0.5


def test_multiplications_need_an_example(form):
    with pytest.raises(
        probmask.InputError,
        match=r"attach\(example_inputs=None\): a budget in FLOPs needs a batch.*example_inputs=",
    ):
        begin(form=form, cost="flops")


def test_a_minimum_that_exceeds_the_budget_raises_at_attach(form):
    """It raises before training, not when the final mask is selected."""
    with pytest.raises(probmask.InputError, match="min_keep_per_layer"):
        begin(
            "conv",
            form=form,
            cost="flops",
            sparsity=0.99,
            min_keep_per_layer=1,
            example_inputs=torch.randn(1, 1, 6, 6),
        )


def test_layerwise_multiplications(form):
    example = torch.randn(1, 1, 8, 8)
    _, summary, spent, total = flops("unet", example, 0.5, scope="layer", form=form)
    for layer in summary.layers:
        assert abs(layer.kept - 0.5 * layer.size) <= 1
    assert sum(spent) == pytest.approx(0.5 * total, rel=0.02)


# Initial weights


def test_training_starts_from_the_given_weights_unless_they_are_reinitialized(form):
    model = build("mlp")
    given = state_of(model)
    begin(form=form, model=model)
    assert torch.equal(model[0]._parameters["weight"], given["0.weight"])
    if form == "tied":
        return
    model = build("mlp")
    begin(form=form, model=model, reinitialize=False)
    assert torch.equal(model[0]._parameters["weight"], given["0.weight"])
    model = build("mlp")
    begin(form=form, model=model, reinitialize=True)
    assert not torch.equal(model[0]._parameters["weight"], given["0.weight"])
    assert model[0]._parameters["weight"].requires_grad


def test_a_pretrained_start(form):
    """A pretrained network starts with the outputs of the dense network."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 6)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    batch = (inputs, labels)
    model = build("mlp")
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), [batch] * 200)
    dense = model(inputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sparsifier = probmask.attach(
        model,
        method_of(form, sparsity=0.5),
        optimizer=optimizer,
        total_steps=200,
        seed=0,
    )
    assert torch.equal(model(inputs), dense)  # every weight is kept with probability 1
    train(model, optimizer, [batch] * 200)
    sparsifier.finalize()
    assert (model(inputs).argmax(1) == labels).float().mean() > 0.9


# Training


def test_one_draw_works_inside_the_loop_of_draws(form):
    inside, _ = run(form=form, min_keep_per_layer=1)
    model, optimizer, _ = begin(form=form, min_keep_per_layer=1)
    train(model, optimizer, make_batches("mlp", STEPS))
    assert_same_state(state_of(inside), state_of(model))


@pytest.mark.parametrize(
    ("freeze_at", "first"), [(0.0, 1), (0.5, 11), (0.7, 15), (0.97, None), (1, None)]
)
def test_the_mask_is_frozen_from_freeze_at_on(form, freeze_at, first):
    """It is frozen by the first update at or after that fraction or, if tied, just before it.

    It is never frozen before the first update: ranks may have different weights then.
    """
    settings = {"ramp_begin": 0.0, "ramp_end": 0.0} if freeze_at == 0 else {}
    model, optimizer, sparsifier = begin(
        form=form, freeze_at=freeze_at, min_keep_per_layer=1, **settings
    )
    expected = STEPS + 1 if first is None else first
    if form == "tied":
        expected = max(1, expected - 1)
    assert not sparsifier.frozen
    frozen = []
    for batch in make_batches("mlp", STEPS):
        step(model, optimizer, batch)
        frozen.append(sparsifier.frozen)
    assert frozen == [count + 1 >= expected for count in range(STEPS)]
    if first is not None:
        assert sum(int(model[i].weight.count_nonzero()) for i in (0, 2, 4)) == 80


@pytest.mark.parametrize(
    ("settings", "call"),
    [
        ({"freeze_at": 0.3}, "TiedProbMask(freeze_at=0.3, ramp_end=0.5)"),
        ({"choose_at": 0.25}, "TiedProbMask(choose_at=0.25, ramp_end=0.5)"),
        ({"form": "learned", "freeze_at": 0.25}, "ProbMask(freeze_at=0.25, ramp_end=0.5)"),
    ],
)
def test_a_selection_during_the_ramp_warns(settings, call):
    with pytest.warns(probmask.EarlyEndWarning, match="are then pruned at once") as found:
        begin(**settings)
    assert str(found[0].message).startswith(f"{call}: the masks become final at 0.25 of the")
    assert found[0].filename.endswith("probmask_run.py")  # where attach was called


def test_the_same_seed_gives_the_same_bits(form):
    runs = [state_of(run(form=form, seed=3, min_keep_per_layer=1)[0]) for _ in range(2)]
    assert_same_state(*runs)


def test_it_does_not_use_pytorchs_generator(form):
    model, optimizer, _ = begin(form=form, min_keep_per_layer=1)
    plain, plain_optimizer, _ = begin(form=form, min_keep_per_layer=1)
    for batch in make_batches("mlp", STEPS):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        step(model, optimizer, batch)
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(7)
        step(plain, plain_optimizer, batch)
    assert_same_state(state_of(model), state_of(plain))


def test_the_final_mask_is_the_top_of_all_layers(form):
    model, optimizer, sparsifier = begin(form=form, freeze_at=1, min_keep_per_layer=1)
    train(model, optimizer, make_batches("mlp", STEPS - 1))
    ranked = torch.cat([values.flatten() for values in ranking(model)])
    sparsifier.finalize()
    kept = torch.cat([model[i].weight.flatten() != 0 for i in (0, 2, 4)])
    assert kept.sum() == 80
    assert ranked[kept].min() >= ranked[~kept].max()


# Layer collapse


@pytest.mark.filterwarnings("error::probmask.LayerCollapseWarning")
def test_a_layer_that_loses_all_its_weights_causes_a_warning(form):
    model, optimizer, sparsifier = begin(form=form, freeze_at=1, temperature_start=0.5)
    starve(model, "2")
    with pytest.warns(
        probmask.LayerCollapseWarning,
        match=r"2\.weight is losing all of its weights; min_keep_per_layer=1 prevents it "
        r"\(command line: --set method\.min_keep_per_layer=1\)\.$",
    ):
        train(model, optimizer, make_batches("mlp", 12))  # by then the budget has fallen
    layers = sparsifier.finalize().layers  # warns only once
    assert [layer.kept > 0 for layer in layers] == [True, False, True]


def test_a_collapse_at_the_end_causes_a_warning(form):
    model, _, sparsifier = begin(form=form, sparsity=0.9)
    starve(model, "4")
    with pytest.warns(probmask.LayerCollapseWarning, match=r"4\.weight"):
        summary = sparsifier.finalize()
    assert summary.layers[2].kept == 0
    assert summary.kept == 40


@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_min_keep_per_layer_is_met_and_the_total_stays_exact(form, least, scope):
    model, _, sparsifier = begin(form=form, min_keep_per_layer=least, scope=scope, sparsity=0.93)
    starve(model, "2")
    summary = sparsifier.finalize()
    assert summary.kept == 400 - round(0.93 * 400)
    assert all(layer.kept >= least for layer in summary.layers)
    assert model[2].weight.count_nonzero() == summary.layers[1].kept


@pytest.mark.filterwarnings("error::probmask.LayerCollapseWarning")
def test_no_collapse_warning_with_min_keep_per_layer(form):
    """With min_keep_per_layer=1 no layer can collapse."""
    model, optimizer, sparsifier = begin(form=form, min_keep_per_layer=1, temperature_start=0.5)
    starve(model, "2")
    train(model, optimizer, make_batches("mlp", 12))
    assert sparsifier.finalize().layers[1].kept >= 1


def test_min_keep_per_layer_with_a_budget_of_multiplications(form):
    example = torch.randn(1, 1, 8, 8)
    model = build("unet")
    costs = macs_per_weight(model, find_sites(model), example)
    _, _, sparsifier = begin(
        model=model,
        form=form,
        cost="flops",
        min_keep_per_layer=3,
        sparsity=0.9,
        example_inputs=example,
    )
    starve(model, "up")
    layers = sparsifier.finalize().layers
    assert all(layer.kept >= 3 for layer in layers)
    spent = sum(cost * layer.kept for cost, layer in zip(costs, layers, strict=True))
    total = sum(cost * layer.size for cost, layer in zip(costs, layers, strict=True))
    assert spent <= 0.1 * total * (1 + 1e-9)


def test_a_layer_smaller_than_the_minimum_stays_dense(form):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 40))
    _, _, sparsifier = begin(form=form, model=model, min_keep_per_layer=10, sparsity=0.5)
    starve(model, "0")
    assert [layer.kept for layer in sparsifier.finalize().layers] == [4, 38]


def test_a_minimum_above_the_budget_raises(form):
    with pytest.raises(
        probmask.InputError,
        match=r"ProbMask\(min_keep_per_layer=30\): 3 layers would keep 90 weights, "
        r"but the budget is 80; lower min_keep_per_layer\.",
    ):
        begin(form=form, min_keep_per_layer=30)


@pytest.mark.parametrize("cost", ["params", "flops"])
def test_min_keep_per_layer_holds_during_training(form, cost):
    """At 99.9 % the narrow layer would lose all weights and all gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 3), nn.ReLU(), nn.Linear(3, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = method_of(form, sparsity=0.997, cost=cost, min_keep_per_layer=1, freeze_at=1)
    sparsifier = probmask.attach(
        model,
        method,
        optimizer=optimizer,
        total_steps=200,
        seed=1,
        example_inputs=torch.zeros(1, 20),
    )
    x, y = torch.randn(64, 20), torch.randint(5, (64,))
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        kept = expected_kept(sparsifier)
        assert all(each >= 1 - 1e-6 for each in kept)
    assert sum(kept) <= 21 * (1 + 1e-6)
    assert all(layer.kept >= 1 for layer in sparsifier.finalize().layers)


def expected_kept(sparsifier):
    """Return the number of weights of each layer that training keeps, or its expectation."""
    masks = sparsifier._masker.masked
    if isinstance(sparsifier.method, probmask.TiedProbMask):
        return [int((mask.mask if mask.frozen else mask.active).sum()) for mask in masks]
    return [float(mask.prob.detach().double().sum()) for mask in masks]


# Summaries and errors


def test_the_summary_has_the_current_masks(form):
    model, optimizer, sparsifier = begin(form=form, min_keep_per_layer=1)
    assert sparsifier.summary().kept == 80
    train(model, optimizer, make_batches("mlp", 5))
    summary = sparsifier.summary()
    model.eval()
    assert [layer.kept for layer in summary.layers] == [
        int(model[i].weight.count_nonzero()) for i in (0, 2, 4)
    ]
    layer = summary.layers[0]
    assert (layer.name, layer.shape, layer.size) == ("0.weight", (16, 6), 96)
    assert layer.sparsity == 1 - layer.kept / 96
    assert summary.sparsity == 0.8


def test_keeping_nothing_raises(form):
    with pytest.raises(probmask.InputError, match=r"none of the 400 weights would be kept"):
        begin(form=form, sparsity=0.9999)


@pytest.mark.parametrize(
    "settings",
    [{"every": "epoch"}, {"form": "learned", "every": "epoch"}, {"form": "paper"}],
    ids=str,
)
def test_schedules_in_epochs_need_steps_per_epoch(settings):
    with pytest.raises(
        probmask.InputError, match="its schedules count epochs; pass steps_per_epoch= to attach"
    ):
        begin(**settings)


def test_a_nan_weight_raises_and_the_error_names_its_layer(form):
    model, optimizer, sparsifier = begin(form=form)
    inputs, labels = make_batches("mlp", 1)[0]
    with pytest.raises(probmask.NonFiniteError, match=r"\b(0|2|4)\.weight\b.*NaN"):
        train(model, optimizer, [(inputs * torch.nan, labels)] * 2)
    assert sparsifier.now.step <= 1
