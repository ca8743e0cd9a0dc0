"""Continued training of sparse networks: zeros stay exactly zero, other weights are trained."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import probmask
from probmask.masking.sites import find_sites
from reference.networks import (
    NETWORKS,
    assert_same_state,
    build,
    loss_of,
    make_batches,
    sgd,
    state_of,
    train,
)

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05
    ),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def sparse(name, seed=0):
    """Return a network in which two thirds of the masked weights are zero."""
    model = build(name, seed)
    with torch.no_grad():
        for _, weight in masked(model):
            weight.masked_fill_(torch.rand_like(weight) < 0.67, 0.0)
    return model


def masked(model):
    """Return the weights that are masked by default: those of layers, not of embeddings."""
    return [(site.name, site.weight) for site in find_sites(model)]


def values(model):
    """Return every parameter as the network computes with it."""
    with torch.no_grad():
        return [
            getattr(module, name).clone()
            for module in model.modules()
            for name in ("weight", "in_proj_weight")
            if isinstance(getattr(module, name, None), torch.Tensor)
        ]


def assert_zeros_kept_and_others_moved(before, after):
    for old, new in zip(before, after, strict=True):
        if old.dim() > 1:
            assert bool((new[old == 0] == 0).all())
            assert not torch.equal(old, new)
    moved = torch.cat([(old != new)[old != 0] for old, new in zip(before, after, strict=True)])
    assert moved.float().mean() > 0.9


@pytest.mark.parametrize("name", ["mlp", "conv", "unet", "tied", "transformer", "recurrent"])
def test_zeros_stay_through_momentum_and_weight_decay(name):
    model = sparse(name)
    before, kept = values(model), sum(int(w.count_nonzero()) for _, w in masked(model))
    frozen = probmask.freeze_masks(model)
    train(model, sgd(model, weight_decay=0.01), make_batches(name, 20))
    assert_zeros_kept_and_others_moved(before, values(model))
    summary = frozen.finalize()
    assert_zeros_kept_and_others_moved(before, values(model))
    assert summary.kept == kept == sum(int(w.count_nonzero()) for _, w in masked(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_built_before_or_after(name):
    models = [sparse("conv"), sparse("conv")]
    before = values(models[0])
    early = OPTIMIZERS[name](models[0].parameters())
    handles = [probmask.freeze_masks(model) for model in models]
    late = OPTIMIZERS[name](models[1].parameters())
    for batch in make_batches("conv", 20):
        for model, optimizer in zip(models, (early, late), strict=True):

            def closure(model=model, optimizer=optimizer, batch=batch):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    for model, handle in zip(models, handles, strict=True):
        handle.finalize()
        assert_zeros_kept_and_others_moved(before, values(model))


def test_accumulated_gradients_and_two_optimizers():
    model = sparse("mlp")
    before = values(model)
    probmask.freeze_masks(model)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    second = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=0.01)
    batches = make_batches("mlp", 40)
    for index, batch in enumerate(batches):
        loss_of(model, batch).backward()
        if index % 2:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
    assert_zeros_kept_and_others_moved(before, values(model))


def test_an_update_by_hand_does_not_restore_pruned_weights():
    model = sparse("mlp")
    before = values(model)
    frozen = probmask.freeze_masks(model)
    for parameter in model.parameters():
        parameter.data.add_(1.0)
    assert_zeros_kept_and_others_moved(before, values(model))
    frozen.finalize()
    assert_zeros_kept_and_others_moved(before, values(model))


def test_it_equals_setting_zeros_after_every_step():
    """The slow, obvious reference, for an optimizer that updates each weight separately."""
    model, twin = sparse("conv"), sparse("conv")
    probmask.freeze_masks(model)
    optimizer, plain = sgd(model), sgd(twin)
    zeros = [(weight, weight == 0) for _, weight in masked(twin)]
    for batch in make_batches("conv", 10):
        train(model, optimizer, [batch])
        train(twin, plain, [batch])
        with torch.no_grad():
            for weight, removed in zeros:
                weight.masked_fill_(removed, 0.0)
    for ours, theirs in zip(values(model), values(twin), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_finalize_keeps_the_same_parameters(name):
    model = sparse(name)
    kinds, parameters = [type(module) for module in model.modules()], dict(model.named_parameters())
    state = state_of(model)
    probmask.freeze_masks(model).finalize()
    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == list(state)
    assert_same_state(state_of(model), state)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickled twice": lambda model: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model)))),
    "pickled copy": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["conv", "tied", "transformer"])
def test_copies_keep_their_zeros_too(name, how, tmp_path):
    model = sparse(name)
    probmask.freeze_masks(model)
    batches = make_batches(name, 5)
    train(model, sgd(model), batches)
    state, before = state_of(model), values(model)
    twin = COPIES[how](model)
    inputs = batches[0][0]
    assert torch.equal(twin.eval()(inputs), model.eval()(inputs))
    twin.train()
    train(twin, sgd(twin, weight_decay=0.01), batches)
    assert_zeros_kept_and_others_moved(before, values(twin))
    assert_same_state(state_of(model), state)
    frozen = probmask.freeze_masks(twin)  # for a copy: returns its existing masks
    frozen.finalize()
    assert list(twin.state_dict()) == list(build(name).state_dict())
    probmask.save(twin, tmp_path / "model.safetensors")
    loaded = probmask.load_into(build(name), tmp_path / "model.safetensors")
    assert_same_state(state_of(loaded), state_of(twin))


def test_torch_save_of_the_whole_model():
    model = sparse("conv")
    probmask.freeze_masks(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_same_state(state_of(loaded), state_of(model))


def test_training_resumes_from_state_dicts_bit_for_bit(tmp_path):
    path = tmp_path / "checkpoint.pt"
    batches = make_batches("conv", 20)
    model = sparse("conv")
    probmask.freeze_masks(model)
    optimizer = sgd(model)
    train(model, optimizer, batches[:10])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    train(model, optimizer, batches[10:])

    again = sparse("conv", seed=5)  # other zeros, which those of the checkpoint replace
    probmask.freeze_masks(again)
    optimizer = sgd(again)
    saved = torch.load(path, weights_only=True)
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(again, optimizer, batches[10:])
    assert_same_state(state_of(again), state_of(model))
    for ours, theirs in zip(values(again), values(model), strict=True):
        assert torch.equal(ours, theirs)


def test_an_averaged_copy_keeps_the_zeros():
    model = sparse("conv")
    before = values(model)
    probmask.freeze_masks(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = sgd(model)
    for batch in make_batches("conv", 5):
        train(model, optimizer, [batch])
        averaged.update_parameters(model)
    assert_zeros_kept_and_others_moved(before, values(averaged.module))


def test_another_dtype():
    model = sparse("mlp").bfloat16()
    before = [value.double() for value in values(model)]
    probmask.freeze_masks(model)
    model.double()
    train(model, sgd(model), [(x.double(), y) for x, y in make_batches("mlp", 5)])
    assert_zeros_kept_and_others_moved(before, values(model))


class Own(nn.Module):
    """A module class defined by the user."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.kernel = nn.Parameter(torch.randn(12, 3))

    def forward(self, x):
        return torch.relu(self.body(x)) @ self.kernel


