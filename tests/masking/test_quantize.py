"""`quantize`: training under frozen masks with weights rounded to integers."""

import copy
import pickle

import pytest
import torch
from torch import nn

import probmask
from probmask.artifact import load_state
from probmask.core.integer_grid import quantized
from probmask.errors import InputError
from reference.networks import (
    NETWORKS,
    assert_same_state,
    build,
    loss_of,
    make_batches,
    sgd,
    train,
)


def sparse(name, seed=0):
    """Return a network in which two thirds of the masked weights are zero."""
    model = build(name, seed)
    with torch.no_grad():
        for site in probmask.find_sites(model):
            site.weight.masked_fill_(torch.rand_like(site.weight) < 0.67, 0.0)
    return model


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_what_is_trained_is_saved_bit_for_bit(tmp_path, name, bits):
    model = sparse(name)
    zeros = {site.name: site.weight == 0 for site in probmask.find_sites(model)}
    kinds = [type(module) for module in model.modules()]
    frozen = probmask.quantize(model, bits=bits)
    train(model, sgd(model, weight_decay=0.01), make_batches(name, 5))
    effective = {site.name: getattr(*site.holders[0]).detach().clone() for site in frozen.sites}
    summary = frozen.finalize()
    assert [type(module) for module in model.modules()] == kinds
    state = model.state_dict()
    for key, weight in effective.items():
        assert torch.equal(state[key], weight), key
        assert bool((state[key][zeros[key]] == 0).all())
    info = probmask.save(model, tmp_path / "m.safetensors", values=f"int{bits}")
    assert info.rounding["max_error"] == info.rounding["relative_error"] == 0
    assert_same_state(load_state(tmp_path / "m.safetensors"), state)
    assert summary.kept == sum(int(state[key].count_nonzero()) for key in effective)


def test_it_equals_rounding_by_hand():
    """The obvious reference: a plain network gets the rounded weights and gives the gradients."""
    model, twin = sparse("mlp"), sparse("mlp")
    probmask.quantize(model, bits=3)
    plain = copy.deepcopy(twin)
    optimizer, slow = sgd(model), sgd(twin)
    masks = {site.name: site.weight != 0 for site in probmask.find_sites(twin)}
    for batch in make_batches("mlp", 10):
        train(model, optimizer, [batch])
        weights = dict(twin.named_parameters())
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                rounded = name in masks
                kept = weights[name] * masks[name] if rounded else weights[name]
                parameter.copy_(quantized(kept, 3) if rounded else kept)
        plain.zero_grad()
        loss_of(plain, batch).backward()
        for name, parameter in plain.named_parameters():
            grad = parameter.grad
            weights[name].grad = grad * masks[name] if name in masks else grad.clone()
        slow.step()
    for name, weight in twin.named_parameters():
        ours = dict(model.named_parameters())[name]
        kept = masks.get(name, torch.ones_like(weight, dtype=torch.bool))
        assert torch.equal(ours[kept], weight[kept]), name


def test_training_recovers_what_rounding_loses():
    """With correlated inputs, other weights can correct the error of one."""
    torch.manual_seed(0)
    inputs, teacher = torch.randn(256, 3) @ torch.randn(3, 20), nn.Linear(20, 5)
    with torch.no_grad():
        teacher.weight.masked_fill_(torch.rand_like(teacher.weight) < 0.5, 0.0)
    labels = teacher(inputs).detach()

    def loss_of(model):
        return nn.functional.mse_loss(model(inputs), labels)

    rounded, trained = copy.deepcopy(teacher), copy.deepcopy(teacher)
    probmask.quantize(rounded, bits=2).finalize()
    frozen = probmask.quantize(trained, bits=2)
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 300)
        optimizer.zero_grad()
        loss_of(trained).backward()
        optimizer.step()
    frozen.finalize()
    assert loss_of(trained) < 0.7 * loss_of(rounded)


def test_states_copies_and_pickles_have_unrounded_weights_and_round_again():
    model = sparse("conv")
    probmask.quantize(model, bits=4)
    train(model, sgd(model), make_batches("conv", 3))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    fresh = sparse("conv")
    probmask.quantize(fresh, bits=4)
    fresh.load_state_dict(model.state_dict())
    for other in (*copies, fresh):
        assert_same_state(other.state_dict(), model.state_dict())
        train(other, sgd(other), make_batches("conv", 3))
    train(model, sgd(model), make_batches("conv", 3))
    for other in (*copies, fresh):
        assert_same_state(other.state_dict(), model.state_dict())
    first = probmask.find_sites(sparse("conv"))[0].name
    raw = model.state_dict()[first]
    assert not torch.equal(raw, quantized(raw, 4))


def test_it_follows_freeze_masks_and_changes_bits():
    model = sparse("mlp")
    frozen = probmask.freeze_masks(model)
    assert frozen.bits is None
    assert probmask.quantize(model, bits=8).bits == 8
    assert probmask.quantize(model, bits=4).bits == frozen.bits == 4
    frozen.finalize()
    for name, tensor in model.state_dict().items():
        assert tensor.dim() < 2 or torch.equal(tensor, quantized(tensor, 4)), name


def test_a_dense_network_and_excluded_weights_are_rounded_too(tmp_path):
    model = build("mlp", 0)
    weights = [site.name for site in probmask.find_sites(model)]
    frozen = probmask.quantize(model, exclude=weights[0])
    assert [site.name for site in frozen.sites] == weights[1:]
    frozen.finalize()
    info = probmask.save(model, tmp_path / "m", values="int8")
    assert info.rounding["max_error"] == 0
    assert {row.values for row in info.tensors if len(row.shape) > 1} == {"int8"}


@pytest.mark.parametrize("bits", [1, 9, 0, -4, 2.5, "8", None, True])
def test_invalid_bits_raise(bits):
    model = sparse("mlp")
    with pytest.raises(InputError, match=r"quantize\(bits=.*: must be a number of bits"):
        probmask.quantize(model, bits=bits)
    probmask.freeze_masks(model).finalize()  # nothing has changed


def test_invalid_models_raise(tmp_path):
    with pytest.raises(InputError, match=r"quantize\(model\): expected an nn.Module, not int"):
        probmask.quantize(3)
    model = sparse("mlp")
    optimizer = sgd(model)
    probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), optimizer=optimizer, total_steps=9)
    with pytest.raises(InputError, match="already masked; finalize the earlier sparsifier"):
        probmask.quantize(model)
    model = sparse("mlp")
    probmask.quantize(model)
    with pytest.raises(InputError, match="already frozen; finalize them first to choose others"):
        probmask.quantize(model, include="*bias")
    with pytest.raises(InputError, match=r"still has a mask; call finalize\(\)"):
        probmask.save(model, tmp_path / "m", values="int8")
