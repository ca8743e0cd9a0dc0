"""Quantized networks from ONNX files, compared with ONNX Runtime."""

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime import quantization
from torch import nn

from probmask import runtime
from probmask.errors import InputError
from runtime.test_from_onnx import ROWS, exported, f, file_of, sparse

DRAW = np.random.default_rng(0)
SCALES = np.abs(f(6)) + 0.1
# Type, integers, scales, zero points and attributes of a constant matrix.
WEIGHTS = {
    "int8": (TensorProto.INT8, DRAW.integers(-128, 128, (6, 4)), np.float32(0.1), None, {}),
    "zero point": (TensorProto.UINT8, DRAW.integers(0, 256, (6, 4)), np.float32(0.1), 128, {}),
    "axis 0": (
        TensorProto.INT8, DRAW.integers(-128, 128, (6, 4)), SCALES, DRAW.integers(-5, 5, 6),
        {"axis": 0},
    ),
    "axis 1": (TensorProto.INT8, DRAW.integers(-9, 9, (6, 4)), SCALES[:4], None, {"axis": 1}),
    "int4": (TensorProto.INT4, DRAW.integers(-8, 8, (6, 4)), SCALES[:4], None, {"axis": 1}),
    "blocks": (
        TensorProto.UINT4, DRAW.integers(0, 16, (6, 4)), np.abs(f(2, 4)) + 0.1,
        DRAW.integers(0, 16, (2, 4)), {"axis": 0, "block_size": 3},
    ),
}  # fmt: skip


def as_written(path, x):
    """Return the output of ONNX Runtime without its fused integer kernels, which round more."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options).run(None, {"x": x})[0]


@pytest.mark.parametrize("case", WEIGHTS)
def test_quantized_weights_are_weights_of_the_kernels(tmp_path, case):
    kind, integers, scales, zero, attributes = WEIGHTS[case]
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    constants = {"w": integers.astype(dtype), "s": np.asarray(scales, np.float32)}
    if zero is not None:
        constants["z"] = np.asarray(zero).astype(dtype)
    nodes = [
        helper.make_node("DequantizeLinear", list(constants), ["weight"], **attributes),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
    ]
    path = file_of(tmp_path / "m.onnx", nodes, {"x": ROWS}, constants, opset=21)
    engine = runtime.compile(path, layers="sparse", threads=1)
    assert [row["runs"] for row in engine.describe()] == ["kernels"]
    np.testing.assert_allclose(engine(ROWS), as_written(path, ROWS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "zero"), [(np.int8, -3), (np.uint8, 7), (np.int8, None)])
def test_activations_are_rounded_half_to_even_and_saturated(tmp_path, dtype, zero):
    x = np.array(
        [[0.25, 0.75, 1.25, -0.25, -0.75, 1e9], [-1e9, 63.4, -64, 127, 3.3, 0]], np.float32
    )
    constants = {"s": np.asarray(0.5, np.float32), "z": np.asarray(zero or 0, dtype)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"][: 2 if zero is None else 3], ["y"]),
    ]
    path = file_of(tmp_path / "m.onnx", nodes, {"x": x}, constants)
    engine = runtime.compile(path, layers="sparse", threads=1)
    np.testing.assert_array_equal(engine(x), as_written(path, x))


class Readings(quantization.CalibrationDataReader):
    """Three batches."""

    def __init__(self, x):
        self.batches = iter([{"x": x}, {"x": 2 * x}, {"x": x / 2}])

    def get_next(self):
        return next(self.batches, None)


@pytest.mark.parametrize("form", ["static", "per channel", "dynamic"])
def test_networks_that_onnx_runtime_quantized(tmp_path, form):
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = sparse(nn.Sequential(*layers, nn.Linear(72, 5)))
    x = torch.randn(2, 3, 6, 6)
    plain = exported(model, tmp_path / "plain.onnx", (x,), dynamo=False, batch=(0,), opset=17)
    path = tmp_path / "m.onnx"
    if form == "dynamic":
        quantization.quantize_dynamic(plain, path, weight_type=quantization.QuantType.QInt8)
    else:
        quantization.quantize_static(
            plain, path, Readings(x.numpy()), per_channel=form == "per channel"
        )
    engine = runtime.compile(path, layers="sparse", threads=1)
    for given in (x.numpy(), torch.randn(3, 3, 6, 6).numpy()):
        np.testing.assert_allclose(engine(given), as_written(path, given), rtol=1e-5, atol=1e-6)


def test_types_without_integers_are_refused(tmp_path):
    kind = helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN)
    constants = {"s": np.asarray(1, np.float32), "z": np.zeros((), kind)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    path = file_of(tmp_path / "m.onnx", nodes, {"x": ROWS}, constants, opset=19)
    with pytest.raises(InputError, match=r"QuantizeLinear \(\) has the type float8_e4m3fn"):
        runtime.compile(path, layers="sparse", threads=1)
