"""Movement pruning: scores that follow the movement, per layer or global, trained by Adam."""

import pytest
import torch

from probmask import InputError
from probmask.core import schedules
from probmask.methods.movement import Movement
from reference.masked_run import (
    SIZE,
    SIZES,
    MaskedRun,
    assert_exact_budget,
    assert_resumes,
    effective_gradients,
    joined,
)

KEEP = 61


def test_weights_learn_where_active_and_scores_everywhere():
    run = MaskedRun(Movement(sparsity=0.8)).go(16)
    _, gradients = effective_gradients(run)
    for masked, weight, gradient in zip(run.masked, run.weights, gradients, strict=True):
        assert torch.equal(weight.grad, torch.where(masked.active, gradient, 0.0))
        assert torch.equal(masked.score.grad, gradient * weight)


def test_the_score_rises_when_a_weight_moves_away_from_zero():
    run = MaskedRun(Movement(sparsity=0.8), lr=1e-3, momentum=0.0, weight_decay=0.0)
    before = [weight.detach().clone() for weight in run.weights]
    run.go(1)
    for masked, weight, old in zip(run.masked, run.weights, before, strict=True):
        moved = weight.detach().abs() - old.abs()
        clear = moved.abs() > 1e-7
        assert torch.equal(masked.score[clear] > 0, moved[clear] > 0)


def test_scores_are_trained_by_adam_with_a_warm_up():
    run = MaskedRun(Movement(sparsity=0.8, score_lr=0.5))
    rates = []
    for done in range(24):
        run.go(done + 1)
        rates.append(run.sparsifier._trainables[0].optimizer.param_groups[0]["lr"])
    assert isinstance(run.sparsifier._trainables[0].optimizer, torch.optim.Adam)
    assert rates[0] == pytest.approx(0.5 / 2.4)
    assert rates[3:] == pytest.approx([0.5 * (24 - i) / 21.6 for i in range(3, 24)])


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_current_highest_scores_are_active(scope):
    run = MaskedRun(Movement(sparsity=0.75, scope=scope))
    for done in range(24):
        share = schedules.kept_fraction(done / 24, 0.25, begin=0.1, end=0.8)
        active = joined(masked.active for masked in run.masked)
        assert int(active.sum()) == round(share * SIZE)
        groups = [run.masked] if scope == "global" else [[masked] for masked in run.masked]
        for group in groups:
            scores, chosen = joined(m.score for m in group), joined(m.active for m in group)
            if not chosen.all() and done > 0:
                assert scores[chosen].min() >= scores[~chosen].max()
        run.go(done + 1)


def test_equal_scores_are_decided_by_magnitude():
    run = MaskedRun(Movement(sparsity=0.75, scope="global", ramp_begin=0.0, ramp_end=0.0))
    values, active = joined(run.weights).abs(), joined(masked.active for masked in run.masked)
    assert values[active].min() >= values[~active].max()  # before any update


def test_every_layer_has_the_same_fraction():
    kept = [layer.kept for layer in assert_exact_budget(Movement(sparsity=0.75)).layers]
    assert kept == [size // 4 for size in SIZES]


def test_scores_stay_in_full_precision():
    run = MaskedRun(Movement(sparsity=0.8)).go(3)
    scores = [masked.score.detach().clone() for masked in run.masked]
    run.model.to(torch.bfloat16)
    for masked, score in zip(run.masked, scores, strict=True):
        assert torch.equal(masked.score, score)


def test_the_soft_variant_has_a_threshold_and_a_penalty_until_the_budget_takes_over():
    run = MaskedRun(Movement(sparsity=0.8, soft=True, threshold=0.5, score_lr=0.1, strength=1e-3))
    assert run.sparsifier.penalty() == 0.0
    for done in range(24):
        ramped = 1 - schedules.kept_fraction(done / 24, 0.0, begin=0.1, end=0.8)
        scores, active = joined(m.score for m in run.masked), joined(m.active for m in run.masked)
        with torch.no_grad():
            penalty = float(run.sparsifier.penalty())
        assert penalty == pytest.approx(1e-3 * ramped * scores.sigmoid().mean().item(), rel=1e-5)
        if done / 24 < 0.8:
            assert torch.equal(active, scores.sigmoid() > 0.5 * ramped)
        else:
            assert int(active.sum()) == KEEP
        run.go(done + 1)


def test_the_soft_variant_leaves_some_weights_and_its_penalty_has_a_gradient():
    run = MaskedRun(Movement(sparsity=0.8, soft=True)).go(8)
    with torch.no_grad():
        for masked in run.masked:
            masked.score.fill_(-20.0)
        run.masked[1].score[0, 0, 0, 0] = -10.0
    run.masker.before_forward(run.sparsifier.now, 0)
    assert int(joined(masked.active for masked in run.masked).sum()) == 2
    assert run.masked[1].active[0, 0, 0, 0]
    run.sparsifier.penalty().backward()
    assert all(bool((masked.score.grad > 0).all()) for masked in run.masked)


@pytest.mark.parametrize("settings", [{"scope": "global"}, {"soft": True}])
def test_the_variants_end_at_the_budget_and_resume(settings):
    method = Movement(sparsity=0.8, **settings)
    assert_exact_budget(method)
    assert_resumes(method)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scope": "all"}, "Movement(scope='all'): must be one of 'global', 'layer'."),
        ({"score_lr": 0}, "Movement(score_lr=0): must be a learning rate, from 1e-09 to 1e+09."),
        (
            {"ramp_begin": 2},
            "Movement(ramp_begin=2): must be a fraction of the training, from 0 to 1.",
        ),
        (
            {"ramp_begin": 0.9},
            "Movement(ramp_begin=0.9, ramp_end=0.8): the values must not decrease",
        ),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        Movement(**({"sparsity": 0.9} | settings))
    assert text in str(caught.value)
