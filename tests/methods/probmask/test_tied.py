"""Tied probabilities: the rule, the gradients of pruned weights, schedules, budgets."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

from probmask.masking.macs import macs_per_weight
from probmask.masking.sites import find_sites
from reference import probmask_tied as twin
from reference.networks import (
    assert_same_state,
    build,
    conv_net,
    loss_of,
    make_batches,
    state_of,
    step,
    train,
)
from reference.probmask_run import STEPS, begin, parts


def tied(name="mlp", steps=0, **settings):
    """Return a training with tied probabilities after this number of updates."""
    model, optimizer, sparsifier = begin(name, **settings)
    train(model, optimizer, make_batches(name, steps))
    return model, optimizer, sparsifier


# The rule


@pytest.mark.parametrize("steps", [1, 5, 9, 10, 15, 17])
@pytest.mark.parametrize("name", ["mlp", "conv"])
@pytest.mark.parametrize("settings", [{}, {"temperature_end": 0.1}], ids=str)
def test_the_network_computes_with_the_weight_times_its_probability(settings, name, steps):
    _, _, sparsifier = tied(name, steps, sparsity=0.9, **settings)
    keep = sparsifier._masker.keep
    weights = [weight.double() for _, weight in parts(sparsifier)]
    size = sum(weight.numel() for weight in weights)
    theta = twin.threshold(weights, twin.kept_at(steps / STEPS, keep, size, 0.5))
    end = settings.get("temperature_end", 1 / 3)
    tau = twin.temperature_at(steps / STEPS, 0.5, 1 / 3, end, freeze_at=0.95)
    for (mask, weight), wide in zip(parts(sparsifier), weights, strict=True):
        s = twin.prob(wide, theta, tau)
        torch.testing.assert_close(mask(weight, True).double(), wide * s, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mask.prob(weight).double(), s, rtol=1e-4, atol=1e-4)
        assert torch.equal(mask.active, s > 0)


def test_before_the_first_update_the_network_is_unchanged():
    model, _, sparsifier = tied("conv")
    assert torch.equal(model[0].weight, model[0]._parameters["weight"])
    assert sparsifier.metrics() == {
        "temperature": pytest.approx(1 / 3),
        "expected_sparsity": 0,
        "undecided_per_kept": 0,
        "forgotten": 0,
    }


def test_evaluation_uses_the_final_budget_and_the_current_temperature():
    model, _, sparsifier = tied(steps=3)
    weights = [weight.double() for _, weight in parts(sparsifier)]
    theta = twin.threshold(weights, 80)
    model.eval()
    for layer, wide in zip((model[0], model[2], model[4]), weights, strict=True):
        expected = wide * twin.prob(wide, theta, 1 / 3)
        torch.testing.assert_close(layer.weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_thresholds_stay_fp32_in_other_precisions():
    model, _, sparsifier = tied("conv", steps=14, every="epoch", steps_per_epoch=3)
    before = [(mask.power.clone(), mask.threshold.clone()) for mask, _ in parts(sparsifier)]
    model.to(torch.bfloat16)
    for (mask, _), (power, threshold) in zip(parts(sparsifier), before, strict=True):
        assert mask.power.dtype == mask.threshold.dtype == torch.float32
        assert torch.equal(mask.power, power)
        assert torch.equal(mask.threshold, threshold)


# Gradients


def gradients_of(sparsifier, backward):
    """Return the gradients of the effective weights and of the weights after `backward`."""
    seen = []

    def keep(_, __, output):
        output.retain_grad()
        seen.append(output)

    handles = [mask.register_forward_hook(keep) for mask, _ in parts(sparsifier)]
    backward()
    for handle in handles:
        handle.remove()
    return [output.grad for output in seen], [w.grad for w in sparsifier._masker.weights]


@pytest.mark.parametrize(
    ("settings", "share"),
    [({}, 1.0), ({"sparsity": 0.97}, 0.5), ({"sparsity": 0.97, "outside": 0.25}, 0.25)],
    ids=str,
)
def test_gradients_pass_straight_through_and_are_bounded_for_pruned_weights(settings, share):
    model, optimizer, sparsifier = tied(steps=8, **settings)
    masks = [mask for mask, _ in parts(sparsifier)]
    optimizer.zero_grad()

    def backward():
        # A loss in which few weights have most of the gradient, so that some of them are bounded.
        inputs, labels = make_batches("mlp", 1, seed=7)[0]
        loss_of(model, (inputs * torch.tensor([30.0, 1, 1, 1, 1, 1]), labels)).backward()

    effective, ours = gradients_of(sparsifier, backward)
    active = [mask.active for mask in masks]
    bounded = 0
    for grad, ours_now, kept in zip(effective, ours, active, strict=True):
        expected = twin.tempered(grad.double(), kept, share)
        torch.testing.assert_close(ours_now.double(), expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(ours_now[kept], grad[kept])
        bounded += int((expected.abs() < share * grad.abs() * 0.999)[~kept].sum())
        if kept.any():
            limit = 3 * share * grad[kept].square().mean().sqrt()
            assert ours_now[~kept].abs().max() <= limit * (1 + 1e-5)
    assert bounded > 0


def test_pruned_weights_are_trained_and_return():
    model, optimizer, sparsifier = tied(steps=12)
    before = [(mask.active.clone(), weight.clone()) for mask, weight in parts(sparsifier)]
    train(model, optimizer, make_batches("mlp", 7, seed=5))
    back = 0
    for (active, old), (mask, new) in zip(before, parts(sparsifier), strict=True):
        assert (old != new)[~active].all()
        back += int((mask.active & ~active).sum())
    assert back > 0


def test_an_empty_channel_before_batchnorm_does_not_explode():
    """Its outputs are constant, so BatchNorm divides by the square root of its epsilon."""
    torch.manual_seed(0)
    model = conv_net()
    with torch.no_grad():
        model[0].weight[2].mul_(1e-4)
        model[1].bias.fill_(0.5)  # ReLU passes the gradient of a positive constant
    _, _, sparsifier = begin(model=model, sparsity=0.5, total_steps=2, ramp_end=0.0, forget_by=0)
    mask, weight = parts(sparsifier)[0]
    assert not mask.active[2].any()
    batch = make_batches("conv", 1)[0]
    (raw, *_), (grad, *_) = gradients_of(sparsifier, lambda: loss_of(model, batch).backward())
    kept = grad[mask.active].square().mean().sqrt()
    assert raw[2].abs().max() > 20 * kept
    assert weight.abs()[mask.active].min() < 0.1 * raw[2].abs().max()  # crosses the threshold
    assert grad[2].abs().max() <= 3 * kept * (1 + 1e-5)


@pytest.mark.parametrize("who", ["method", "loop"])
def test_the_joint_gradient_is_clipped_after_the_bound(who):
    """Otherwise a huge gradient in an empty channel would scale all other gradients to zero."""
    model, optimizer, sparsifier = tied(steps=8)
    optimizer.zero_grad()
    batch = make_batches("mlp", 1)[0]
    effective, ours = gradients_of(sparsifier, lambda: loss_of(model, batch).backward())
    assert any(not torch.equal(x, y) for x, y in zip(effective, ours, strict=True))
    bounded = [p.grad.clone() for p in model.parameters()]
    if who == "loop":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    else:
        sparsifier._masker.clip_norm = 0.01
    sparsifier._act_on_gradients()
    norm = torch.stack([grad.norm() for grad in bounded]).norm()
    for p, grad in zip(model.parameters(), bounded, strict=True):
        torch.testing.assert_close(p.grad, grad * 0.01 / norm, rtol=1e-4, atol=1e-9)


def test_each_of_two_backward_passes_is_bounded_separately():
    model, _, sparsifier = tied(steps=8)
    batches = make_batches("mlp", 2, seed=3)
    apart = []
    for batch in batches:
        model.zero_grad()
        loss_of(model, batch).backward()
        apart.append([w.grad.clone() for w in sparsifier._masker.weights])
    model.zero_grad()
    for batch in batches:
        loss_of(model, batch).backward()
    for one, other, weight in zip(*apart, sparsifier._masker.weights, strict=True):
        torch.testing.assert_close(weight.grad, one + other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_kept_weights_are_nonzero_in_every_precision(dtype):
    _, _, sparsifier = begin(model=build("mlp").to(dtype), forget_by=0)
    masker = sparsifier._masker
    masker._lower_thresholds(1.0)
    for mask, weight in parts(sparsifier):
        with torch.no_grad():
            weight[mask.active] = 0.0  # all have fallen below the threshold
    masker._lower_thresholds(0.0)
    assert sum(int(w.count_nonzero()) for w in masker.weights) >= masker.keep
    assert all(bool(w[mask.active].all()) for mask, w in parts(sparsifier))


# Schedules


@pytest.mark.parametrize(
    ("settings", "end"),
    [({}, 0.95), ({"freeze_at": 0.8}, 0.8), ({"ramp_begin": 0.2, "ramp_end": 0.3}, 0.95)],
    ids=str,
)
def test_budget_and_temperature_of_every_update(settings, end):
    model, optimizer, sparsifier = begin(temperature_end=0.005, **settings)
    begin_at, ramp_end = settings.get("ramp_begin", 0), settings.get("ramp_end", 0.5)
    temperatures = []
    for count, batch in enumerate(make_batches("mlp", STEPS)):
        done = count / STEPS
        if done < end:
            metrics = sparsifier.metrics()
            temperatures.append(metrics["temperature"])
            late = max(0, done - ramp_end) / (end - ramp_end)
            assert temperatures[-1] == pytest.approx((1 / 3) * 0.015**late)
            left = 1 - min(1, max(0, done - begin_at) / (ramp_end - begin_at))
            assert metrics["expected_sparsity"] == 1 - round(400 * (0.2 + 0.8 * left**3)) / 400
        step(model, optimizer, batch)
    constant = [t for i, t in enumerate(temperatures) if i / STEPS <= ramp_end]
    assert set(constant) == {1 / 3}
    assert sparsifier.metrics()["temperature"] == pytest.approx(0.005)
    falling = temperatures[len(constant) - 1 :]
    ratios = [b / a for a, b in itertools.pairwise(falling)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_other_temperatures_and_epochs():
    model, optimizer, sparsifier = begin(
        every="epoch",
        steps_per_epoch=5,
        temperature_start=0.5,
        temperature_end=0.02,
        freeze_at=1,
    )
    seen = []
    for batch in make_batches("mlp", STEPS):
        metrics = sparsifier.metrics()
        seen.append((metrics["temperature"], metrics["expected_sparsity"]))
        step(model, optimizer, batch)
    epochs = [seen[i : i + 5] for i in range(0, STEPS, 5)]
    assert all(len(set(epoch)) == 1 for epoch in epochs)
    assert [epoch[0][0] for epoch in epochs] == pytest.approx([0.5, 0.5, 0.5, 0.1])
    assert [epoch[0][1] for epoch in epochs] == pytest.approx([0, 0.7, 0.8, 0.8])


@pytest.mark.parametrize(("freeze_at", "tau"), [(0.5, 1 / 3), (0.7, 0.005), (1, 0.005)])
def test_the_freeze_leaves_the_weights_times_their_probabilities(freeze_at, tau):
    """Exactly the largest weights are kept; from then on only these are trained."""
    model, optimizer, sparsifier = begin(
        "conv", freeze_at=freeze_at, choose_at=freeze_at, temperature_end=0.005, forget_by=0
    )
    train(model, optimizer, make_batches("conv", round(freeze_at * STEPS) - 1))
    assert not sparsifier.frozen
    weights = [weight.double() for _, weight in parts(sparsifier)]
    optimizer.param_groups[0]["lr"] = 0.0  # the next update only freezes
    step(model, optimizer, make_batches("conv", 1, seed=6)[0])
    optimizer.param_groups[0]["lr"] = 0.1
    assert sparsifier.frozen
    keep = 468 - round(0.8 * 468)
    theta = twin.threshold(weights, keep)
    kept = []
    for (mask, weight), wide in zip(parts(sparsifier), weights, strict=True):
        expected = wide * twin.prob(wide, theta, tau)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(mask(weight, True), weight)
        assert mask.initial is None
        kept.append(weight != 0)
    assert sum(int(each.sum()) for each in kept) == keep
    train(model, optimizer, make_batches("conv", 3, seed=8))
    for (mask, weight), each in zip(parts(sparsifier), kept, strict=True):
        assert torch.equal(mask(weight, True) != 0, each)
    assert sparsifier.finalize().kept == keep


def test_initial_values_left_at_the_freeze_stay():
    model, optimizer, sparsifier = tied(
        "conv", steps=6, freeze_at=0.25, ramp_end=0.2, forget_by=0.5
    )
    assert sparsifier.metrics()["forgotten"] == pytest.approx(0.5)
    assert all(mask.initial is None for mask, _ in parts(sparsifier))
    train(model, optimizer, make_batches("conv", 3, seed=4))
    assert sparsifier.metrics()["forgotten"] == pytest.approx(0.5)


# Convergence


def test_probabilities_converge_and_the_histogram_counts_every_weight():
    model, optimizer, sparsifier = begin("conv", total_steps=100)
    undecided, counts = [], []
    for batch in make_batches("conv", 94):
        step(model, optimizer, batch)
        metrics = sparsifier.metrics()
        histogram = sparsifier.histograms()["prob"]
        assert sum(histogram.counts) == 468
        assert (histogram.low, histogram.high) == (0, 1)
        undecided.append(metrics["undecided_per_kept"])
        counts.append(histogram.counts)
    probs = torch.cat([mask.prob(weight).flatten() for mask, weight in parts(sparsifier)])
    between = int(((probs > 0.05) & (probs < 0.95)).sum())
    assert undecided[-1] == between / 94
    assert undecided[-1] < 0.2 < 0.5 < undecided[88]
    assert sum(counts[-1][1:-1]) < 0.2 * sum(counts[88][1:-1])
    step(model, optimizer, batch)
    assert sparsifier.frozen
    assert sparsifier.histograms() == {}
    assert sparsifier.metrics()["undecided_per_kept"] == 0


def test_lowering_the_threshold_does_not_change_the_network():
    model, optimizer, sparsifier = tied("conv", steps=85, total_steps=100, forget_by=0)
    batch = make_batches("conv", 1, seed=3)[0]
    model[1].eval()
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    outputs, thresholds, least = [], [], []
    for _ in range(12):
        outputs.append(model(batch[0]).detach())
        thresholds.append([float(mask.threshold) for mask, _ in parts(sparsifier)])
        probs = torch.cat([mask.prob(weight).flatten() for mask, weight in parts(sparsifier)])
        assert int((probs > 0).sum()) == 94
        least.append(float(probs[probs > 0].min()))
        step(model, optimizer, batch)
    for output in outputs:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-5)
    for one, other in thresholds:
        assert one == other
    first = thresholds[0][0]
    falls = [1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0]
    assert [t[0] for t in thresholds] == pytest.approx([first * f for f in falls], abs=1e-6)
    assert least[:6] == pytest.approx([least[0]] * 6)
    assert least == sorted(least)
    assert least[0] < 0.5
    assert least[-1] == 1


def test_masks_do_not_change_after_the_final_selection():
    model, optimizer, sparsifier = tied("conv", steps=91, total_steps=100)
    chosen = [mask.active.clone() for mask, _ in parts(sparsifier)]
    with torch.no_grad():
        for (_, weight), active in zip(parts(sparsifier), chosen, strict=True):
            weight.mul_(torch.where(active, 1.0, 100.0))  # far above the threshold
    model.eval()
    for layer, active in zip((model[0], model[4]), chosen, strict=True):
        assert torch.equal(layer.weight != 0, active)
    model.train()
    train(model, optimizer, make_batches("conv", 9))
    sparsifier.finalize()
    for layer, active in zip((model[0], model[4]), chosen, strict=True):
        assert torch.equal(layer.weight != 0, active)


def test_a_kept_weight_below_the_threshold_falls_with_it_but_is_never_zero():
    model, optimizer, sparsifier = tied("conv", steps=90, total_steps=100)
    mask, weight = parts(sparsifier)[0]
    place = mask.active.flatten().nonzero()[0]
    first = float(mask.threshold)
    for group in optimizer.param_groups:
        group.update(lr=0.0)
    with torch.no_grad():
        weight.view(-1)[place] = -0.5 * first
    seen = []
    for batch in make_batches("conv", 5):
        step(model, optimizer, batch)
        seen.append(float(weight.detach().view(-1)[place]))
    falls = [-0.8, -0.6, -0.4, -0.2, -(2.0**-20)]
    assert seen == pytest.approx([fall * first for fall in falls], rel=1e-3)
    sparsifier.finalize()
    assert int(sum(layer.weight.count_nonzero() for layer in (model[0], model[4]))) == 94


@pytest.mark.parametrize("steps", [5, 60, 91, 93, 94])
@pytest.mark.parametrize("settings", [{}, {"cost": "flops"}, {"choose_at": 1, "freeze_at": 1}])
def test_every_kept_weight_is_nonzero_wherever_training_ends(settings, steps):
    batches = make_batches("conv", steps)
    model, optimizer, sparsifier = begin(
        "conv", total_steps=100, example_inputs=batches[0][0], **settings
    )
    for group in optimizer.param_groups:
        group.update(lr=0.5)  # so that some fall below the threshold
    train(model, optimizer, batches)
    kept = sparsifier.finalize().kept
    assert kept > 50
    assert int(sum(layer.weight.count_nonzero() for layer in (model[0], model[4]))) == kept


@pytest.mark.parametrize("steps", [89, 92, 94, 97])
def test_the_masks_follow_from_the_weights_alone(steps):
    """A network with only these weights, such as an averaged copy, has the same mask."""
    model, _, sparsifier = tied("conv", steps=steps, total_steps=100)
    copied, _, other = tied("conv", total_steps=100)
    copied.load_state_dict(model.state_dict())
    sparsifier._masker.refresh_masks()
    other._masker.refresh_masks()
    for (mask, _), (same, _) in zip(parts(sparsifier), parts(other), strict=True):
        assert torch.equal(mask.mask, same.mask)


def test_the_undecided_count_stays_after_the_freeze():
    _, _, sparsifier = tied("conv", steps=95, total_steps=100, choose_at=0.9, freeze_at=0.9)
    before = sparsifier.metrics()["undecided_per_kept"]
    assert before > 0.3
    masker = sparsifier._masker
    sparsifier.finalize()
    assert masker.metrics()["undecided_per_kept"] == before


def test_loading_an_earlier_state():
    model, optimizer, sparsifier = begin("conv")
    states = [copy.deepcopy(x.state_dict()) for x in (model, optimizer, sparsifier)]
    batches = make_batches("conv", STEPS)
    train(model, optimizer, batches)
    once = state_of(model)
    for part, state in zip((model, optimizer, sparsifier), states, strict=True):
        part.load_state_dict(state)
    train(model, optimizer, batches)
    assert_same_state(state_of(model), once)


@pytest.mark.parametrize("steps", [89, 90, 92, 94, 96])
def test_a_resume_while_the_threshold_falls_is_exact(steps):
    batches = make_batches("conv", 100)
    model, optimizer, sparsifier = begin("conv", total_steps=100)
    train(model, optimizer, batches[:steps])
    saved = io.BytesIO()
    torch.save([x.state_dict() for x in (model, optimizer, sparsifier)], saved)
    train(model, optimizer, batches[steps:])
    again = begin("conv", total_steps=100)
    saved.seek(0)
    for part, state in zip(again, torch.load(saved), strict=True):
        part.load_state_dict(state)
    train(*again[:2], batches[steps:])
    assert_same_state(state_of(model), state_of(again[0]))


# Budgets


def test_a_budget_of_multiplications_orders_weights_by_cost():
    """Weights are ordered by |w| / √multiplications."""
    example = torch.randn(1, 1, 6, 6)
    model = build("conv")
    costs = macs_per_weight(model, find_sites(model), example)
    assert costs == (36, 1)
    _, optimizer, sparsifier = begin(model=model, cost="flops", example_inputs=example)
    train(model, optimizer, make_batches("conv", STEPS - 1))
    values = [w.abs() / c**0.5 for (_, w), c in zip(parts(sparsifier), costs, strict=True)]
    summary = sparsifier.finalize()
    spent = sum(c * layer.kept for c, layer in zip(costs, summary.layers, strict=True))
    total = 36 * 36 + 432
    assert 0.2 * total - 36 < spent <= 0.2 * total
    kept = [model[i].weight != 0 for i in (0, 4)]
    least = min(float(v[k].min()) for v, k in zip(values, kept, strict=True))
    # No larger weight is pruned, unless it did not fit into the rest of the budget.
    assert float(values[1][~kept[1]].max()) <= least
    dearer = int((values[0][~kept[0]] > least).sum())
    assert dearer == 0 or spent + 36 > 0.2 * total


@pytest.mark.parametrize("steps", [4, 8, 14])
def test_layer_budgets_have_separate_thresholds(steps):
    _, _, sparsifier = tied(steps=steps, scope="layer")
    share = twin.kept_at(steps / STEPS, 80, 400, 0.5) / 400
    for mask, weight in parts(sparsifier):
        kept = int(mask.active.sum())
        assert abs(kept - share * weight.numel()) < 1
        theta = twin.threshold([weight.double()], kept)
        assert float(mask.threshold) == pytest.approx(float(theta), rel=1e-6)
        assert torch.equal(mask.active, weight.abs() > theta)


def test_a_minimum_that_every_layer_exceeds_changes_nothing():
    plain, guarded = tied("conv", steps=12)[0], tied("conv", steps=12, min_keep_per_layer=1)[0]
    assert_same_state(state_of(plain), state_of(guarded))


def test_undecided_probabilities_are_counted_in_the_frozen_mask():
    sparsifier = tied("conv", steps=5)[2]
    masker = sparsifier._masker
    masker.refresh_masks()
    probs = [
        torch.where(
            mask.mask, twin.prob(weight.detach(), mask.final_threshold.double(), 1 / 3), 0.0
        )
        for mask, weight in parts(sparsifier)
    ]
    undecided = sum(int(((p > 0.05) & (p < 0.95)).sum()) for p in probs)
    masker.freeze()
    assert sparsifier.metrics()["undecided_per_kept"] == undecided / masker.keep
    assert undecided > 0


def test_masks_are_recomputed_after_loading_a_state():
    """The lowered threshold is part of the state and does not follow from the weights."""
    batches = make_batches("conv", 92)
    model, _, sparsifier = tied("conv", steps=92, total_steps=100)
    assert sparsifier._masker._thresholds_at_choice is not None
    other, _, its = begin("conv", total_steps=100, model=build("conv", seed=5))
    other.load_state_dict(model.state_dict())
    by_weights = other.eval()[0].weight.clone()
    its.load_state_dict(sparsifier.state_dict())
    assert torch.equal(other(batches[0][0]), model.eval()(batches[0][0]))
    assert not torch.equal(other[0].weight, by_weights)
