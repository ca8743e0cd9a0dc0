"""Deep R: fixed signs, drift and noise, and a constant number of connections."""

import copy
import math

import pytest
import torch

from probmask import InputError
from probmask.methods.deepr import DeepR
from reference.exchange_run import Run, assert_budget_throughout, assert_resumes, batches
from reference.networks import assert_same_state, state_of


def signs_of(run):
    return [run.masker.sign(index) for index in range(len(run.masker.weights))]


def test_the_number_of_weights_is_constant():
    assert_budget_throughout(DeepR)


def test_the_global_scope_resumes_too():
    assert_resumes(DeepR, scope="global", temperature=1e-3)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_signs_never_change_and_the_number_is_constant(scope):
    run = Run(DeepR(sparsity=0.8, scope=scope, temperature=1e-3))
    first = run.weights
    run.train(batches(1, seed=2))
    counts, signs = run.counts, signs_of(run)
    for weight, sign in zip(first, signs, strict=True):
        assert bool((weight * sign >= 0).all())  # the initial signs
    for batch in batches():
        run.train([batch])
        assert sum(run.counts) == 372
        if scope == "layer":
            assert run.counts == counts
        for weight, sign in zip(run.weights, signs, strict=True):
            assert bool((weight * sign >= 0).all())
    if scope == "global":
        assert run.counts != counts


def test_the_signs_of_inactive_connections_are_drawn_evenly():
    run = Run(DeepR(sparsity=0.9)).train(batches(1))
    positive = torch.cat([p[~a] for p, a in zip(run.masker.positive, run.active, strict=True)])
    assert abs(float(positive.float().mean()) - 0.5) < 5 * math.sqrt(0.25 / len(positive))


def test_without_drift_noise_and_crossings_it_is_masked_training():
    run = Run(DeepR(sparsity=0.8, l1=0.0, temperature=0.0), lr=1e-5)
    model = copy.deepcopy(run.model)
    with torch.no_grad():  # away from zero
        for network in (run.model, model):
            for layer in (network[i] for i in (0, 2, 5, 7)):
                original = layer._parameters["weight"]
                original.add_(0.1 * original.sign())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, weight_decay=5e-4)
    for batch in batches(10):
        run.train([batch])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    assert_same_state(state_of(run.model), state_of(model))


def test_drift_and_noise_have_the_expected_size():
    """With zero gradients, θ moves by -η l1 and by noise of variance 2 η T."""
    run = Run(DeepR(sparsity=0.5, l1=0.5, temperature=1e-4), lr=0.01)
    run.train(batches(1))
    for group in run.optimizer.param_groups:
        group.update(momentum=0.0, weight_decay=0.0)
    run.optimizer.zero_grad()
    with torch.no_grad():
        for weight, active, sign in zip(run.masker.weights, run.active, signs_of(run), strict=True):
            weight.copy_(torch.where(active, sign, 0.0))
            weight.grad = torch.zeros_like(weight)
    run.optimizer.step()
    moved = torch.cat(
        [
            ((weight * sign) - 1)[active]
            for weight, active, sign in zip(run.weights, run.active, signs_of(run), strict=True)
        ]
    )
    spread = math.sqrt(2 * 0.01 * run.masker.method.temperature_at(1 / 40))
    assert float(moved.mean()) == pytest.approx(-0.005, abs=5 * spread / math.sqrt(len(moved)))
    assert float(moved.std()) == pytest.approx(spread, rel=0.15)


def test_a_connection_that_crosses_zero_is_replaced_by_one_at_1e_12():
    run = Run(DeepR(sparsity=0.8, l1=0.0, temperature=0.0), lr=1.0)
    run.train(batches(1))
    before = run.active
    with torch.no_grad():
        for weight, active, sign in zip(run.masker.weights, run.active, signs_of(run), strict=True):
            weight.copy_(torch.where(active, sign, 0.0))
            weight.grad = torch.zeros_like(weight)
        crossing = before[2].nonzero()[:20]
        weight, sign = run.masker.weights[2], run.masker.sign(2)
        weight.grad[tuple(crossing.T)] = 2 * sign[tuple(crossing.T)]
    for group in run.optimizer.param_groups:
        group.update(momentum=0.0, weight_decay=0.0)
    run.optimizer.step()
    weight, active = run.weights[2], run.active[2]
    revived = active & (weight.abs() < 1e-6)
    assert int(revived.sum()) == 20
    assert torch.equal(weight[revived], 1e-12 * sign[revived])
    assert run.counts == [int(mask.sum()) for mask in before]
    assert bool((weight[active & ~revived] == sign[active & ~revived]).all())
    for index in (0, 1, 3):
        assert torch.equal(run.active[index], before[index])


def test_revived_weights_have_no_momentum():
    run = Run(DeepR(sparsity=0.8, temperature=1.0)).train(batches(1))
    for index, (weight, active) in enumerate(zip(run.weights, run.active, strict=True)):
        revived = active & (weight.abs() < 1e-11)
        assert revived.any()
        assert not run.momentum(index)[revived].any()


def test_the_temperature_falls_geometrically():
    method = DeepR(sparsity=0.8)
    assert method.temperature_at(0) == 1e-5
    assert method.temperature_at(0.5) == pytest.approx(1e-10)
    assert method.temperature_at(1) == pytest.approx(1e-15)
    assert DeepR(sparsity=0.8, temperature=0.0).temperature_at(0.5) == 0


def test_dense_layers_have_no_fixed_signs():
    run = Run(DeepR(sparsity=0.8, dense_first=True, dense_last=True, temperature=1e-2))
    run.train(batches())
    assert (run.counts[0], run.counts[3]) == (144, 36)
    assert bool((run.weights[0] * run.masker.sign(0) < 0).any())  # signs are free there


def test_the_signs_are_those_of_the_first_update():
    """DDP broadcasts the first rank's weights after attach; the signs must follow these."""
    run = Run(DeepR(sparsity=0.8, temperature=0.0, l1=0.0), lr=0.0)
    with torch.no_grad():
        for weight in run.masker.weights:
            weight.neg_()
    before = run.active
    run.train(batches(3))
    assert all(torch.equal(a, b) for a, b in zip(before, run.active, strict=True))


def test_signs_follow_the_model_into_copies_and_other_types():
    run = Run(DeepR(sparsity=0.8)).train(batches(1))
    twin = copy.deepcopy(run.model).double()
    masker = twin[0]._masked_weights["weight"]._source
    assert masker.positive[0].dtype == torch.bool
    assert masker.positive[0] is not run.masker.positive[0]
    assert torch.equal(masker.positive[0], run.masker.positive[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "all"}, "DeepR(scope='all'): must be one of 'layer', 'global'."),
        ({"l1": -1}, "DeepR(l1=-1): must be a strength, at least 0."),
        ({"temperature": -1}, "DeepR(temperature=-1): must be a temperature, at least 0."),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError) as error:
        DeepR(sparsity=0.9, **settings)
    assert str(error.value) == message