def test_a_user_defined_module_from_and_to_an_artifact(tmp_path):
    torch.manual_seed(0)
    model = Own()
    with torch.no_grad():
        for parameter in (model.body.weight, model.kernel):
            parameter.masked_fill_(torch.rand_like(parameter) < 0.7, 0.0)
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    probmask.save(model, first)
    loaded = probmask.load_into(Own(), first)
    frozen = probmask.freeze_masks(loaded, include=["kernel"])
    train(loaded, torch.optim.AdamW(loaded.parameters(), lr=0.01), make_batches("mlp", 20))
    with pytest.raises(probmask.InputError, match=r"call finalize\(\)"):
        probmask.save(loaded, second)
    assert not second.exists()
    frozen.finalize()
    probmask.save(loaded, second)
    for before, after in zip(
        probmask.read(first).tensors, probmask.read(second).tensors, strict=True
    ):
        assert (before.name, before.nnz) == (after.name, after.nnz)
    assert bool((loaded.kernel[model.kernel == 0] == 0).all())
    assert not torch.equal(loaded.kernel, model.kernel)


def test_after_sparse_training(tmp_path):
    model = build("conv")
    optimizer = sgd(model)
    method = probmask.TiedProbMask(sparsity=0.8)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=10, seed=0)
    train(model, optimizer, make_batches("conv", 10))
    with pytest.raises(probmask.InputError, match="finalize the earlier sparsifier"):
        probmask.freeze_masks(model)
    summary = sparsifier.finalize()
    frozen = probmask.freeze_masks(model)
    train(model, optimizer, make_batches("conv", 10, seed=7))
    assert frozen.summary() == summary
    assert frozen.finalize(data=[x for x, _ in make_batches("conv", 2)]) == summary


def test_errors_of_masks_that_still_apply_name_freeze_masks():
    model = build("mlp")
    probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=1)
    average = AveragedModel(model)
    with pytest.raises(probmask.InputError, match=r"^freeze_masks\(model\): 0\.weight is already"):
        probmask.freeze_masks(average.module)
    model = build("mlp")
    prune.l1_unstructured(model[0], "weight", 0.5)
    for call in (probmask.freeze_masks, probmask.find_sites):
        message = rf"^{call.__name__}\(model\): torch\.nn\.utils\.prune still masks 0\.weight;"
        with pytest.raises(probmask.InputError, match=message):
            call(model)


def test_invalid_calls_raise():
    with pytest.raises(
        probmask.InputError, match="the model has no zero weights; load or finalize"
    ):
        probmask.freeze_masks(build("mlp"))
    model = sparse("mlp")
    frozen = probmask.freeze_masks(model)
    with pytest.raises(probmask.InputError, match="already frozen"):
        probmask.freeze_masks(model, exclude=["0"])
    same = probmask.freeze_masks(model)
    frozen.finalize()
    for masks in (frozen, same):
        with pytest.raises(probmask.InputError, match="call freeze_masks again"):
            masks.finalize()
    nn.utils.parametrizations.weight_norm(model[2], "bias")
    probmask.freeze_masks(model)
    with pytest.raises(RuntimeError, match="parametrized modules is only supported"):
        pickle.dumps(model[2])
