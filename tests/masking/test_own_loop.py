"""The README's training loop on networks of many kinds."""

import warnings

import pytest
import torch
from torch import nn

import probmask
from reference.networks import NETWORKS, build, loss_of, make_batches, sgd, train
from reference.probmask_run import method_of

STRANGERS = [
    "unet",
    "transformer",
    "conv1d",
    "conv3d",
    "depthwise",
    "mlp",
    "tied",
    "recurrent",
    "lstm",
]


def maskable(model):
    """Return the masked weights, each once, found independently of the package."""
    found = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            found[id(module.weight)] = module.weight
        elif isinstance(module, nn.MultiheadAttention):
            found[id(module.in_proj_weight)] = module.in_proj_weight
        elif isinstance(module, nn.LSTM):
            found |= {id(w): w for name, w in module.named_parameters() if "weight" in name}
    return list(found.values())


def run(name, sparsity, form=None, steps=30):
    model = build(name)
    optimizer = sgd(model)
    method = method_of(form, sparsity=sparsity, min_keep_per_layer=1)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=steps, seed=3)
    for batch in make_batches(name, steps):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, sparsifier.finalize()


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("sparsity", [0.5, 0.93])
def test_ends_at_exactly_the_requested_sparsity(form, name, sparsity):
    model, summary = run(name, sparsity, form)
    weights = maskable(model)
    size = sum(weight.numel() for weight in weights)
    keep = size - round(sparsity * size)
    assert sum(int(weight.count_nonzero()) for weight in weights) == keep
    assert (summary.kept, summary.size) == (keep, size)
    assert [layer.size for layer in summary.layers] == [weight.numel() for weight in weights]
    assert [layer.kept for layer in summary.layers] == [int(w.count_nonzero()) for w in weights]
    assert summary.sparsity == pytest.approx(1 - keep / size, abs=1e-12)


@pytest.mark.parametrize("name", STRANGERS)
def test_pruned_weights_are_positive_zeros(form, name):
    model, _ = run(name, 0.9, form, steps=5)
    for weight in maskable(model):
        assert not torch.signbit(weight[weight == 0]).any()


@pytest.mark.parametrize("name", [*STRANGERS, "language", "conv"])
def test_leaves_a_plain_module_with_the_same_parameters_in_the_same_order(form, name):
    model = build(name)
    kinds = [type(module) for module in model.modules()]
    keys = list(model.state_dict())
    parameters = list(model.named_parameters(remove_duplicate=False))
    method = method_of(form, sparsity=0.5, min_keep_per_layer=1)
    optimizer = sgd(model)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=2)
    for names in (model.state_dict(), dict(model.named_parameters(remove_duplicate=False))):
        assert [name for name in names if name not in keys] == []
    during = list(model.named_parameters(remove_duplicate=False))
    assert [(n, id(p)) for n, p in during] == [(n, id(p)) for n, p in parameters]
    train(model, optimizer, make_batches(name, 2))
    assert list(model.state_dict()) == keys
    sparsifier.finalize()
    assert [type(module) for module in model.modules()] == kinds
    after = list(model.named_parameters(remove_duplicate=False))
    assert {name: id(p) for name, p in after} == {name: id(p) for name, p in parameters}
    assert all(p.requires_grad for _, p in after)
    # In order, because averaging and optimizer states identify parameters by position.
    assert list(model.state_dict()) == keys
    assert [name for name, _ in after] == [name for name, _ in parameters]


def test_it_learns(form):
    """A tenth of the weights solves a separable problem."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 6)
    labels = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    method = method_of(form, sparsity=0.9)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=400, seed=0)
    train(model, optimizer, [(inputs, labels)] * 400)
    sparsifier.finalize()
    assert (model.eval()(inputs).argmax(1) == labels).float().mean() > 0.85


def test_the_finished_model_can_be_pickled_and_saved(tmp_path):
    model, _ = run("unet", 0.9, steps=3)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    fresh = build("unet", seed=5)
    fresh.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    inputs = make_batches("unet", 1)[0][0]
    assert torch.equal(fresh.eval()(inputs), model.eval()(inputs))


def test_an_embedding_stays_dense_unless_it_is_included():
    model, summary = run("transformer", 0.9, steps=3)
    assert model.embed.weight.count_nonzero() == model.embed.weight.numel()
    assert not any("embed" in layer.name for layer in summary.layers)


def test_stopping_early_still_meets_the_budget(form):
    """With fewer updates than planned, finalize still keeps exactly the budget."""
    model = build("mlp")
    optimizer = sgd(model)
    method = method_of(form, sparsity=0.8, min_keep_per_layer=1)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=1000)
    train(model, optimizer, make_batches("mlp", 4))
    assert sparsifier.finalize().kept == 400 - round(0.8 * 400)


@pytest.mark.parametrize(("steps", "warned"), [(0, True), (5, True), (25, False), (30, False)])
def test_ending_before_the_ramp_warns(form, steps, warned):
    model = build("mlp")
    optimizer = sgd(model)
    method = method_of(form, sparsity=0.9, min_keep_per_layer=1)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=30, seed=3)
    train(model, optimizer, make_batches("mlp", steps))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", probmask.EarlyEndWarning)
        sparsifier.finalize()
    messages = [str(w.message) for w in found if w.category is probmask.EarlyEndWarning]
    assert len(messages) == warned
    if warned:
        assert messages[0].startswith(f"finalize() was called after {steps} of 30 steps: ")
        assert "to 90 % at once" in messages[0]


def test_training_may_continue_beyond_total_steps(form):
    model = build("mlp")
    optimizer = sgd(model)
    method = method_of(form, sparsity=0.8, freeze_at=1)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=5)
    train(model, optimizer, make_batches("mlp", 12))
    assert sparsifier.now.step == 12
    assert sparsifier.now.fraction == 1
    assert sparsifier.finalize().kept == 80


@pytest.mark.parametrize("steps", [0, -3, 2.0, True])
def test_total_steps_is_a_positive_whole_number(steps):
    with pytest.raises(probmask.InputError, match=r"attach\(total_steps=.*at least 1"):
        probmask.attach(build("mlp"), probmask.TiedProbMask(sparsity=0.5), total_steps=steps)


def test_every_network_of_the_table_runs():
    for name in NETWORKS:
        assert loss_of(build(name), make_batches(name, 1)[0]).isfinite()


@pytest.mark.parametrize("name", ["probmask-tied", "probmask", "feather", "st3", "str", "spartan"])
def test_weights_without_requires_grad_are_masked_but_never_changed(name):
    model = build("mlp")
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    before = [model[i].weight.detach().clone() for i in (0, 2)]
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1, momentum=0.9)
    method = probmask.methods.METHODS[name](sparsity=0.8)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=20, seed=1)
    batches = make_batches("mlp", 20)
    train(model, optimizer, batches, sparsifier)
    evaluated = model.eval()(batches[0][0])
    sparsifier.finalize()
    for index, weight in zip((0, 2), before, strict=True):
        kept = model[index].weight != 0
        assert torch.equal(model[index].weight[kept], weight[kept])
        assert 0 < int(kept.sum()) < weight.numel()
    torch.testing.assert_close(model(batches[0][0]), evaluated)
