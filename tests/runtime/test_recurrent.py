"""LSTM, GRU and RNN run on the kernels, and agree with PyTorch and with a loop in NumPy."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import probmask
from probmask.runtime.kernels.recurrent_steps import HAS_WINDOWS
from probmask.runtime.plan.partition import Choices
from probmask.runtime.plan.recurrent_operations import windows_of
from reference.recurrent import matrix_of_windows, recurrent
from runtime.comparing import assert_close, assert_same


def pruned(module, sparsity=0.6):
    """Prune all weight matrices at random."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.masked_fill_(torch.rand_like(parameter) < sparsity, 0)
    return module.eval()


class WithStates(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *states):
        return self.layer(x, states if len(states) > 1 else states[0])


# Kind, features, units, steps, and the settings of the module.
CASES = {
    "lstm": (nn.LSTM, 7, 16, 35, {}),
    "lstm-deep-both-ways": (nn.LSTM, 20, 21, 17, {"num_layers": 3, "bidirectional": True}),
    "lstm-no-bias": (nn.LSTM, 5, 48, 16, {"bias": False, "num_layers": 2}),
    "lstm-one-step": (nn.LSTM, 33, 33, 1, {"num_layers": 2}),
    "gru": (nn.GRU, 16, 40, 18, {"num_layers": 2}),
    "gru-both-ways": (nn.GRU, 3, 5, 6, {"bidirectional": True, "bias": False}),
    "tanh": (nn.RNN, 6, 32, 20, {"num_layers": 2, "bidirectional": True}),
    "relu": (nn.RNN, 6, 18, 9, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize("given", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("case", CASES)
def test_it_agrees_with_pytorch_and_the_reference(case, given):
    """Check all outputs, image by image and in groups, with one thread or two."""
    kind, features, units, steps, settings = CASES[case]
    batch_first = (len(case) + given) % 2 == 0
    layer = pruned(kind(features, units, batch_first=batch_first, **settings))
    model = WithStates(layer) if given else layer
    inputs = {n: example(layer, n, steps, given) for n in (1, 2, 5, 18)}
    engine = probmask.runtime.compile(model, inputs[2], layers="sparse", threads=1 + len(case) % 2)
    assert engine.network.batch_fixed_by == ""
    assert [row["runs"] for row in engine.describe() if row["density"] is not None] == ["kernels"]
    for choices in (engine.choices, Choices(engine.choices.sparse, {}), Choices(frozenset(), {})):
        engine.use(choices)
        for own in inputs.values():
            with torch.no_grad():
                assert_close(engine(*own), model(*own))
    engine.use_kernels()
    x, *states = inputs[2]
    sequence, hidden, cell = recurrent(
        layer, x if batch_first else x.transpose(0, 1), reference_states(states)
    )
    found, finals = engine(*inputs[2])
    found = found if batch_first else found.transpose(0, 1)
    assert np.abs(found.numpy() - sequence).max() <= 2e-6 * max(1, np.abs(sequence).max())
    finals = finals if isinstance(finals, tuple) else (finals,)
    for ours, expected in zip(finals, (hidden, cell), strict=False):
        assert np.abs(ours.numpy() - expected).max() <= 2e-6 * max(1, np.abs(expected).max())


def example(layer, batch, steps, given):
    """Return an input of the layer, and its initial states if they are given."""
    shape = (batch, steps) if layer.batch_first else (steps, batch)
    states = [torch.randn(layer_count(layer), batch, layer.hidden_size) for _ in range(2)]
    states = states if isinstance(layer, nn.LSTM) else states[:1]
    return torch.randn(*shape, layer.input_size), *(states if given else ())


def layer_count(layer):
    return layer.num_layers * (2 if layer.bidirectional else 1)


def reference_states(states):
    return [state.double().numpy() for state in (*states, states[-1])][:2] if states else None


class Tagger(nn.Module):
    """Embeddings, two directions, and a linear layer at each step."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.layer = nn.LSTM(12, 16, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens))[0])


class LastStep(nn.Module):
    """The last step, and the last layer's final states, as classifiers use them."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(12, 20, 2, batch_first=True), nn.Linear(20, 3)

    def forward(self, x):
        sequence, hidden = self.layer(x)
        return self.head(sequence[:, -1]), self.head(hidden[-1])


class Translator(nn.Module):
    """An encoder whose final states are the initial states of a decoder; features come second."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(6, 12, 3, padding=1)
        self.encoder, self.decoder = nn.LSTM(12, 16, batch_first=True), nn.LSTM(12, 16)
        self.start = nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x):
        y = self.first(x).transpose(1, 2)
        start = self.start.expand(1, len(x), 16)
        _, states = self.encoder(y, (start, torch.zeros_like(start)))
        return self.decoder(y.transpose(0, 1), states)[0].transpose(0, 1)


@pytest.mark.parametrize("network", [Tagger, LastStep, Translator])
def test_networks_around_recurrent_layers(network):
    torch.manual_seed(0)
    shapes = {"Tagger": (19,), "LastStep": (9, 12), "Translator": (6, 21)}
    inputs = {n: (torch.randn(n, *shapes[network.__name__]),) for n in (1, 2, 18)}
    if network is Tagger:
        inputs = {n: (torch.randint(0, 30, (n, 19)),) for n in inputs}
    engine = assert_same(pruned(network(), 0.5), *inputs[2], others=list(inputs.values()))
    assert engine.network.batch_fixed_by == ""
    recurrent_rows = [r for r in engine.describe() if r["node"].startswith(("lstm", "gru"))]
    assert recurrent_rows
    assert all(r["runs"] == "kernels" for r in recurrent_rows if r["density"] is not None)


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.second = nn.LSTMCell(4, 8), nn.GRUCell(8, 8)

    def forward(self, x):
        h = c = other = x.new_zeros(len(x), 8)
        for t in range(3):
            h, c = self.cell(x[:, t], (h, c))
            other = self.second(h, other)
        return other


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (nn.LSTM(4, 8, proj_size=3, batch_first=True), torch.randn(2, 5, 4), "proj_size"),
        (nn.GRU(4, 8, batch_first=True).double(), torch.randn(2, 5, 4).double(), "float32"),
        (Unrolled(), torch.randn(2, 3, 4), "single step"),
    ],
    ids=["proj_size", "float64", "cells"],
)
def test_pytorch_runs_what_has_no_kernel(model, x, reason):
    engine = assert_same(pruned(model, 0.3), x)
    assert any(reason in row["why"] for row in engine.describe())


def test_a_sequence_without_a_batch():
    engine = assert_same(pruned(nn.LSTM(4, 8, bidirectional=True), 0.3), torch.randn(5, 4))
    assert engine.choices.sparse


def test_a_network_that_explodes_is_repeated_in_pytorch():
    layer = pruned(nn.RNN(4, 6, nonlinearity="relu", batch_first=True), 0.2)
    with torch.no_grad():
        layer.weight_hh_l0.fill_(100)
    x = torch.rand(2, 30, 4) + 1
    unknown = torch.rand(18, 30, 4)
    unknown[3, 4, 1] = float("nan")
    assert_same(layer, x, others=[(unknown,), (unknown[3:4],)])


def test_a_pickled_engine_agrees_to_the_last_bit():
    layer = pruned(nn.LSTM(6, 20, 2, batch_first=True))
    x = torch.randn(3, 8, 6)
    engine = probmask.runtime.compile(layer, x, layers="sparse", threads=1)
    loaded = pickle.loads(pickle.dumps(engine))
    for choices in (engine.choices, Choices(frozenset(), {})):
        engine.use(choices)
        loaded.use(choices)
        assert torch.equal(engine(x)[0], loaded(x)[0])


def test_a_saved_graph_runs_without_the_model(tmp_path):
    path, x = tmp_path / "tagger.safetensors", torch.randn(2, 9, 12)
    model = pruned(LastStep(), 0.5)
    probmask.save(model, path, graph=True, example=x)
    found = probmask.runtime.load(path)(x.numpy())
    with torch.no_grad():
        assert_close([torch.from_numpy(own) for own in found], list(model(x)))


@pytest.mark.skipif(not HAS_WINDOWS, reason="windows are for processors with AVX-512")
@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("columns", [1, 16, 45, 100])
def test_windows_hold_every_weight_once(density, columns):
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((48, columns)).astype(np.float32)
    weight[draw.random(weight.shape) >= density] = 0
    starts, windows, values = windows_of(weight)
    assert np.array_equal(
        matrix_of_windows(starts, windows, values, columns + 32)[:, :columns], weight
    )
    assert np.count_nonzero(values) == np.count_nonzero(weight)
