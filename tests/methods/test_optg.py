"""OptG: straight-through scores, the sigmoid schedule, and the interval of the masks."""

import math

import pytest
import torch

from probmask import InputError
from probmask.masking.masker import Progress
from probmask.methods.optg import OptG
from reference.masked_run import (
    SIZE,
    MaskedRun,
    assert_exact_budget,
    assert_resumes,
    effective_gradients,
    joined,
)

KEEP = 61


def test_weights_learn_where_active_and_scores_everywhere():
    run = MaskedRun(OptG(sparsity=0.8)).go(16)
    effective, gradients = effective_gradients(run)
    rows = zip(run.masked, run.weights, effective, gradients, strict=True)
    for masked, weight, seen, gradient in rows:
        assert torch.equal(seen, torch.where(masked.active, weight, 0.0))
        assert torch.equal(weight.grad, torch.where(masked.active, gradient, 0.0))
        assert torch.equal(masked.score.grad, gradient * weight)
    assert joined(masked.score.grad for masked in run.masked)[
        ~joined(masked.active for masked in run.masked)
    ].any()


def test_scores_are_updated_by_sgd_at_the_scheduled_rate():
    run = MaskedRun(OptG(sparsity=0.8, steepness=4.0, momentum=0.0))
    for done in range(3):
        before = [masked.score.detach().clone() for masked in run.masked]
        run.optimizer.zero_grad()
        torch.manual_seed(0)
        run.backward()
        gradients = [masked.score.grad.clone() for masked in run.masked]
        run.optimizer.step()
        rate = 0.1 / (1 + math.exp(-4 * (done / 24 - 0.5)))
        for masked, old, gradient in zip(run.masked, before, gradients, strict=True):
            torch.testing.assert_close(masked.score.detach(), old - rate * gradient)


def test_sparsity_rises_around_the_middle():
    method = OptG(sparsity=0.8)
    ramp = [method.ramp(Progress(done, 100, 10)) for done in (0, 45, 50, 55, 100)]
    assert ramp == pytest.approx([0, 1 / (1 + math.e**5), 0.5, 1 / (1 + math.e**-5), 1])
    run = MaskedRun(method)
    counts = []
    for done in range(24):
        counts.append(int(joined(masked.active for masked in run.masked).sum()))
        run.go(done + 1)
    assert counts[:10] == [SIZE] * 10
    assert counts[12] == SIZE - round(0.5 * (SIZE - KEEP))
    assert counts[14:] == [KEEP] * 10


def test_the_highest_scores_are_kept():
    run = MaskedRun(OptG(sparsity=0.8)).go(15)
    with torch.no_grad():
        for masked in run.masked:
            masked.score.copy_(torch.randn_like(masked.score))
    run.masker.before_forward(run.sparsifier.now, 0)
    scores, active = joined(m.score for m in run.masked), joined(m.active for m in run.masked)
    assert scores[active].min() > scores[~active].max()


def test_masks_are_recomputed_once_per_interval():
    run = MaskedRun(OptG(sparsity=0.8, update_every=6, steepness=10))
    seen = []
    for done in range(24):
        seen.append(joined(masked.active for masked in run.masked))
        run.go(done + 1)
    for done in range(24):
        assert torch.equal(seen[done], seen[done - done % 6])
    assert not torch.equal(seen[6], seen[12])
    assert torch.equal(
        joined(masked.active for masked in run.masked), seen[18]
    )  # the last masks at the end


def test_a_slow_ramp_ends_at_the_budget_too():
    assert_exact_budget(OptG(sparsity=0.8, steepness=2.0))


def test_the_last_masks_stay():
    run = MaskedRun(OptG(sparsity=0.8)).go()
    trained = [masked.active.clone() for masked in run.masked]
    run.sparsifier.finalize()
    for weight, active in zip(run.weights, trained, strict=True):
        assert torch.equal(weight != 0, active)


def test_a_threshold_for_each_layer_and_rare_masks():
    method = OptG(sparsity=0.8, scope="layer", update_every=5)
    assert_exact_budget(method)
    assert_resumes(method)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scope": "all"}, "OptG(scope='all'): must be one of 'global', 'layer'."),
        ({"steepness": 0}, "OptG(steepness=0): must be a slope, from 1 to 1e+06."),
        ({"momentum": 2}, "OptG(momentum=2): must be the momentum of SGD, from 0 to 1."),
        (
            {"update_every": 0},
            "OptG(update_every=0): must be a number of updates, an integer of at least 1.",
        ),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        OptG(**({"sparsity": 0.9} | settings))
    assert text in str(caught.value)
