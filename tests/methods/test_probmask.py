"""ProbMask at work: budgets, draws, supermasks, schedules, seeds, collapse."""

import math
import warnings

import pytest
import torch
from torch import nn

import probmask
from probmask.core import schedules
from reference.networks import (
    assert_same_state,
    build,
    loss_of,
    make_batches,
    probs_of,
    sgd,
    state_of,
    step,
    train,
)

STEPS = 20


def begin(name="mlp", seed=1, total_steps=STEPS, model=None, **settings):
    arguments = {
        key: settings.pop(key)
        for key in ("example_inputs", "steps_per_epoch", "exclude")
        if key in settings
    }
    settings = {"sparsity": 0.8} | settings
    model = build(name) if model is None else model
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        probmask.ProbMask(**settings),
        optimizer=optimizer,
        total_steps=total_steps,
        seed=seed,
        **arguments,
    )
    return model, optimizer, sparsifier


def run(name="mlp", **settings):
    model, optimizer, sparsifier = begin(name, **settings)
    for batch in make_batches(name, STEPS):
        optimizer.zero_grad()
        for share in sparsifier.draws():
            (share * loss_of(model, batch)).backward()
        optimizer.step()
    return model, sparsifier


# The budget


def test_probabilities_stay_within_the_budget_of_each_moment():
    model, optimizer, sparsifier = begin(total_steps=50, min_keep_per_layer=1)
    for count, batch in enumerate(make_batches("mlp", 50)):
        step(model, optimizer, batch)
        probs = [prob.detach().double() for prob in probs_of(model).values()]
        assert all(((p >= 0) & (p <= 1)).all() for p in probs)
        budget = 400 * schedules.kept_fraction(count / 50, 0.2, begin=0.05, end=0.5)
        assert sum(float(p.sum()) for p in probs) <= budget * (1 + 1e-6)
        kept = sparsifier.metrics()["kept_fraction"]
        if count <= 30:  # frozen at the latest
            assert kept == pytest.approx(budget / 400, abs=1e-12)


@pytest.mark.parametrize("sparsity", [0.5, 0.873, 0.95])
def test_each_layer_has_its_own_budget(sparsity):
    model, sparsifier = run(scope="layer", sparsity=sparsity)
    summary = sparsifier.finalize()
    assert summary.kept == 400 - round(sparsity * 400)
    for layer in summary.layers:
        assert abs(layer.kept - summary.kept / 400 * layer.size) < 1
    assert [int(model[i].weight.count_nonzero()) for i in (0, 2, 4)] == [
        layer.kept for layer in summary.layers
    ]


def test_the_layer_budget_also_holds_for_the_probabilities():
    model, optimizer, _ = begin(scope="layer", freeze_at=None)
    train(model, optimizer, make_batches("mlp", STEPS))
    for prob in probs_of(model).values():
        assert float(prob.detach().double().sum()) <= 0.2 * prob.numel() * (1 + 1e-6)


def test_the_global_budget_moves_between_layers():
    _, sparsifier = run(min_keep_per_layer=1)
    shares = [layer.kept / layer.size for layer in sparsifier.finalize().layers]
    assert max(shares) - min(shares) > 0.05


def test_nothing_removed_is_dense_training_bit_for_bit():
    for name in ("unet", "transformer", "tied"):
        plain = build(name)
        train(plain, sgd(plain), make_batches(name, STEPS))
        model, sparsifier = run(name, sparsity=0)
        summary = sparsifier.finalize()
        assert summary.kept == summary.size
        assert_same_state(state_of(model), state_of(plain))


def test_nothing_removed_is_the_dense_method_bit_for_bit():
    dense = build("unet")
    sparsifier = probmask.attach(dense, probmask.Dense(), total_steps=STEPS)
    train(dense, sgd(dense), make_batches("unet", STEPS))
    sparsifier.finalize()
    model, sparsifier = run("unet", sparsity=0.0)
    sparsifier.finalize()
    assert_same_state(state_of(model), state_of(dense))


# FLOPs


