"""Recurrent layers compute with the effective weights, and their flat weights stay right."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_sequence

import probmask
from probmask.masking.macs import macs_per_weight
from probmask.masking.sites import find_sites
from reference.networks import build, make_batches, sgd, state_of, train

LAYERS = {
    "lstm": lambda: nn.LSTM(4, 5),
    "two layers, two directions": lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True),
    "projection, batch first": lambda: nn.LSTM(4, 5, proj_size=3, batch_first=True),
    "dropout": lambda: nn.LSTM(4, 5, num_layers=2, dropout=0.5),
    "gru without bias": lambda: nn.GRU(4, 5, num_layers=2, bias=False),
    "rnn": lambda: nn.RNN(4, 5, bidirectional=True),
    "relu rnn": lambda: nn.RNN(4, 5, nonlinearity="relu"),
}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}


def sequence(kind):
    torch.manual_seed(1)
    if kind == "packed":
        return pack_sequence([torch.randn(n, 4) for n in (6, 3, 2)])
    return torch.randn(6, 4) if kind == "unbatched" else torch.randn(3, 6, 4)


def pruned(module, fraction=0.5):
    """Set the smallest weights of each matrix to zero, so that `freeze_masks` finds masks."""
    with torch.no_grad():
        for site in find_sites(module):
            border = site.weight.abs().flatten().quantile(fraction)
            site.weight.masked_fill_(site.weight.abs() < border, 0.0)
    return module


def output_of(layer, inputs):
    torch.manual_seed(2)  # of the dropout
    output = layer(inputs)[0]
    return output.data if isinstance(output, nn.utils.rnn.PackedSequence) else output


def flat_weights_are_the_parameters(layer):
    return all(
        weight is layer._parameters[name]
        for name, weight in zip(layer._flat_weights_names, layer._flat_weights, strict=True)
    )


def refill_(module):
    """Make pruned weights nonzero, as momentum would: the masks must hide it."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.where(parameter == 0, 3.0, 0.0))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("inputs", ["batch", "unbatched", "packed"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_computes_and_differentiates_like_the_plain_layer_with_masked_weights(
    name, inputs, training
):
    torch.manual_seed(0)
    plain = pruned(LAYERS[name]())
    layer = copy.deepcopy(plain)
    probmask.freeze_masks(layer)
    refill_(layer)
    x = sequence(inputs)
    expected, found = (output_of(m.train(training), x) for m in (plain, layer))
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for (weight_name, weight), other in zip(
        plain.named_parameters(), layer.parameters(), strict=True
    ):
        kept = (weight != 0) if "weight" in weight_name else torch.ones_like(weight).bool()
        assert torch.equal(other.grad, torch.where(kept, weight.grad, 0.0))
    assert flat_weights_are_the_parameters(layer)


@pytest.mark.parametrize("kind", CELLS)
def test_the_weights_of_a_cell_are_masked_by_default(kind):
    cell = CELLS[kind](4, 4)
    sparsifier = probmask.attach(cell, probmask.TiedProbMask(sparsity=0.5), total_steps=1)
    assert list(sparsifier.masks) == ["weight_ih", "weight_hh"]
    size = sum(site.size for site in sparsifier.sites)
    cell.eval()
    assert cell.weight_ih.count_nonzero() + cell.weight_hh.count_nonzero() == size // 2
    inputs = torch.randn(2, 4)
    before = cell(inputs)
    assert sparsifier.finalize().kept == size // 2
    for one, other in zip(before, cell(inputs), strict=True):
        assert torch.equal(one, other)


def attached(form="tied", steps=0, total=12):
    model = build("lstm")
    optimizer = sgd(model)
    kind = {"tied": probmask.TiedProbMask, "learned": probmask.ProbMask}[form]
    method = kind(sparsity=0.7, min_keep_per_layer=1)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=total, seed=3)
    train(model, optimizer, make_batches("lstm", steps))
    return model, optimizer, sparsifier


def test_the_weights_of_all_layers_and_directions_are_sites():
    layer = nn.LSTM(4, 5, num_layers=2, bidirectional=True, proj_size=3)
    suffixes = ["l0", "l0_reverse", "l1", "l1_reverse"]
    kinds = ["weight_ih", "weight_hh", "weight_hr"]
    expected = [f"{kind}_{suffix}" for suffix in suffixes for kind in kinds]
    assert [site.name for site in find_sites(layer)] == expected


@pytest.mark.filterwarnings("error:.*will not be masked")
def test_recurrent_weights_are_not_named_as_unmasked():
    attached()


def after_to(model):
    return model.double().float()


