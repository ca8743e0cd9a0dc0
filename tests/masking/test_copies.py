"""Copies made in the middle of training: independent, complete, averaged."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import probmask
from reference.networks import (
    assert_same_state,
    build,
    make_batches,
    sgd,
    state_of,
    step,
    train,
)
from reference.probmask_run import method_of, ranking

STEPS = 20


def halfway(form, name="mlp", steps=10, **settings):
    settings = {"sparsity": 0.8, "min_keep_per_layer": 1} | settings
    model = build(name)
    optimizer = sgd(model)
    method = method_of(form, **settings)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=STEPS, seed=2)
    train(model, optimizer, make_batches(name, steps))
    return model, optimizer, sparsifier


def assert_top(mlp, keep):
    """The weights in use are exactly the ``keep`` of highest probability."""
    kept = torch.cat([layer.weight.flatten() != 0 for layer in (mlp[0], mlp[2], mlp[4])])
    ranked = torch.cat([values.flatten() for values in ranking(mlp)])
    assert kept.sum() == keep
    assert ranked[kept].min() >= ranked[~kept].max()


@pytest.mark.parametrize("name", ["mlp", "conv", "tied", "transformer"])
@pytest.mark.parametrize("steps", [0, 10, 18])
def test_a_copy_computes_what_the_original_computes(form, name, steps):
    model, _, _ = halfway(form, name, steps)
    inputs = make_batches(name, 1, seed=9)[0][0]
    twin = copy.deepcopy(model)
    assert torch.equal(twin(inputs), model(inputs))  # in training: the same noise, or threshold
    assert torch.equal(twin.eval()(inputs), model.eval()(inputs))
    assert_same_state(state_of(twin), state_of(model))


@pytest.mark.parametrize("steps", [5, 18])
def test_training_the_original_does_not_change_the_copy(form, steps):
    model, optimizer, _ = halfway(form, steps=steps)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    twin = copy.deepcopy(model)
    state, output, evaluated = state_of(twin), twin(inputs), twin.eval()(inputs)
    twin.train()
    train(model, optimizer, make_batches("mlp", 3, seed=4))
    assert_same_state(state, state_of(twin))
    assert torch.equal(twin(inputs), output)
    assert torch.equal(twin.eval()(inputs), evaluated)
    assert not torch.equal(model.eval()(inputs), evaluated)


def test_changing_the_copy_does_not_change_the_original(form):
    model, optimizer, _ = halfway(form)
    plain, plain_optimizer, _ = halfway(form)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.eval()
    rest = make_batches("mlp", 10, seed=3)
    train(model, optimizer, rest)
    train(plain, plain_optimizer, rest)
    assert_same_state(state_of(model), state_of(plain))


def test_finalizing_the_original_leaves_the_copy_working(form):
    model, _, sparsifier = halfway(form)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    twin = copy.deepcopy(model)
    expected = twin.eval()(inputs)
    sparsifier.finalize()
    assert torch.equal(twin(inputs), expected)
    assert torch.equal(model.eval()(inputs), expected)
    assert twin[0].weight.count_nonzero() < 96


def test_a_copy_of_a_copy_and_a_moved_copy(form):
    model, _, _ = halfway(form)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    twin = copy.deepcopy(copy.deepcopy(model)).to(torch.float64)
    torch.testing.assert_close(twin.eval()(inputs.double()).float(), model.eval()(inputs))
    assert model[0].bias.dtype == torch.float32


def test_a_copy_in_evaluation_follows_what_is_loaded_into_it(form):
    model, optimizer, sparsifier = halfway(form, steps=0)
    early = copy.deepcopy(model.state_dict())
    train(model, optimizer, make_batches("mlp", 13))
    late = copy.deepcopy(model.state_dict())
    model.load_state_dict(late)
    model.eval()
    twin = copy.deepcopy(model)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    expected = model(inputs)
    for _ in range(10):
        twin.load_state_dict(early)
        twin(inputs)
        twin.load_state_dict(late)
        assert torch.equal(twin(inputs), expected)
    assert sparsifier.now.step == 13


def test_the_hard_mask_of_a_copy_does_not_trust_the_counters_of_the_original(form):
    """Version counters start anew in a copy and may catch up with those of the original."""
    model, _, _ = halfway(form)
    model.eval()
    twin = copy.deepcopy(model)
    theirs = list(model.parameters())
    with torch.no_grad():
        for parameter, other in zip(twin.parameters(), theirs, strict=True):
            parameter.uniform_()
            while parameter._version < other._version:
                parameter.mul_(1)
    assert_top(twin, 80)


def test_eval_looks_again_even_if_tensors_were_changed_behind_its_back(form):
    """Hand-written averaging goes through .data, which no version counter sees."""
    model, _, _ = halfway(form)
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.data.copy_(torch.rand_like(parameter))
    assert_top(twin.eval(), 80)


def test_an_averaged_model_follows_its_averages_while_it_stays_in_evaluation(form):
    model, optimizer, _ = halfway(form, steps=8)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)).eval()
    averaged.update_parameters(model)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in make_batches("mlp", 5, seed=3):
        step(model, optimizer, batch)
        averaged.update_parameters(model)
        averaged(inputs)  # a hard mask made now must not stay
        for name, parameter in model.named_parameters():
            expected[name].lerp_(parameter.detach(), 0.5)
    for name, parameter in averaged.module.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)
    # The network in use is exactly the top 80 by averaged probability.
    assert_top(averaged.module, 80)
    # And a fresh decision, forced by leaving and entering evaluation, is the same.
    before = averaged(inputs)
    averaged.train().eval()
    assert torch.equal(averaged(inputs), before)


def test_an_averaged_model_outlives_the_training(form):
    """The average is what one wants to keep: it must survive finalize() of the model."""
    model, optimizer, sparsifier = halfway(form, steps=8)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for batch in make_batches("mlp", 12, seed=3):
        step(model, optimizer, batch)
        averaged.update_parameters(model)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    expected = averaged.eval()(inputs)
    sparsifier.finalize()
    assert torch.equal(averaged(inputs), expected)


def test_an_averaged_model_is_finalized_through_the_model_that_was_attached(form, tmp_path):
    model, optimizer, sparsifier = halfway(form, steps=8)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for batch in make_batches("mlp", 12, seed=3):
        step(model, optimizer, batch)
        averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    assert sparsifier.finalize().kept == 80
    for index in (0, 2, 4):
        weight, average = model[index].weight, averaged.module[index]._parameters["weight"]
        assert torch.equal(weight, torch.where(weight != 0, average, 0))
    probmask.save(model, tmp_path / "average.safetensors")


def test_the_average_of_one_network_is_that_network(form):
    """Also in what is not a parameter of the model: probabilities, thresholds, temperatures."""
    model, optimizer, sparsifier = halfway(form, steps=2, temperature_end=0.1)
    averaged = AveragedModel(model, avg_fn=lambda _, latest, __: latest)
    train(model, optimizer, make_batches("mlp", 16, seed=3))
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    sparsifier.copy_masks_to(averaged)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    assert torch.equal(averaged.eval()(inputs), model.eval()(inputs))
    with pytest.raises(probmask.InputError, match="not a deep copy of the attached model"):
        sparsifier.copy_masks_to(build("mlp"))


def test_copies_made_before_attach_still_fit(form):
    """Optimizer states and averages go by the position of a parameter."""
    model = build("conv")
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    before = torch.optim.Adam(build("conv").parameters()).state_dict()
    optimizer = torch.optim.Adam(model.parameters())
    method = method_of(form, sparsity=0.8)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=4)
    optimizer.load_state_dict(before)
    torch.optim.Adam(model.parameters()).load_state_dict(before)
    for batch in make_batches("conv", 4):
        step(model, optimizer, batch)
        averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    sparsifier.finalize()
    build("conv").load_state_dict(model.state_dict())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluating_in_between_changes_nothing(form, context):
    model, optimizer, _ = halfway(form, steps=4)
    plain, plain_optimizer, _ = halfway(form, steps=4)
    for batch in make_batches("mlp", 16, seed=3):
        with context():
            model.eval()(batch[0])
        model.train()
        step(model, optimizer, batch)
        step(plain, plain_optimizer, batch)
    assert_same_state(state_of(model), state_of(plain))