def flops(name, example, sparsity, **settings):
    model, optimizer, sparsifier = begin(
        name, cost="flops", sparsity=sparsity, example_inputs=example, **settings
    )
    costs = sparsifier._masker.budget.costs
    train(model, optimizer, make_batches(name, STEPS))
    summary = sparsifier.finalize()
    spent = [cost * layer.kept for cost, layer in zip(costs, summary.layers, strict=True)]
    total = [cost * layer.size for cost, layer in zip(costs, summary.layers, strict=True)]
    return costs, summary, spent, sum(total)


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_a_budget_of_multiplications_is_kept_and_used_up(sparsity):
    example = torch.randn(1, 1, 8, 8)
    costs, summary, spent, total = flops("unet", example, sparsity, min_keep_per_layer=1)
    budget = (1 - sparsity) * total
    assert sum(spent) <= budget
    open_ = [
        cost for cost, layer in zip(costs, summary.layers, strict=True) if layer.kept < layer.size
    ]
    assert sum(spent) + min(open_) > budget
    assert sparsity - 0.01 < 1 - sum(spent) / total < sparsity + 0.01


def test_the_costs_are_the_counted_ones():
    _, _, sparsifier = begin("unet", cost="flops", example_inputs=torch.randn(3, 1, 8, 8))
    assert sparsifier._masker.budget.costs == (64.0, 16.0, 16.0, 64.0, 64.0)


