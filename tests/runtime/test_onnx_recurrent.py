"""LSTM, GRU and RNN from ONNX files, compared with ONNX Runtime, ONNX's reference and PyTorch."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.utils import _pytree as pytree

from probmask import runtime
from probmask.errors import InputError
from probmask.runtime.from_onnx.onnx_loading import load_onnx
from runtime.test_from_onnx import by_onnxruntime, exported
from runtime.test_recurrent import LastStep, Tagger, WithStates, example, pruned

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, FEATURES, UNITS = 5, 3, 4, 6


def operator_file(path, kind, *, direction="forward", bias=True, states=True, **attributes):
    """Write a file with one operator; return its inputs."""
    draw = np.random.default_rng(0)
    directions, rows = 1 + (direction == "bidirectional"), GATES[kind] * UNITS
    layout = attributes.get("layout", 0)
    outer = (BATCH, STEPS) if layout else (STEPS, BATCH)
    state = (BATCH, directions, UNITS) if layout else (directions, BATCH, UNITS)
    shapes = {"x": (*outer, FEATURES), "h": state, "c": state}
    names = ["x", *(["h"] if states else []), *(["c"] if states and kind == "LSTM" else [])]
    inputs = {name: draw.normal(size=shapes[name]).astype(np.float32) for name in names}
    constants = {
        "w": (directions, rows, FEATURES),
        "r": (directions, rows, UNITS),
        "b": (directions, 2 * rows),
    }
    stored = [
        numpy_helper.from_array(draw.normal(size=shape).astype(np.float32), name)
        for name, shape in constants.items()
    ]
    read = ["x", "w", "r", "b" if bias else "", "", *names[1:]]
    results = ["y", "y_h", "y_c"][: 3 if kind == "LSTM" else 2]
    reset = {"linear_before_reset": 1} if kind == "GRU" else {}
    settings = {"direction": direction, "hidden_size": UNITS, **reset, **attributes}
    graph = helper.make_graph(
        [helper.make_node(kind, read, results, **settings)],
        "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape) for n, x in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        stored,
    )
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return list(inputs.values())


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("given", [True, False], ids=["states, bias", "neither"])
def test_operators_agree_with_onnx_runtime(tmp_path, kind, direction, given):
    path = tmp_path / "m.onnx"
    relu = {"activations": ["Relu"] * (1 + (direction == "bidirectional"))}
    attributes = relu if kind == "RNN" and not given else {}
    inputs = operator_file(path, kind, direction=direction, bias=given, states=given, **attributes)
    check(load_onnx(path)[0], inputs, by_onnxruntime(path, *inputs))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_operators_with_the_batch_first(tmp_path, kind):
    """ONNX Runtime does not have this layout; ONNX's reference has it, in one direction."""
    path = tmp_path / "m.onnx"
    inputs = operator_file(path, kind, layout=1)
    names = [item.name for item in onnx.load(path).graph.input]
    by_reference = ReferenceEvaluator(str(path)).run(None, dict(zip(names, inputs, strict=True)))
    check(load_onnx(path)[0], inputs, by_reference)


def check(network, inputs, expected):
    found = network(*map(torch.from_numpy, inputs))
    for mine, theirs in zip(found, expected, strict=True):
        assert tuple(mine.shape) == theirs.shape
        np.testing.assert_allclose(mine.detach(), theirs, rtol=1e-4, atol=1e-5)


def with_states(layer, steps=7):
    return WithStates(pruned(layer)).eval(), lambda n: example(layer, n, steps, True)


def tokens(n):
    return (torch.randint(0, 30, (n, 19)),)


# The model, its inputs for a batch size, the exporter, and the dimensions that are the batch.
CASES = {
    "tagger, old": (pruned(Tagger()), tokens, False, (0,)),
    "last step": (pruned(LastStep()), lambda n: (torch.randn(n, 9, 12),), True, (0,)),
    "fixed, old": (pruned(LastStep()), lambda n: (torch.randn(n, 9, 12),), False, ()),
    "fixed": (pruned(LastStep()), lambda n: (torch.randn(n, 9, 12),), True, ()),
    "lstm, old": (*with_states(nn.LSTM(6, 16, 2, bidirectional=True)), False, (1, 1, 1)),
    "gru, old": (*with_states(nn.GRU(6, 16, 2, batch_first=True)), False, (0, 1)),
    "rnn, old": (*with_states(nn.RNN(6, 16, 2, batch_first=True)), False, (0, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_exported_networks_run_on_the_kernels_for_any_batch(tmp_path, case):
    model, inputs, dynamo, batch = CASES[case]
    path = tmp_path / "model.onnx"
    exported(model, path, inputs(2), dynamo=dynamo, batch=batch)
    engine = runtime.compile(path, layers="sparse", threads=1)
    assert engine.network.batch_fixed_by == ""
    layers = [row["runs"] for row in engine.describe() if row["density"] is not None]
    assert set(layers) == {"kernels"}
    for n in (1, 3):
        given = inputs(n)
        with torch.no_grad():
            by_pytorch = pytree.tree_leaves(model(*given))
        found = pytree.tree_leaves(engine(*given))
        for mine, theirs in zip(found, by_pytorch, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        if batch:  # otherwise ONNX Runtime takes the batch of the file only
            by_onnx = by_onnxruntime(path, *(x.numpy() for x in given))
            for mine, theirs in zip(found, by_onnx, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_steps_that_the_exporter_writes_out(tmp_path):
    """PyTorch's new exporter has no RNN: it writes all steps, and a flip for the reverse."""
    model, inputs = with_states(nn.RNN(4, 6, bidirectional=True, batch_first=True), steps=3)
    path, given = tmp_path / "model.onnx", inputs(2)
    exported(model, path, given, dynamo=True, batch=(0, 1))
    with torch.no_grad():
        expected = [x.numpy() for x in pytree.tree_leaves(model(*given))]
    check(load_onnx(path)[0], [x.numpy() for x in given], expected)


@pytest.mark.parametrize(
    ("kind", "attributes", "named"),
    [
        ("GRU", {"linear_before_reset": 0}, "linear_before_reset=0"),
        ("LSTM", {"clip": 3.0}, "clip"),
        ("LSTM", {"activations": ["Sigmoid", "Tanh", "Relu"]}, "sigmoid, tanh, relu"),
        ("RNN", {"direction": "bidirectional", "activations": ["Tanh", "Relu"]}, "tanh, relu"),
    ],
)
def test_forms_without_a_counterpart_are_named(tmp_path, kind, attributes, named):
    path = tmp_path / "m.onnx"
    operator_file(path, kind, **attributes)
    with pytest.raises(InputError, match=rf"the ONNX operator {kind} .*{named}"):
        runtime.compile(path)


def test_weights_of_other_shapes_raise_one_error(tmp_path):
    path = tmp_path / "m.onnx"
    operator_file(path, "LSTM")
    model = onnx.load(path)
    for name, shape in (("w", (2, 24, 4)), ("r", (1, 24, 7)), ("b", (1, 24)), ("w", (24, 4))):
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        (stored,) = [item for item in changed.graph.initializer if item.name == name]
        stored.CopyFrom(numpy_helper.from_array(np.ones(shape, np.float32), name))
        onnx.save(changed, path)
        with pytest.raises(InputError, match="weights of unexpected shapes"):
            runtime.compile(path)
