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
    """Assert that the effective weights are those of the ``keep`` highest probabilities."""
    kept = torch.cat([layer.weight.flatten() != 0 for layer in (mlp[0], mlp[2], mlp[4])])
    ranked = torch.cat([values.flatten() for values in ranking(mlp)])
    assert kept.sum() == keep
    assert ranked[kept].min() >= ranked[~kept].max()


@pytest.mark.parametrize("name", ["mlp", "conv", "tied", "transformer", "lstm"])
@pytest.mark.parametrize("steps", [0, 10, 18])
def test_a_copy_has_the_same_outputs(form, name, steps):
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


def test_a_copy_in_evaluation_uses_a_loaded_state(form):
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


def test_a_copy_recomputes_its_mask_at_equal_version_counters(form):
    """Version counters start at zero in a copy and may reach those of the original."""
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


def test_eval_recomputes_the_mask_after_changes_through_data(form):
    """Hand-written averaging may write to .data, which does not increase version counters."""
    model, _, _ = halfway(form)
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.data.copy_(torch.rand_like(parameter))
    assert_top(twin.eval(), 80)


def test_an_averaged_model_in_evaluation_follows_its_weights(form):
    model, optimizer, _ = halfway(form, steps=8)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)).eval()
    averaged.update_parameters(model)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    for batch in make_batches("mlp", 5, seed=3):
        step(model, optimizer, batch)
        averaged.update_parameters(model)
        averaged(inputs)  # a mask computed now must not be reused later
        for name, parameter in model.named_parameters():
            expected[name].lerp_(parameter.detach(), 0.5)
    for name, parameter in averaged.module.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)
    # The effective network has exactly the top 80 weights by averaged probability.
    assert_top(averaged.module, 80)
    # Leaving and entering evaluation recomputes the same mask.
    before = averaged(inputs)
    averaged.train().eval()
    assert torch.equal(averaged(inputs), before)


def test_an_averaged_model_works_after_finalize(form):
    """Users save the averaged model: it must stay valid after finalize() of the model."""
    model, optimizer, sparsifier = halfway(form, steps=8)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for batch in make_batches("mlp", 12, seed=3):
        step(model, optimizer, batch)
        averaged.update_parameters(model)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    expected = averaged.eval()(inputs)
    sparsifier.finalize()
    assert torch.equal(averaged(inputs), expected)


def test_an_averaged_model_is_finalized_through_the_attached_model(form, tmp_path):
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


def test_the_average_of_equal_networks_is_the_same_network(form):
    """This includes probabilities, thresholds and temperatures."""
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


def test_copies_made_before_attach_still_match(form):
    """Optimizer states and averages identify a parameter by its position."""
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
def test_evaluation_during_training_changes_nothing(form, context):
    model, optimizer, _ = halfway(form, steps=4)
    plain, plain_optimizer, _ = halfway(form, steps=4)
    for batch in make_batches("mlp", 16, seed=3):
        with context():
            model.eval()(batch[0])
        model.train()
        step(model, optimizer, batch)
        step(plain, plain_optimizer, batch)
    assert_same_state(state_of(model), state_of(plain))