def test_expected_multiplications_stay_within_the_budget():
    model, optimizer, sparsifier = begin(
        "conv", cost="flops", freeze_at=None, example_inputs=torch.randn(1, 1, 6, 6)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", probmask.LayerCollapseWarning)
        train(model, optimizer, make_batches("conv", STEPS))
    probs = [p.detach().double() for p in probs_of(model).values()]
    expected = 36 * float(probs[0].sum()) + 1 * float(probs[1].sum())
    total = 36 * 36 + 432
    assert expected <= 0.2 * total * (1 + 1e-6)
    assert sparsifier.now.step == STEPS


def test_a_transformer_can_be_budgeted_in_multiplications():
    example = torch.randint(20, (1, 5))
    _, _, spent, total = flops("transformer", example, 0.5, min_keep_per_layer=1)
    assert 0.49 < sum(spent) / total <= 0.5


def test_multiplications_need_an_example():
    with pytest.raises(
        probmask.InputError,
        match=r"attach\(example_inputs=None\): a budget in FLOPs needs a batch.*example_inputs=",
    ):
        begin(cost="flops")


def test_a_least_that_costs_more_than_the_budget_is_refused_at_once():
    """Not at the end, when the mask is chosen and the training time is spent."""
    with pytest.raises(probmask.InputError, match="min_keep_per_layer"):
        begin(
            "conv",
            cost="flops",
            sparsity=0.99,
            min_keep_per_layer=1,
            example_inputs=torch.randn(1, 1, 6, 6),
        )


def test_layerwise_multiplications():
    example = torch.randn(1, 1, 8, 8)
    _, summary, spent, total = flops("unet", example, 0.5, scope="layer")
    for layer in summary.layers:
        assert abs(layer.kept - 0.5 * layer.size) <= 1
    assert sum(spent) == pytest.approx(0.5 * total, rel=0.02)


# Draws


def test_two_draws_are_the_mean_of_two_masks():
    model, _, sparsifier = begin(draws=2)
    batch = make_batches("mlp", 1)[0]
    masks = [model[i].parametrizations.weight[0] for i in (0, 2, 4)]
    with torch.no_grad():
        for mask in masks:
            mask.prob.fill_(0.6)  # away from s = 1, where the noise has no effect
    shares, noises = [], []
    for share in sparsifier.draws():
        shares.append(share)
        noises.append([mask.key.clone() for mask in masks])
        (share * loss_of(model, batch)).backward()
    together = [mask.prob.grad.clone() for mask in masks]
    assert shares == [0.5, 0.5]
    assert sparsifier.draw_count == 2
    assert not torch.equal(noises[0][0], noises[1][0])
    model.zero_grad()
    for noise in noises:
        for mask, key in zip(masks, noise, strict=True):
            mask.key.copy_(key)
        (loss_of(model, batch) / 2).backward()
    for mask, expected in zip(masks, together, strict=True):
        assert torch.equal(mask.prob.grad, expected)


def test_each_update_sees_different_masks_even_after_a_skipped_one():
    """GradScaler drops an update: its draws must not be mixed into the next."""
    model, optimizer, sparsifier = begin(draws=2)
    batch = make_batches("mlp", 1)[0]

    def one_update():
        seen = []
        for share in sparsifier.draws():
            seen.append(model[0].parametrizations.weight[0].noise.clone())
            (share * loss_of(model, batch)).backward()
        return seen

    first = one_update()
    optimizer.zero_grad()  # no step()
    second = one_update()
    assert not torch.equal(*first)
    assert not torch.equal(*second)


def test_draws_that_are_not_drawn_are_refused():
    model, optimizer, sparsifier = begin(draws=2)
    before = state_of(model)
    with pytest.raises(
        probmask.InputError,
        match=r"ProbMask\(draws=2\): this update saw 1 of them; wrap forward and backward in "
        r"'for share in sparsifier\.draws\(\):'\.",
    ):
        step(model, optimizer, make_batches("mlp", 1)[0])
    assert_same_state(before, state_of(model))
    assert sparsifier.now.step == 0


def test_draws_reach_the_exact_budget_too():
    for draws in (2, 3):
        _, sparsifier = run(draws=draws, min_keep_per_layer=1)
        assert sparsifier.finalize().kept == 80


def test_one_draw_works_inside_the_loop_of_draws():
    inside, _ = run(min_keep_per_layer=1)
    model, optimizer, _ = begin(min_keep_per_layer=1)
    train(model, optimizer, make_batches("mlp", STEPS))
    assert_same_state(state_of(inside), state_of(model))


# Supermasks and where weights come from


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_supermask_trains_no_weight(made):
    model = build("unet")
    early = sgd(model)
    sparsifier = probmask.attach(
        model,
        probmask.ProbMask(sparsity=0.5, train_weights=False, min_keep_per_layer=1),
        total_steps=STEPS,
        seed=1,
    )
    optimizer = early if made == "before" else sgd(model)
    weights = [site.weight.detach().clone() for site in sparsifier.sites]
    bias = model.head[3].bias.detach().clone()
    gamma = model.down[1].weight.detach().clone()
    train(model, optimizer, make_batches("unet", STEPS))
    for weight, site in zip(weights, sparsifier.sites, strict=True):
        assert torch.equal(weight, site.weight)
    assert not torch.equal(model.head[3].bias, bias)
    assert not torch.equal(model.down[1].weight, gamma)
    moved = [prob.detach().unique().numel() for prob in probs_of(model).values()]
    assert min(moved) > 1
    summary = sparsifier.finalize()
    for weight, site, layer in zip(weights, sparsifier.sites, summary.layers, strict=True):
        kept = site.weight != 0
        assert torch.equal(site.weight[kept], weight[kept])
        assert int(kept.sum()) == layer.kept


def test_supermask_weights_are_drawn_from_kaimings_normal():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 64, 3), nn.Conv2d(64, 64, 3, groups=4), nn.Flatten(), nn.Linear(400, 300)
    )
    given = [model[i].weight.detach().clone() for i in (0, 1, 3)]
    method = probmask.ProbMask(sparsity=0.5, train_weights=False)
    probmask.attach(model, method, total_steps=5, seed=0)
    fans = [16 * 9, 16 * 9, 400]
    for layer, fan_in, old in zip((model[0], model[1], model[3]), fans, given, strict=True):
        weight = layer.parametrizations.weight.original.detach()
        assert not torch.equal(weight, old)
        assert not weight.requires_grad
        assert weight.mean().abs() < 3 * math.sqrt(2 / fan_in / weight.numel())
        assert weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.03)
        # Normal, not uniform: 4.6 % lie beyond two deviations.
        beyond = (weight.abs() > 2 * math.sqrt(2 / fan_in)).float().mean().item()
        assert beyond == pytest.approx(0.0455, abs=0.01)


