"""The operator Resize of ONNX, and Upsample, its older form."""

from collections.abc import Sequence
from typing import Any

from torch.nn import functional

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import (
    Operator,
    numbers,
    optional,
    tensor,
    unsupported,
)


def _resize(op: Operation, inputs: Sequence[Any], opset: int) -> Any:
    x = tensor(inputs[0])
    place = 1 if opset < 11 or op.kind == "Upsample" else 2
    scales = _listed(op, inputs, place, "scales")
    sizes = _listed(op, inputs, 3, "sizes")
    mode = op.attributes.get("mode", "nearest")
    default = "asymmetric" if opset < 11 or op.kind == "Upsample" else "half_pixel"
    grid = op.attributes.get("coordinate_transformation_mode", default)
    spatial = x.dim() - 2
    whole = all(float(s) == int(s) for s in scales) if scales else False
    size = [int(n) for n in sizes[2:]] if sizes else None
    factors = None if size is not None else [float(s) for s in scales[2:]]
    if mode == "nearest" and (
        (grid == "asymmetric" and op.attributes.get("nearest_mode", "floor") == "floor") or whole
    ):
        return functional.interpolate(x, size, factors, mode="nearest")
    if mode == "linear" and grid in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        names = {1: "linear", 2: "bilinear", 3: "trilinear"}
        corners = grid == "align_corners"
        return functional.interpolate(x, size, factors, mode=names[spatial], align_corners=corners)
    raise unsupported(op, f"the mode {mode} with the coordinates {grid}")


def _listed(op: Operation, inputs: Sequence[Any], index: int, what: str) -> list[Any]:
    """Return the numbers of an input; none if it is missing or empty."""
    given = optional(inputs, index)
    return [] if given is None else numbers(given, what, op)


RESIZING: dict[str, Operator] = {"Resize": _resize, "Upsample": _resize}
