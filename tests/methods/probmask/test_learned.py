"""Learned probabilities: their noise, Adam, the projection, draws, samples, supermasks."""

import math
import warnings

import pytest
import torch
from torch import nn

import probmask
from probmask.core import schedules
from reference import probmask_run
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
from reference.probmask_run import STEPS, starve


def begin(*arguments, **settings):
    return probmask_run.begin(*arguments, **{"form": "learned", **settings})


def run(**settings):
    return probmask_run.run(**{"form": "learned", **settings})


# The budget


def test_probabilities_stay_within_the_current_budget():
    model, optimizer, sparsifier = begin(total_steps=50, min_keep_per_layer=1)
    for count, batch in enumerate(make_batches("mlp", 50)):
        step(model, optimizer, batch)
        probs = [prob.detach().double() for prob in probs_of(model).values()]
        assert all(((p >= 0) & (p <= 1)).all() for p in probs)
        budget = 400 * schedules.kept_fraction(count / 50, 0.2, begin=0.05, end=0.5)
        assert sum(float(p.sum()) for p in probs) <= budget * (1 + 1e-6)
        following = schedules.kept_fraction((count + 1) / 50, 0.2, begin=0.05, end=0.5)
        if count < 30:  # frozen by then
            assert sparsifier.metrics()["kept_fraction"] == pytest.approx(following, abs=1e-12)


def test_the_layer_budget_also_holds_for_the_probabilities():
    model, optimizer, _ = begin(scope="layer", freeze_at=1)
    train(model, optimizer, make_batches("mlp", STEPS))
    for prob in probs_of(model).values():
        assert float(prob.detach().double().sum()) <= 0.2 * prob.numel() * (1 + 1e-6)


def test_the_costs_are_the_macs_per_weight():
    _, _, sparsifier = begin("unet", cost="flops", example_inputs=torch.randn(3, 1, 8, 8))
    assert sparsifier._masker.budget.costs == (64.0, 16.0, 16.0, 64.0, 64.0)


def test_expected_multiplications_stay_within_the_budget():
    model, optimizer, sparsifier = begin(
        "conv", cost="flops", freeze_at=1, example_inputs=torch.randn(1, 1, 6, 6)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", probmask.LayerCollapseWarning)
        train(model, optimizer, make_batches("conv", STEPS))
    probs = [p.detach().double() for p in probs_of(model).values()]
    expected = 36 * float(probs[0].sum()) + 1 * float(probs[1].sum())
    total = 36 * 36 + 432
    assert expected <= 0.2 * total * (1 + 1e-6)
    assert sparsifier.now.step == STEPS


# Draws


def test_two_draws_are_the_mean_of_two_masks():
    model, _, sparsifier = begin(draws=2)
    batch = make_batches("mlp", 1)[0]
    masks = [model[i]._masked_weights["weight"] for i in (0, 2, 4)]
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
    for mask in masks:
        mask.prob.grad = None
    for noise in noises:
        for mask, key in zip(masks, noise, strict=True):
            mask.key.copy_(key)
        (loss_of(model, batch) / 2).backward()
    for mask, expected in zip(masks, together, strict=True):
        assert torch.equal(mask.prob.grad, expected)


def test_each_update_sees_different_masks_even_after_a_skipped_one():
    """GradScaler skips an update: its draws must not affect the next one."""
    model, optimizer, sparsifier = begin(draws=2)
    batch = make_batches("mlp", 1)[0]

    def one_update():
        seen = []
        for share in sparsifier.draws():
            seen.append(model[0]._masked_weights["weight"].noise.clone())
            (share * loss_of(model, batch)).backward()
        return seen

    first = one_update()
    optimizer.zero_grad()  # no step()
    second = one_update()
    assert not torch.equal(*first)
    assert not torch.equal(*second)


def test_missing_draws_raise():
    model, optimizer, sparsifier = begin(draws=2)
    before = state_of(model)
    with pytest.raises(
        probmask.InputError,
        match=r"ProbMask\(draws=2\): this update used 1 of them; run forward and backward passes "
        r"inside 'for share in sparsifier\.draws\(\):'\.",
    ):
        step(model, optimizer, make_batches("mlp", 1)[0])
    assert_same_state(before, state_of(model))
    assert sparsifier.now.step == 0


def test_draws_reach_the_exact_budget_too():
    for draws in (2, 3):
        _, sparsifier = run(draws=draws, min_keep_per_layer=1)
        assert sparsifier.finalize().kept == 80


# Supermasks


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
    sparsifier.use(optimizer)
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
        weight = layer._parameters["weight"].detach()
        assert not torch.equal(weight, old)
        assert not weight.requires_grad
        assert weight.mean().abs() < 3 * math.sqrt(2 / fan_in / weight.numel())
        assert weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.03)
        # Normal, not uniform: 4.6 % lie beyond two deviations.
        beyond = (weight.abs() > 2 * math.sqrt(2 / fan_in)).float().mean().item()
        assert beyond == pytest.approx(0.0455, abs=0.01)


def test_supermask_weights_depend_on_the_seed_alone():
    """`seed` determines all noise, including the drawn weights."""
    drawn = []
    for start in (1, 2):
        model = build("mlp")
        torch.manual_seed(start)
        method = probmask.ProbMask(sparsity=0.5, train_weights=False)
        probmask.attach(model, method, total_steps=5, seed=0)
        drawn.append(model[0]._parameters["weight"].detach().clone())
    assert torch.equal(*drawn)