def test_supermask_weights_depend_on_the_seed_alone():
    """`seed` decides all noise: the drawn weights are part of it."""
    drawn = []
    for start in (1, 2):
        model = build("mlp")
        torch.manual_seed(start)
        method = probmask.ProbMask(sparsity=0.5, train_weights=False)
        probmask.attach(model, method, total_steps=5, seed=0)
        drawn.append(model[0].parametrizations.weight.original.detach().clone())
    assert torch.equal(*drawn)


@pytest.mark.parametrize("train_weights", [True, False])
def test_given_weights_are_kept_when_asked(train_weights):
    model = build("mlp")
    given = state_of(model)
    begin(model=model, train_weights=train_weights, reinitialize=False)
    for i in (0, 2, 4):
        assert torch.equal(model[i].parametrizations.weight.original, given[f"{i}.weight"])


def test_training_starts_from_the_weights_given_unless_told_otherwise():
    model = build("mlp")
    given = state_of(model)
    begin(model=model)
    assert torch.equal(model[0].parametrizations.weight.original, given["0.weight"])
    model = build("mlp")
    begin(model=model, reinitialize=True)
    assert not torch.equal(model[0].parametrizations.weight.original, given["0.weight"])
    assert model[0].parametrizations.weight.original.requires_grad


def test_a_supermask_of_a_parameter_without_a_fan_is_refused_in_our_words():
    model = build("mlp")
    method = probmask.ProbMask(sparsity=0.5, train_weights=False)
    with pytest.raises(probmask.InputError, match=r"0\.bias"):
        probmask.attach(model, method, total_steps=5, include=["0.bias"])


