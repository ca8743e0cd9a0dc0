"""`probmask.runtime.compile("model.onnx")`, compared with ONNX Runtime and PyTorch."""

from contextlib import suppress

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import probmask
from probmask import runtime
from probmask.artifact.onnx import to_onnx
from probmask.errors import InputError
from probmask.runtime.from_onnx.onnx_network import load_onnx


def by_onnxruntime(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


def sparse(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.8, 0.0)
    return model.eval()


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


NETWORKS = {
    "resnet": (lambda: probmask.models.resnet14(width=4), (3, 32, 32)),
    "smallconv": (probmask.models.smallconv, (1, 28, 28)),
    "mobilenet": (lambda: probmask.models.mobilenetv1(width=8, classes=10), (3, 64, 64)),
    "encoder": (encoder, (9, 16)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_an_exported_network_runs_on_the_kernels(tmp_path, name):
    """Without an example, for any batch size, and every layer on the kernels."""
    build, shape = NETWORKS[name]
    model = sparse(build())
    path = tmp_path / "model.onnx"
    path.write_bytes(to_onnx(model, shape))
    engine = runtime.compile(path, layers="sparse", threads=1)
    x = torch.randn(3, *shape)
    with torch.no_grad():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        engine(x.numpy()), by_onnxruntime(path, x.numpy())[0], rtol=1e-3, atol=1e-4
    )
    assert {row["runs"] for row in engine.describe()} == {"kernels"}


def file_of(path, nodes, inputs, constants, *, opset=18, outputs=("y",)):
    """Write an ONNX file; an input is an array, whose batch size is left open."""
    kinds = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "b": TensorProto.BOOL}
    values = [
        helper.make_tensor_value_info(name, kinds[x.dtype.kind], ["batch", *x.shape[1:]])
        for name, x in inputs.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "graph", values, results, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


def f(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def i(*values):
    return np.array(values, np.int64)


IMAGE, ROWS, TOKENS = f(2, 4, 8, 8), f(2, 6), f(2, 5, 6)
# Operator, inputs that vary, constants, attributes.
FORMS = [
    ("Conv", [IMAGE], [f(6, 2, 3, 3), f(6)], {"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 1]}),
    ("Conv", [IMAGE], [f(6, 4, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ("Conv", [IMAGE], [f(6, 4, 3, 3)], {"pads": [0, 1, 2, 1], "dilations": [2, 1]}),
    ("Conv", [f(2, 4, 9)], [f(6, 4, 3), f(6)], {"pads": [1, 1]}),
    ("ConvTranspose", [IMAGE], [f(4, 3, 2, 2), f(3)], {"strides": [2, 2]}),
    ("BatchNormalization", [IMAGE], [f(4), f(4), f(4), np.abs(f(4)) + 1], {"epsilon": 1e-3}),
    ("InstanceNormalization", [IMAGE], [f(4), f(4)], {}),
    ("LayerNormalization", [TOKENS], [f(6), f(6)], {"axis": -1}),
    ("Gemm", [ROWS], [f(3, 6), f(3)], {"transB": 1}),
    ("Gemm", [ROWS], [f(6, 3), f(3)], {"alpha": 0.5, "beta": 2.0}),
    ("MatMul", [TOKENS], [f(6, 3)], {}),
    ("MatMul", [TOKENS, f(2, 6, 3)], [], {}),
    ("MaxPool", [IMAGE], [], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [IMAGE], [], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 0, 1, 1]}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ("AveragePool", [IMAGE], [], {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1}),
    ("GlobalAveragePool", [IMAGE], [], {}),
    ("GlobalMaxPool", [IMAGE], [], {}),
    *[(kind, [ROWS], [], {}) for kind in ("Relu", "Sigmoid", "Tanh", "Erf", "Exp", "Neg", "Abs")],
    *[(kind, [ROWS], [], {}) for kind in ("HardSwish", "HardSigmoid", "Softplus", "LeakyRelu")],
    *[(kind, [ROWS], [], {"axis": -1}) for kind in ("Softmax", "LogSoftmax")],
    ("Elu", [ROWS], [], {"alpha": 0.5}),
    ("PRelu", [IMAGE], [np.abs(f(4, 1, 1))], {}),
    ("Clip", [ROWS], [np.float32(-0.5), np.float32(0.5)], {}),
    *[(kind, [ROWS, f(2, 6)], [], {}) for kind in ("Add", "Sub", "Mul", "Div", "Max", "Min")],
    *[(kind, [ROWS], [f(6)], {}) for kind in ("Add", "Sub", "Mul", "Div")],
    ("Pow", [ROWS], [np.float32(2.0)], {}),
    ("Reshape", [TOKENS], [i(0, -1)], {}),
    ("Reshape", [TOKENS], [i(-1, 3, 10)], {}),
    ("Flatten", [IMAGE], [], {"axis": 1}),
    ("Flatten", [IMAGE], [], {"axis": 2}),
    ("Transpose", [TOKENS], [], {"perm": [0, 2, 1]}),
    ("Transpose", [IMAGE], [], {"perm": [0, 2, 3, 1]}),
    ("Concat", [ROWS, f(2, 3)], [], {"axis": 1}),
    ("Pad", [IMAGE], [i(0, 0, 1, 2, 0, 0, 3, 4), np.float32(1.5)], {}),
    ("Pad", [IMAGE], [i(0, 0, 1, 1, 0, 0, 1, 1)], {"mode": "reflect"}),
    ("Slice", [IMAGE], [i(1, 0), i(7, 2**62), i(2, 3), i(2, 1)], {}),
    ("Slice", [TOKENS], [i(-3), i(-1), i(1)], {}),
    ("Gather", [TOKENS], [np.int64(2)], {"axis": 1}),
    ("Gather", [TOKENS], [i(0, -1)], {"axis": 2}),
    ("Squeeze", [f(2, 1, 6)], [i(1)], {}),
    ("Unsqueeze", [ROWS], [i(1, 3)], {}),
    ("ReduceMean", [IMAGE], [i(2, 3)], {"keepdims": 0}),
    ("ReduceSum", [IMAGE], [i(1)], {}),
    ("ReduceMax", [IMAGE], [i(-1)], {}),
    ("Resize", [IMAGE], [f(0), np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
    (
        "Resize",
        [IMAGE],
        [f(0), np.array([1, 1, 2, 2], np.float32)],
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    ("DepthToSpace", [IMAGE], [], {"blocksize": 2}),
    ("DepthToSpace", [IMAGE], [], {"blocksize": 2, "mode": "CRD"}),
    ("Identity", [ROWS], [], {}),
    ("Dropout", [ROWS], [], {}),
    ("Expand", [f(2, 1, 6)], [i(1, 4, 1)], {}),
    ("Cast", [np.arange(12).reshape(2, 6)], [], {"to": TensorProto.FLOAT}),
]


@pytest.mark.parametrize(
    ("kind", "varying", "constants", "attributes"), FORMS, ids=lambda v: v if type(v) is str else ""
)
def test_operators_agree_with_onnx_runtime(tmp_path, kind, varying, constants, attributes):
    inputs = {f"x{k}": np.asarray(x) for k, x in enumerate(varying)}
    stored = {f"c{k}": np.asarray(x) for k, x in enumerate(constants)}
    node = helper.make_node(kind, [*inputs, *stored], ["y"], **attributes)
    path = file_of(tmp_path / "op.onnx", [node], inputs, stored)
    network, _ = load_onnx(path)
    found = network(*(torch.from_numpy(x) for x in inputs.values()))
    (expected,) = by_onnxruntime(path, *inputs.values())
    assert tuple(found.shape) == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_older_operators_have_their_settings_as_attributes(tmp_path):
    nodes = [
        helper.make_node("Slice", ["x"], ["a"], starts=[0], ends=[4], axes=[1]),
        helper.make_node("Unsqueeze", ["a"], ["b"], axes=[1]),
        helper.make_node("Pad", ["b"], ["c"], pads=[0, 0, 1, 0, 0, 1], value=2.0),
        helper.make_node("Clip", ["c"], ["d"], min=0.0, max=6.0),
        helper.make_node("Softmax", ["d"], ["e"], axis=1),
        helper.make_node("Split", ["e"], ["y", "z"], axis=2, split=[2, 4]),
    ]
    path = file_of(tmp_path / "m.onnx", nodes, {"x": ROWS}, {}, opset=9, outputs=("y", "z"))
    engine = runtime.compile(path, layers="dense", threads=1)
    for found, expected in zip(engine(ROWS), by_onnxruntime(path, ROWS), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_embeddings_and_computed_shapes(tmp_path):
    """`Gather` of a table is an embedding; a shape may be computed from the batch size."""
    table, weight = f(10, 6), f(30, 4)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["a"]),
        helper.make_node("Shape", ["ids"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "axis"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("MatMul", ["b", "weight"], ["y"]),
    ]
    constants = {
        "table": table,
        "weight": weight,
        "zero": np.int64(0),
        "axis": i(0),
        "rest": i(-1),
    }
    stored = {name: np.asarray(value) for name, value in constants.items()}
    ids = np.random.default_rng(0).integers(0, 10, (3, 5))
    path = file_of(tmp_path / "m.onnx", nodes, {"ids": ids}, stored)
    engine = runtime.compile(path, layers="sparse", threads=1)
    for batch in (1, 3):
        expected = by_onnxruntime(path, ids[:batch])[0]
        np.testing.assert_allclose(engine(ids[:batch]), expected, rtol=1e-4, atol=1e-5)
    kinds = {type(node).__name__ for node in engine.network.nodes}
    assert "Embed" in kinds


@pytest.mark.parametrize("order", ["half first", "half last"])
def test_a_gelu_that_is_written_out_is_one_activation(tmp_path, order):
    numbers = {"root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)}
    ends = {
        "half first": [("Mul", ["h", "half"], "g"), ("Mul", ["g", "plus"], "y")],
        "half last": [("Mul", ["h", "plus"], "g"), ("Mul", ["g", "half"], "y")],
    }
    steps = [
        ("Gemm", ["x", "weight"], "h"),
        ("Div", ["h", "root"], "d"),
        ("Erf", ["d"], "e"),
        ("Add", ["e", "one"], "plus"),
        *ends[order],
    ]
    nodes = [helper.make_node(kind, inputs, [output]) for kind, inputs, output in steps]
    constants = {name: np.asarray(value) for name, value in numbers.items()} | {"weight": f(6, 8)}
    path = file_of(tmp_path / "m.onnx", nodes, {"x": ROWS}, constants)
    engine = runtime.compile(path, layers="sparse", threads=1)
    assert [type(node).__name__ for node in engine.network.nodes] == ["Convolution"]
    np.testing.assert_allclose(engine(ROWS), by_onnxruntime(path, ROWS)[0], rtol=1e-4, atol=1e-5)


def test_unknown_operators_are_named(tmp_path):
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("LpNormalization", ["a"], ["b"]),
        helper.make_node("FusedMagic", ["b"], ["y"], domain="com.example"),
    ]
    path = file_of(tmp_path / "m.onnx", nodes, {"x": ROWS}, {})
    expected = "the ONNX operators LpNormalization, com.example.FusedMagic are not supported"
    with pytest.raises(InputError, match=expected):
        runtime.compile(path)


def test_files_that_cannot_be_used_raise_one_error(tmp_path):
    path = file_of(tmp_path / "m.onnx", [helper.make_node("Relu", ["x"], ["y"])], {"x": ROWS}, {})
    intact = path.read_bytes()
    with pytest.raises(InputError, match="no such file"):
        runtime.compile(tmp_path / "nothing.onnx")
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(InputError, match="is a directory, not a file"):
        runtime.compile(tmp_path / "folder.onnx")
    rows = torch.from_numpy(ROWS)
    with pytest.raises(InputError, match=r"takes 1 input \(x\), not 2"):
        runtime.compile(path, (rows, rows))
    for content in (b"", b"\x00" * 50, b"no protocol buffer", intact[: len(intact) // 2]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"m\.onnx\): ") as caught:
            runtime.compile(path)
        assert "\n" not in str(caught.value)
    nodes = [helper.make_node("Relu", ["nothing"], ["y"])]
    file_of(path, nodes, {"x": ROWS}, {})
    with pytest.raises(InputError, match="not an intact ONNX file"):
        runtime.compile(path)
    with pytest.raises(InputError, match=r"runtime\.compile\(model\): pass an example"):
        runtime.compile(nn.Linear(2, 2))


def test_damaged_files_raise_an_input_error_or_load(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(to_onnx(sparse(nn.Sequential(nn.Linear(6, 4), nn.ReLU())), (6,)))
    intact, generator = path.read_bytes(), np.random.default_rng(0)
    for _ in range(200):
        content = bytearray(intact)
        for at in generator.integers(0, len(content), 3):
            content[at] = generator.integers(256)
        path.write_bytes(content)
        with suppress(InputError):
            load_onnx(path)


def test_open_sizes_need_an_example(tmp_path):
    path = tmp_path / "m.onnx"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 6])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    with pytest.raises(InputError, match=r"the input x open \(\?×\?×6\); pass an example"):
        runtime.compile(path)
    engine = runtime.compile(path, TOKENS, threads=1)
    np.testing.assert_array_equal(engine(TOKENS), np.maximum(TOKENS, 0))
