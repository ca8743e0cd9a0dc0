"""The operators of ONNX as functions of PyTorch, in one table."""

from probmask.runtime.from_onnx.onnx_arithmetic import ARITHMETIC
from probmask.runtime.from_onnx.onnx_normalizations import NORMALIZATIONS
from probmask.runtime.from_onnx.onnx_products import PRODUCTS
from probmask.runtime.from_onnx.onnx_quantization import QUANTIZATION
from probmask.runtime.from_onnx.onnx_reductions import REDUCTIONS
from probmask.runtime.from_onnx.onnx_resizing import RESIZING
from probmask.runtime.from_onnx.onnx_selections import SELECTIONS
from probmask.runtime.from_onnx.onnx_shapes import SHAPES
from probmask.runtime.from_onnx.onnx_values import Operator
from probmask.runtime.from_onnx.onnx_windows import WINDOWS

OPERATORS: dict[str, Operator] = {
    **ARITHMETIC,
    **NORMALIZATIONS,
    **PRODUCTS,
    **QUANTIZATION,
    **REDUCTIONS,
    **RESIZING,
    **SELECTIONS,
    **SHAPES,
    **WINDOWS,
}
# Operators that `joined_operations` makes of several, and the last of these.
JOINED = {
    "LinearLayer": "MatMul",
    "ReciprocalRoot": "Reciprocal",
    "ScaledMatMul": "MatMul",
    "Swapped": "Reshape",
}