def test_a_pretrained_start():
    """A trained network loses little: the forward pass begins as the dense one."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 6)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    batch = (inputs, labels)
    model = build("mlp")
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), [batch] * 200)
    dense = model(inputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sparsifier = probmask.attach(
        model, probmask.ProbMask(sparsity=0.5), optimizer=optimizer, total_steps=200, seed=0
    )
    assert torch.equal(model(inputs), dense)  # every probability is 1
    train(model, optimizer, [batch] * 200)
    sparsifier.finalize()
    assert (model(inputs).argmax(1) == labels).float().mean() > 0.9


# The final choice


def test_a_sample_has_about_the_size_of_the_budget():
    sizes = []
    for seed in range(20):
        model, _, sparsifier = begin(select="sample", seed=seed, sparsity=0.7)
        with torch.no_grad():
            for prob in probs_of(model).values():
                prob.fill_(0.3)
        sizes.append(sparsifier.finalize().kept)
    deviation = math.sqrt(400 * 0.3 * 0.7)
    assert abs(sum(sizes) / 20 - 120) < 4 * deviation / math.sqrt(20)
    assert len(set(sizes)) > 5


def test_a_sample_follows_the_probabilities_and_only_the_seed_decides_it():
    masks = []
    for _ in range(2):
        model, _, sparsifier = begin(select="sample", seed=3, sparsity=0.7)
        with torch.no_grad():
            for index, prob in enumerate(probs_of(model).values()):
                prob.copy_((torch.arange(prob.numel()).view_as(prob) % 2) * (0.5 if index else 1))
        sparsifier.finalize()
        masks.append(torch.cat([model[i].weight.flatten() != 0 for i in (0, 2, 4)]))
        assert torch.equal(masks[-1][:96], torch.arange(96) % 2 == 1)
    assert torch.equal(*masks)


def test_the_top_is_chosen_by_probability_then_by_magnitude():
    model, _, sparsifier = begin(sparsity=0.75)
    with torch.no_grad():
        for prob in probs_of(model).values():
            prob.fill_(0.5)
        probs_of(model)["0.parametrizations.weight.0.prob"][0] = 0.9
    weights = [model[i].parametrizations.weight.original.detach().clone() for i in (0, 2, 4)]
    sparsifier.finalize()
    assert (model[0].weight[0] != 0).all()
    rest = torch.cat([weights[0][1:].flatten(), weights[1].flatten(), weights[2].flatten()])
    kept = torch.cat([model[0].weight[1:].flatten(), *(model[i].weight.flatten() for i in (2, 4))])
    assert int((kept != 0).sum()) == 94
    assert rest[kept != 0].abs().min() >= rest[kept == 0].abs().max()


# Schedules


def temperatures(**settings):
    model, optimizer, sparsifier = begin(min_keep_per_layer=1, **settings)
    seen = []
    for batch in make_batches("mlp", STEPS):
        seen.append(
            (
                model[0].parametrizations.weight[0].temperature.item(),
                sparsifier._trainables[0].optimizer.param_groups[0]["lr"],
            )
        )
        step(model, optimizer, batch)
        seen[-1] += (
            sparsifier._trainables[0].optimizer.param_groups[0]["lr"],
            sparsifier.metrics()["kept_fraction"],
        )
    return seen


def test_schedules_per_step():
    rate = 6e-3 * (58_800 / STEPS) ** (1 / 3)
    for count, (tau, _, lr, kept) in enumerate(temperatures(freeze_at=None)):
        assert tau == pytest.approx(0.97 * (1 - count / STEPS) + 0.03, rel=1e-6)
        assert lr == pytest.approx(rate * (1 + math.cos(math.pi * count / STEPS)) / 2, rel=1e-9)
        assert kept == pytest.approx(
            schedules.kept_fraction(count / STEPS, 0.2, begin=0.05, end=0.5)
        )


def test_schedules_per_epoch():
    seen = temperatures(freeze_at=None, every="epoch", steps_per_epoch=4, prob_lr=0.01)
    for count, (tau, _, lr, kept) in enumerate(seen):
        done = (count // 4) / 5
        assert tau == pytest.approx(0.97 * (1 - done) + 0.03, rel=1e-6)
        assert lr == pytest.approx(0.01 * (1 + math.cos(math.pi * done)) / 2, rel=1e-9)
        assert kept == pytest.approx(schedules.kept_fraction(done, 0.2, begin=0.05, end=0.5))


def test_other_temperatures_and_ramps():
    seen = temperatures(
        freeze_at=None, temperature_start=0.5, temperature_end=0.1, ramp_begin=0.5, ramp_end=0.5
    )
    assert seen[0][0] == pytest.approx(0.5)
    assert seen[10][0] == pytest.approx(0.3)
    assert [kept for *_, kept in seen] == pytest.approx([1.0] * 10 + [0.2] * 10)


@pytest.mark.parametrize(
    ("freeze_at", "first"), [(0.0, 1), (0.5, 11), (0.7, 15), (0.97, None), (None, None)]
)
def test_the_mask_is_frozen_from_its_moment_on(freeze_at, first):
    """Frozen by the first update at or after that part of the training."""
    model, optimizer, sparsifier = begin(freeze_at=freeze_at, min_keep_per_layer=1)
    frozen = []
    for batch in make_batches("mlp", STEPS):
        step(model, optimizer, batch)
        frozen.append(sparsifier._masker.frozen)
    expected = STEPS + 1 if first is None else first
    assert frozen == [count + 1 >= expected for count in range(STEPS)]
    if first is not None:
        assert sum(int(model[i].weight.count_nonzero()) for i in (0, 2, 4)) == 80


def test_the_rate_of_the_probabilities_is_raised_for_short_trainings():
    rates = [begin(total_steps=total)[2]._masker.prob_lr for total in (1000, 58_800, 1_000_000)]
    assert rates == pytest.approx([6e-3 * 58.8 ** (1 / 3), 6e-3, 6e-3])
    assert begin(prob_lr=0.5)[2]._masker.prob_lr == 0.5
    assert begin(compat="official", total_steps=10, steps_per_epoch=5)[2]._masker.prob_lr == 6e-3


# Seeds


def test_the_same_seed_gives_the_same_bits_and_another_another():
    runs = [state_of(run(seed=seed, min_keep_per_layer=1)[0]) for seed in (1, 1, 2)]
    assert_same_state(runs[0], runs[1])
    name = "0.parametrizations.weight.0.prob"
    assert not torch.equal(runs[0][name], runs[2][name])


def test_the_noise_does_not_depend_on_or_disturb_the_generator_of_pytorch():
    model, optimizer, _ = begin(min_keep_per_layer=1)
    plain, plain_optimizer, _ = begin(min_keep_per_layer=1)
    for batch in make_batches("mlp", STEPS):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        step(model, optimizer, batch)
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(7)
        step(plain, plain_optimizer, batch)
    assert_same_state(state_of(model), state_of(plain))


# Layer collapse


def starve(model, name, value=0.0):
    """Leave one layer without a chance: at a temperature below 1 there is no way back from 0."""
    with torch.no_grad():
        probs_of(model)[name].fill_(value)


@pytest.mark.filterwarnings("error::probmask.LayerCollapseWarning")
def test_a_layer_that_loses_all_its_weights_is_named():
    model, optimizer, sparsifier = begin(freeze_at=None, temperature_start=0.5)
    starve(model, "2.parametrizations.weight.0.prob")
    with pytest.warns(
        probmask.LayerCollapseWarning,
        match=r"2\.weight is losing all of its weights; min_keep_per_layer=1 forbids it \(on the "
        r"command line: --set method\.min_keep_per_layer=1\)\.$",
    ):
        step(model, optimizer, make_batches("mlp", 1)[0])
    layers = sparsifier.finalize().layers  # said once: not again
    assert [layer.kept > 0 for layer in layers] == [True, False, True]


def test_a_collapse_at_the_end_is_named_too():
    model, _, sparsifier = begin(sparsity=0.9)
    starve(model, "4.parametrizations.weight.0.prob")
    with pytest.warns(probmask.LayerCollapseWarning, match=r"4\.weight"):
        summary = sparsifier.finalize()
    assert summary.layers[2].kept == 0
    assert summary.kept == 40


def test_a_sample_that_empties_a_layer_is_named_too():
    model, _, sparsifier = begin(select="sample", sparsity=0.9)
    starve(model, "4.parametrizations.weight.0.prob")
    with pytest.warns(probmask.LayerCollapseWarning, match=r"4\.weight"):
        assert sparsifier.finalize().layers[2].kept == 0


@pytest.mark.parametrize("least", [1, 5])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_least_per_layer_is_kept_and_the_total_stays_exact(least, scope):
    model, _, sparsifier = begin(min_keep_per_layer=least, scope=scope, sparsity=0.93)
    starve(model, "2.parametrizations.weight.0.prob")
    summary = sparsifier.finalize()
    assert summary.kept == 400 - round(0.93 * 400)
    assert all(layer.kept >= least for layer in summary.layers)
    assert model[2].weight.count_nonzero() == summary.layers[1].kept


@pytest.mark.filterwarnings("error::probmask.LayerCollapseWarning")
def test_no_warning_of_what_is_forbidden():
    """min_keep_per_layer=1 given: there is nothing to warn of, and no advice to take."""
    model, optimizer, sparsifier = begin(min_keep_per_layer=1, temperature_start=0.5)
    starve(model, "2.parametrizations.weight.0.prob")
    step(model, optimizer, make_batches("mlp", 1)[0])
    assert sparsifier.finalize().layers[1].kept >= 1


def test_a_least_in_multiplications():
    model, _, sparsifier = begin(
        "unet",
        cost="flops",
        min_keep_per_layer=3,
        sparsity=0.9,
        example_inputs=torch.randn(1, 1, 8, 8),
    )
    starve(model, "up.parametrizations.weight.0.prob")
    costs = sparsifier._masker.budget.costs
    layers = sparsifier.finalize().layers
    assert all(layer.kept >= 3 for layer in layers)
    spent = sum(cost * layer.kept for cost, layer in zip(costs, layers, strict=True))
    total = sum(cost * layer.size for cost, layer in zip(costs, layers, strict=True))
    assert spent <= 0.1 * total * (1 + 1e-9)


def test_a_least_that_a_sample_would_ignore_is_refused_or_kept():
    try:
        model, _, sparsifier = begin(select="sample", min_keep_per_layer=2, sparsity=0.9)
    except probmask.InputError as error:
        assert "select='sample'" in str(error)  # noqa: PT017 - either answer is right
        return
    starve(model, "2.parametrizations.weight.0.prob")
    assert sparsifier.finalize().layers[1].kept >= 2


def test_a_layer_smaller_than_the_least_is_kept_whole():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 40))
    _, _, sparsifier = begin(model=model, min_keep_per_layer=10, sparsity=0.5)
    starve(model, "0.parametrizations.weight.0.prob")
    assert [layer.kept for layer in sparsifier.finalize().layers] == [4, 38]


def test_more_than_the_budget_cannot_be_the_least():
    with pytest.raises(
        probmask.InputError,
        match=r"ProbMask\(min_keep_per_layer=30\): 3 layers would keep 90 weights, "
        r"the budget is 80; lower it\.",
    ):
        begin(min_keep_per_layer=30)


# Summaries and metrics


def test_the_summary_says_what_would_be_kept_now():
    model, optimizer, sparsifier = begin(min_keep_per_layer=1)
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


def test_metrics_describe_the_moment():
    model, optimizer, sparsifier = begin(min_keep_per_layer=1, freeze_at=None)
    assert sparsifier.metrics()["expected_sparsity"] == 0
    train(model, optimizer, make_batches("mlp", STEPS))
    metrics = sparsifier.metrics()
    probs = torch.cat([prob.detach().flatten() for prob in probs_of(model).values()])
    assert metrics["expected_sparsity"] == pytest.approx(1 - probs.mean().item(), abs=1e-6)
    assert metrics["kept_fraction"] == pytest.approx(0.2)
    undecided = int(((probs > 0.05) & (probs < 0.95)).sum())
    assert metrics["undecided_per_kept"] == undecided / 80


def test_clipping_is_joint():
    """With clip_norm the gradient of weights and probabilities together has at most that norm."""
    model, optimizer, _ = begin(clip_norm=0.01, freeze_at=None)
    with torch.no_grad():
        for prob in probs_of(model).values():
            prob.fill_(0.5)
    loss_of(model, make_batches("mlp", 1)[0]).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    of_weights = torch.stack([p.grad.norm() for p in optimizer.param_groups[0]["params"]]).norm()
    assert norm > 1.001 * of_weights > 0.01  # both have a part in it
    before = model[0].bias.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model[0].bias.grad, before * 0.01 / norm, rtol=1e-4, atol=0)


@pytest.mark.parametrize("cost", ["params", "flops"])
def test_a_layer_that_must_keep_something_stays_alive_during_training(cost):
    """At 99.9 % the narrow layer would lose everything, and with it every gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 3), nn.ReLU(), nn.Linear(3, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    method = probmask.ProbMask(sparsity=0.997, cost=cost, min_keep_per_layer=1, freeze_at=None)
    sparsifier = probmask.attach(
        model,
        method,
        optimizer=optimizer,
        total_steps=200,
        seed=1,
        example_inputs=torch.zeros(1, 20),
    )
    x, y = torch.randn(64, 20), torch.randint(5, (64,))
    probs = list(probs_of(model).values())
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert all(float(prob.detach().double().sum()) >= 1 - 1e-6 for prob in probs)
    assert sum(float(p.detach().double().sum()) for p in probs) <= 21 * (1 + 1e-6)
    assert all(layer.kept >= 1 for layer in sparsifier.finalize().layers)


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(probmask.InputError, match=r"of 400 weights none would be kept"):
        begin(sparsity=0.9999)


@pytest.mark.parametrize("settings", [{"every": "epoch"}, {"compat": "official"}])
def test_what_counts_in_epochs_must_be_told_how_long_one_is(settings):
    with pytest.raises(probmask.InputError, match="pass steps_per_epoch= to attach"):
        begin(**settings)