def after_load(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return model


def after_pickling(model):
    return pickle.loads(pickle.dumps(model))


def after_functional_call(model):
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    functional_call(model, weights, (make_batches("lstm", 1)[0][0],))
    return model


CHANGES = [copy.deepcopy, after_to, after_load, after_pickling, after_functional_call]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["attached", "finalized"])
def test_the_flat_weights_are_the_parameters_after_any_change(change, moment):
    model, _, sparsifier = attached(steps=4)
    inputs = make_batches("lstm", 1, seed=9)[0][0]
    if moment == "finalized":
        sparsifier.finalize()
    assert flat_weights_are_the_parameters(model.lstm)
    expected = model.eval()(inputs)
    changed = change(model)
    assert torch.equal(changed(inputs), expected)
    assert flat_weights_are_the_parameters(changed.lstm)
    assert [ref() for ref in changed.lstm._flat_weight_refs] == changed.lstm._flat_weights
    with torch.no_grad():
        changed.lstm.weight_hh_l0.zero_()  # of a masked layer, this is the effective weight
        changed.lstm._parameters["weight_ih_l0"].zero_()
    assert not torch.equal(changed(inputs), expected)


def test_a_failed_call_leaves_the_flat_weights():
    model, _, _ = attached()
    with pytest.raises(RuntimeError, match="input_size"):
        model(torch.randn(2, 5, 7))
    assert flat_weights_are_the_parameters(model.lstm)


def test_after_finalize_it_is_the_plain_layer():
    model, _, sparsifier = attached(steps=12)
    inputs = make_batches("lstm", 1, seed=9)[0][0]
    evaluated = model.eval()(inputs)
    sparsifier.finalize()
    assert type(model.lstm) is nn.LSTM
    assert torch.equal(model(inputs), evaluated)
    fresh = build("lstm", seed=5)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(inputs), evaluated)


def test_training_follows_the_gradient_of_functional_weights():
    """One update equals that of a plain layer on the effective weights, straight through."""
    model, optimizer, _ = attached(steps=2)
    batch = make_batches("lstm", 1, seed=9)[0]
    effective = {
        name: getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name, _ in model.named_parameters()
    }
    leaves = {name: w.detach().clone().requires_grad_() for name, w in effective.items()}
    plain = build("lstm")
    loss = nn.functional.cross_entropy(functional_call(plain, leaves, (batch[0],)), batch[1])
    loss.backward()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    for name, parameter in model.named_parameters():
        masked = getattr(effective[name], "grad_fn", None) is not None
        kept = effective[name] != 0 if masked else torch.ones_like(parameter).bool()
        assert torch.equal(parameter.grad[kept], leaves[name].grad[kept]), name


@pytest.mark.parametrize(
    ("layer", "inputs", "uses"),
    [
        (nn.LSTM(4, 5, num_layers=2, batch_first=True), torch.randn(3, 6, 4), 6),
        (nn.GRU(4, 5, bidirectional=True, batch_first=True), torch.randn(3, 6, 4), 6),
        (nn.GRUCell(4, 5), torch.randn(3, 4), 1),
    ],
)
def test_each_weight_is_used_once_per_step(layer, inputs, uses):
    sites = find_sites(layer)
    assert macs_per_weight(layer, sites, inputs) == (uses,) * len(sites)


def test_a_budget_in_flops_counts_the_steps():
    model = build("lstm")
    method = probmask.TiedProbMask(sparsity=0.7, cost="flops")
    inputs = make_batches("lstm", 1)[0][0]
    sparsifier = probmask.attach(model, method, total_steps=1, example_inputs=inputs)
    *lstm, head = sparsifier.finalize().layers
    dense = 5 * sum(layer.size for layer in lstm) + head.size
    sparse = 5 * sum(layer.kept for layer in lstm) + head.kept
    assert sparse == pytest.approx(0.3 * dense, abs=5)


def test_it_is_saved_inspected_loaded_and_compiled(tmp_path):
    model, _, sparsifier = attached(steps=12)
    summary = sparsifier.finalize()
    path = tmp_path / "model.safetensors"
    probmask.save(model.eval(), path)
    assert probmask.inspect(path).kept == summary.kept
    inputs = make_batches("lstm", 1, seed=9)[0][0]
    expected = model(inputs)
    loaded = probmask.load_into(build("lstm", seed=5), path).eval()
    assert torch.equal(loaded(inputs), expected)
    with torch.device("meta"):
        empty = build("lstm")
    loaded = probmask.load_into(empty, path).eval()
    assert torch.equal(loaded(inputs), expected)
    assert flat_weights_are_the_parameters(loaded.lstm)
    engine = probmask.runtime.compile(model, inputs, layers="sparse")
    torch.testing.assert_close(engine(inputs), expected.detach())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("form", ["tied", "learned"])
def test_torch_compile_trains_the_same(form):
    """By default TorchDynamo runs recurrent layers in PyTorch, and compiles what is around them."""
    torch._dynamo.reset()
    plain, compiled = attached(form), attached(form)
    network = torch.compile(compiled[0], backend="aot_eager")
    batches = make_batches("lstm", 8)
    train(plain[0], plain[1], batches)
    train(network, compiled[1], batches)
    expected = state_of(plain[0])
    for name, value in state_of(compiled[0]).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)
    inputs = batches[0][0]
    torch.testing.assert_close(network.eval()(inputs), plain[0].eval()(inputs))
    assert compiled[2].finalize() == plain[2].finalize()
    torch._dynamo.reset()