def test_a_supermask_of_given_weights():
    model = build("mlp")
    given = state_of(model)
    begin(model=model, train_weights=False, reinitialize=False)
    for i in (0, 2, 4):
        assert torch.equal(model[i]._parameters["weight"], given[f"{i}.weight"])


def test_a_supermask_of_a_parameter_without_fan_in_raises():
    model = build("mlp")
    method = probmask.ProbMask(sparsity=0.5, train_weights=False)
    with pytest.raises(probmask.InputError, match=r"0\.bias"):
        probmask.attach(model, method, total_steps=5, include=["0.bias"])


# The final masks


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


def test_a_sample_depends_on_the_probabilities_and_the_seed_only():
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
        probs_of(model)["0.weight"][0] = 0.9
    weights = [model[i]._parameters["weight"].detach().clone() for i in (0, 2, 4)]
    sparsifier.finalize()
    assert (model[0].weight[0] != 0).all()
    rest = torch.cat([weights[0][1:].flatten(), weights[1].flatten(), weights[2].flatten()])
    kept = torch.cat([model[0].weight[1:].flatten(), *(model[i].weight.flatten() for i in (2, 4))])
    assert int((kept != 0).sum()) == 94
    assert rest[kept != 0].abs().min() >= rest[kept == 0].abs().max()


def test_a_sample_that_empties_a_layer_causes_a_warning():
    model, _, sparsifier = begin(select="sample", sparsity=0.9)
    starve(model, "4")
    with pytest.warns(probmask.LayerCollapseWarning, match=r"4\.weight"):
        assert sparsifier.finalize().layers[2].kept == 0


# Schedules


def temperatures(**settings):
    model, optimizer, sparsifier = begin(min_keep_per_layer=1, **settings)
    seen = []
    for batch in make_batches("mlp", STEPS):
        seen.append(
            (
                model[0]._masked_weights["weight"].temperature.item(),
                sparsifier.metrics()["kept_fraction"],
            )
        )
        step(model, optimizer, batch)
        seen[-1] += (sparsifier._trainables[0].optimizer.param_groups[0]["lr"],)
    return seen


def test_schedules_per_step():
    rate = 6e-3 * (58_800 / STEPS) ** (1 / 3)
    for count, (tau, kept, lr) in enumerate(temperatures(freeze_at=1)):
        assert tau == pytest.approx(0.97 * (1 - count / STEPS) + 0.03, rel=1e-6)
        assert lr == pytest.approx(rate * (1 + math.cos(math.pi * count / STEPS)) / 2, rel=1e-9)
        assert kept == pytest.approx(
            schedules.kept_fraction(count / STEPS, 0.2, begin=0.05, end=0.5)
        )


def test_schedules_per_epoch():
    seen = temperatures(freeze_at=1, every="epoch", steps_per_epoch=4, prob_lr=0.01)
    for count, (tau, kept, lr) in enumerate(seen):
        done = (count // 4) / 5
        assert tau == pytest.approx(0.97 * (1 - done) + 0.03, rel=1e-6)
        assert lr == pytest.approx(0.01 * (1 + math.cos(math.pi * done)) / 2, rel=1e-9)
        assert kept == pytest.approx(schedules.kept_fraction(done, 0.2, begin=0.05, end=0.5))


def test_other_temperatures_and_ramps():
    seen = temperatures(
        freeze_at=1, temperature_start=0.5, temperature_end=0.1, ramp_begin=0.5, ramp_end=0.5
    )
    assert seen[0][0] == pytest.approx(0.5)
    assert seen[10][0] == pytest.approx(0.3)
    assert [kept for _, kept, _ in seen] == pytest.approx([1.0] * 10 + [0.2] * 10)


def test_the_rate_of_the_probabilities_is_raised_for_short_trainings():
    rates = [begin(total_steps=total)[2]._masker.prob_lr for total in (1000, 58_800, 1_000_000)]
    assert rates == pytest.approx([6e-3 * 58.8 ** (1 / 3), 6e-3, 6e-3])
    assert begin(prob_lr=0.5)[2]._masker.prob_lr == 0.5
    assert begin(compat="official", total_steps=10, steps_per_epoch=5)[2]._masker.prob_lr == 6e-3


def test_the_papers_rate_does_not_depend_on_the_length():
    _, _, sparsifier = begin(form="paper", total_steps=100, steps_per_epoch=10)
    assert sparsifier._masker.prob_lr == 6e-3
    assert sparsifier.draw_count == 2


# Seeds


def test_another_seed_draws_other_noise():
    runs = [state_of(run(seed=seed, min_keep_per_layer=1)[0]) for seed in (1, 2)]
    name = "0.weight"
    assert not torch.equal(runs[0][name], runs[1][name])


# Metrics and clipping


def test_metrics_describe_the_current_state():
    model, optimizer, sparsifier = begin(min_keep_per_layer=1, freeze_at=1)
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
    model, optimizer, _ = begin(clip_norm=0.01, freeze_at=1)
    with torch.no_grad():
        for prob in probs_of(model).values():
            prob.fill_(0.5)
    loss_of(model, make_batches("mlp", 1)[0]).backward()
    both = [*model.parameters(), *probs_of(model).values()]
    norm = torch.stack([p.grad.norm() for p in both]).norm()
    of_weights = torch.stack([p.grad.norm() for p in optimizer.param_groups[0]["params"]]).norm()
    assert norm > 1.001 * of_weights > 0.01  # both contribute
    before = model[0].bias.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model[0].bias.grad, before * 0.01 / norm, rtol=1e-4, atol=0)


def test_the_released_codes_schedules_count_epochs():
    with pytest.raises(probmask.InputError, match="pass steps_per_epoch= to attach"):
        begin(compat="official")
