"""An ONNX network as a module, in the forms that the lowering has kernels for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probmask.runtime.from_onnx.onnx_file import OnnxGraph, Operation
from probmask.runtime.from_onnx.onnx_folding import evaluated
from probmask.runtime.from_onnx.onnx_recurrent import RECURRENT, RecurrentLayer
from probmask.runtime.from_onnx.onnx_values import tensor


class OnnxNetwork(nn.Module):
    """The operations of an ONNX graph, run one after the other.

    Floating-point constants with dimensions are parameters; other constants stay arrays, so that
    shapes that are computed from them are known when the network is exported.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__()
        self.opset = graph.opset
        self.input_names = [item.name for item in graph.inputs]
        self.output_names = list(graph.outputs)
        self.operations = tuple(graph.operations)
        self.arrays: dict[str, Any] = {}
        self.parameter_names: dict[str, str] = {}
        self.recurrent_names: dict[str, str] = {}  # by the name of the first result
        self.recurrent = nn.ModuleDict()
        for op in self.operations:
            if op.kind in RECURRENT:
                key = f"layer{len(self.recurrent)}"
                self.recurrent_names[op.outputs[0] or op.outputs[1]] = key
                self.recurrent[key] = RecurrentLayer(op, graph)
        settings = {
            name
            for op in self.operations
            if op.kind in ("Resize", "Upsample", *RECURRENT)
            for name in op.inputs[1:]
        }
        for name, array in graph.constants.items():
            if name in settings:
                self.arrays[name] = array
            else:
                self._add_constant(name, array)

    def _add_constant(self, name: str, array: Any) -> None:
        if array.dtype.kind != "f" or array.ndim == 0 or array.size == 1:
            self.arrays[name] = array
            return
        key = f"constant{len(self.parameter_names)}"
        values = torch.from_numpy(np.array(array))
        self.register_parameter(key, nn.Parameter(values, requires_grad=False))
        self.parameter_names[name] = key

    def forward(self, *inputs: Tensor) -> Any:
        """Run the network."""
        values = self.known_values(inputs)
        for op in self.operations:
            values |= self.results(op, values)
        outputs = tuple(tensor(values[name]) for name in self.output_names)
        return outputs[0] if len(outputs) == 1 else outputs

    def known_values(self, inputs: Sequence[Tensor]) -> dict[str, Any]:
        """Return the constants and the inputs by name."""
        values: dict[str, Any] = dict(self.arrays)
        values |= {name: getattr(self, key) for name, key in self.parameter_names.items()}
        return values | dict(zip(self.input_names, inputs, strict=True))

    def results(self, op: Operation, values: dict[str, Any]) -> dict[str, Any]:
        """Return the results of an operation by name."""
        given = [values[name] if name else None for name in op.inputs]
        if op.kind in RECURRENT:
            key = self.recurrent_names[op.outputs[0] or op.outputs[1]]
            made = self.recurrent[key](given)
        else:
            made = evaluated(op, given, self.opset)
        return dict(zip(op.outputs, made, strict=False))
