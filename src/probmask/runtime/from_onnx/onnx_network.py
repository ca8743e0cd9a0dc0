"""An ONNX network as a module, in the forms that the lowering has kernels for."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probmask.errors import InputError
from probmask.runtime.from_onnx.onnx_file import Input, OnnxGraph, Operation, read_onnx
from probmask.runtime.from_onnx.onnx_operators import JOINED, OPERATORS
from probmask.runtime.from_onnx.onnx_recurrent import RECURRENT, RecurrentLayer


class OnnxNetwork(nn.Module):
    """The operations of an ONNX file, run one after the other.

    Floating-point constants with dimensions are parameters; other constants stay arrays, so that
    shapes that are computed from them are known when the network is exported.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__()
        self.opset = graph.opset
        self.input_names = [item.name for item in graph.inputs]
        self.output_names = list(graph.outputs)
        self.operations = joined_operations(graph)
        self.arrays: dict[str, Any] = {}
        self.parameter_names: dict[str, str] = {}
        self.recurrent = nn.ModuleDict(
            {
                f"layer{i}": RecurrentLayer(op, graph)
                for i, op in enumerate(self.operations)
                if op.kind in RECURRENT
            }
        )
        settings = {
            name
            for op in graph.operations
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
        if len(inputs) != len(self.input_names):
            count, names = len(self.input_names), ", ".join(self.input_names)
            raise InputError(
                f"the ONNX network takes {count} input{'s' * (count != 1)} ({names}), not "
                f"{len(inputs)}."
            )
        values: dict[str, Any] = dict(self.arrays)
        values |= {name: getattr(self, key) for name, key in self.parameter_names.items()}
        values |= dict(zip(self.input_names, inputs, strict=True))
        for i, op in enumerate(self.operations):
            given = [values[name] if name else None for name in op.inputs]
            if op.kind in RECURRENT:
                made = self.recurrent[f"layer{i}"](given)
            else:
                made = OPERATORS[op.kind](op, given, self.opset)
            results = made if isinstance(made, tuple) else (made,)
            values |= dict(zip(op.outputs, results, strict=False))
        outputs = tuple(_as_output(values[name]) for name in self.output_names)
        return outputs[0] if len(outputs) == 1 else outputs


def _as_output(value: Any) -> Any:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def load_onnx(path: str | os.PathLike[str]) -> tuple[OnnxNetwork, Sequence[Input]]:
    """Return the network of an ONNX file in evaluation mode, and its inputs.

    Raise `InputError` if the file is damaged, or has an operator that is not known.
    """
    graph = read_onnx(path, (set(OPERATORS) | RECURRENT) - set(JOINED))
    return OnnxNetwork(graph).eval(), graph.inputs


def batch_dims(inputs: Sequence[Input]) -> list[int | None]:
    """Return the dimension of each input that the file leaves open for the batch; None without one.

    Files name open sizes. The batch has the name that most inputs have, the first of several.
    """
    names = Counter(
        size for item in inputs for size in dict.fromkeys(item.shape or ()) if isinstance(size, str)
    )
    common = max(names, key=lambda name: names[name], default=None)
    return [_batch_dim(item, common) for item in inputs]


def _batch_dim(item: Input, name: str | None) -> int | None:
    if item.shape and name in item.shape:
        return item.shape.index(name)
    return 0 if item.shape and item.shape[0] is None else None


def example_of(path: str | os.PathLike[str], inputs: Sequence[Input]) -> tuple[Tensor, ...]:
    """Return inputs with the shapes in the file and a batch of one."""
    made = []
    generator = np.random.default_rng(0)
    for item, batch in zip(inputs, batch_dims(inputs), strict=True):
        shape = [1 if i == batch else size for i, size in enumerate(item.shape or ())]
        sizes = [size for size in shape if isinstance(size, int)]
        if item.shape is None or len(sizes) < len(shape):
            known = "unknown" if item.shape is None else "×".join(map(_shown, item.shape))
            raise InputError(
                f"runtime.compile({Path(path).name}): the file leaves sizes of the input "
                f"{item.name} open ({known}); pass an example."
            )
        if np.dtype(item.dtype).kind == "f":
            made.append(torch.from_numpy(generator.normal(size=sizes).astype(item.dtype)))
        else:
            made.append(torch.from_numpy(np.ones(sizes, item.dtype)))
    return tuple(made)


def _shown(size: int | str | None) -> str:
    return str(size) if isinstance(size, int) else "?"


def joined_operations(graph: OnnxGraph) -> list[Operation]:
    """Return the operations with GELU, biases and scaled attention in the forms of PyTorch."""
    return _Joiner(graph).operations()


class _Joiner:
    """Finds operations that are written out in several others."""

    def __init__(self, graph: OnnxGraph) -> None:
        self.graph = graph
        self.makers = {name: op for op in graph.operations for name in op.outputs}
        uses = Counter(name for op in graph.operations for name in op.inputs)
        uses.update(graph.outputs)
        self.uses = uses

    def operations(self) -> list[Operation]:
        changed: dict[int, Operation] = {}
        dropped: set[int] = set()
        for op in self.graph.operations:
            swapped = self._swapped(op)
            if swapped is not None:
                changed[id(op)], parts = swapped
                dropped.update(map(id, parts))
                continue
            gelu = self._gelu(op)
            biased = None if gelu is not None else self._biased(op)
            scaled = self._scaled(op) if op.kind == "MatMul" else None
            if gelu is not None:
                x, parts = gelu
                changed[id(op)] = Operation("Gelu", op.name, (x,), op.outputs, {})
                dropped.update(map(id, parts))
            elif biased is not None:
                product, bias = biased
                inputs = (*product.inputs, bias)
                changed[id(op)] = Operation("LinearLayer", op.name, inputs, op.outputs, {})
                dropped.add(id(product))
            elif op.kind == "MatMul" and self._constant_rank(op.inputs[1]) == 2:
                changed[id(op)] = replace(op, kind="LinearLayer")
            elif scaled is not None:
                made, parts = scaled
                changed[id(op)] = made
                dropped.update(map(id, parts))
        kept = [changed.get(id(op), op) for op in self.graph.operations if id(op) not in dropped]
        return [self._for_attention(op) for op in kept]

    def _single(self, name: str, kind: str) -> Operation | None:
        """Return the operation of a kind that computes a value which is read once."""
        maker = self.makers.get(name)
        return maker if maker is not None and maker.kind == kind and self.uses[name] == 1 else None

    def _number(self, name: str) -> float | None:
        """Return the value of a constant with one element."""
        value = self.graph.constants.get(name)
        if value is None or value.size != 1 or value.dtype.kind != "f":
            return None
        return float(value.reshape(-1)[0])

    def _with_number(self, op: Operation, number: float) -> str | None:
        """Return the other operand of a sum or a product with a number."""
        for one, other in (op.inputs, op.inputs[::-1]):
            found = self._number(one)
            if found is not None and math.isclose(found, number, rel_tol=1e-5):
                return other
        return None

    def _gelu(self, op: Operation) -> tuple[str, list[Operation]] | None:
        """Return x and the parts of x/2 · (1 + erf(x/√2)), in any order of its products."""
        if op.kind != "Mul":
            return None
        factors, parts, number = self._factors(op)
        plus = [f for f in factors if self._erf_of(f) is not None]
        others = [f for f in factors if f not in plus]
        if len(plus) != 1 or len(others) != 1 or not math.isclose(number, 0.5, rel_tol=1e-5):
            return None
        found = self._erf_of(plus[0])
        assert found is not None
        x, erf_parts = found
        return (x, [*parts, *erf_parts]) if x == others[0] else None

    def _factors(self, op: Operation) -> tuple[list[str], list[Operation], float]:
        """Return the factors of nested products, the inner products, and their constant factor."""
        factors: list[str] = []
        parts: list[Operation] = []
        number = 1.0
        for name in op.inputs:
            constant, inner = self._number(name), self._single(name, "Mul")
            if constant is not None:
                number *= constant
            elif inner is not None:
                below, more, factor = self._factors(inner)
                factors += below
                parts += [inner, *more]
                number *= factor
            else:
                factors.append(name)
        return factors, parts, number

    def _erf_of(self, name: str) -> tuple[str, list[Operation]] | None:
        """Return x and the parts of 1 + erf(x/√2)."""
        plus = self._single(name, "Add")
        erf_name = self._with_number(plus, 1.0) if plus is not None else None
        erf = self._single(erf_name, "Erf") if erf_name is not None else None
        if plus is None or erf is None:
            return None
        scaled = self._single(erf.inputs[0], "Div") or self._single(erf.inputs[0], "Mul")
        if scaled is None:
            return None
        if scaled.kind == "Div":
            number = self._number(scaled.inputs[1])
            x = scaled.inputs[0]
            fits = number is not None and math.isclose(number, math.sqrt(2), rel_tol=1e-5)
        else:
            found = self._with_number(scaled, math.sqrt(0.5))
            x, fits = found or "", found is not None
        return (x, [plus, erf, scaled]) if fits else None

    def _constant_rank(self, name: str) -> int | None:
        value = self.graph.constants.get(name)
        return None if value is None else int(value.ndim)

    def _biased(self, op: Operation) -> tuple[Operation, str] | None:
        """Return the product with a constant matrix that a constant vector is added to."""
        if op.kind != "Add":
            return None
        for one, other in (op.inputs, op.inputs[::-1]):
            product = self._single(one, "MatMul")
            if product is None or self._constant_rank(other) != 1:
                continue
            weight = self.graph.constants.get(product.inputs[1])
            bias = self.graph.constants[other]
            if weight is not None and weight.ndim == 2 and len(bias) == weight.shape[1]:
                return product, other
        return None

    def _scaled(self, op: Operation) -> tuple[Operation, list[Operation]] | None:
        """Return a product whose factors are scaled by numbers, with the scale after it."""
        scale, names, parts = 1.0, [], []
        for name in op.inputs:
            found = self._single(name, "Mul")
            number = None
            for one, other in (found.inputs, found.inputs[::-1]) if found is not None else ():
                value = self._number(one)
                if value is not None:
                    number, inner = value, other
                    break
            if found is None or number is None:
                names.append(name)
                continue
            scale *= number
            names.append(inner)
            parts.append(found)
        if not parts:
            return None
        attributes = {"scale": scale}
        return Operation("ScaledMatMul", op.name, tuple(names), op.outputs, attributes), parts

    def _swapped(self, op: Operation) -> tuple[Operation, list[Operation]] | None:
        """Return one operation for a swap of the last two dimensions between two reshapes."""
        if op.kind != "Reshape" or op.attributes.get("allowzero", 0):
            return None
        swap = self._single(op.inputs[0], "Transpose")
        before = self._single(swap.inputs[0], "Reshape") if swap is not None else None
        if swap is None or before is None or swap.attributes.get("perm") != [0, 2, 1]:
            return None
        inputs = (before.inputs[0], before.inputs[1], op.inputs[1])
        return Operation("Swapped", op.name, inputs, op.outputs, {}), [swap, before]

    def _for_attention(self, op: Operation) -> Operation:
        """Mark a transposition that ends in keys: lowering looks for its last two dimensions."""
        if op.kind != "Transpose":
            return op
        return replace(op, attributes={**op.attributes, "swap_last": self._is_key(op.outputs[0])})

    def _is_key(self, name: str) -> bool:
        readers = [op for op in self.graph.operations if name in op.inputs]
        direct = [op for op in readers if op.kind == "MatMul" and op.inputs[1] == name]
        through = [op for op in readers if op.kind == "Mul" and self._is_key(op.outputs[0])]
        return bool(readers) and len(direct) + len(through) == len(readers)
