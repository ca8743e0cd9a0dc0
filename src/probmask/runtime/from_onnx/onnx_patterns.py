"""Functions that ONNX files write out in several operations, in the forms of PyTorch."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from probmask.runtime.from_onnx.onnx_file import OnnxGraph, Operation

# One operation, and those that it replaces besides the one that computes the same value.
_Match = tuple[Operation, list[Operation]]


def joined_operations(graph: OnnxGraph) -> list[Operation]:
    """Return the operations with GELU, LayerNorm, biases and attention in the forms of PyTorch."""
    uses = _Uses(graph)
    changed: dict[int, Operation] = {}
    dropped: set[int] = set()
    for op in graph.operations:
        found = next((m for match in _PATTERNS.get(op.kind, ()) if (m := match(uses, op))), None)
        if found is not None:
            changed[id(op)], parts = found
            dropped.update(map(id, parts))
    kept = [changed.get(id(op), op) for op in graph.operations if id(op) not in dropped]
    return [_for_attention(graph, op) for op in kept]


class _Uses:
    """What computes each value of a graph, and how often it is read."""

    def __init__(self, graph: OnnxGraph) -> None:
        self.constants = graph.constants
        self.makers = {name: op for op in graph.operations for name in op.outputs}
        self.counts = Counter(name for op in graph.operations for name in op.inputs)
        self.counts.update(graph.outputs)
        self.of_sizes = set(self.constants)  # computed from constants and sizes only
        for op in graph.operations:
            if op.kind in ("Shape", "Size") or all(n in self.of_sizes for n in op.inputs if n):
                self.of_sizes.update(op.outputs)

    def maker(self, name: str, kind: str, *, uses: int = 1) -> Operation | None:
        """Return the operation of a kind that computes a value which is read so often."""
        op = self.makers.get(name)
        return op if op is not None and op.kind == kind and self.counts[name] == uses else None

    def number(self, name: str) -> float | None:
        """Return the value of a constant with one element."""
        value = self.constants.get(name)
        if value is None or value.size != 1 or value.dtype.kind != "f":
            return None
        return float(value.reshape(-1)[0])

    def rank(self, name: str) -> int | None:
        """Return the number of dimensions of a constant."""
        value = self.constants.get(name)
        return None if value is None else int(value.ndim)

    def beside(self, op: Operation, number: float) -> str | None:
        """Return the other operand of a sum or a product with a number."""
        for one, other in (op.inputs, op.inputs[::-1]):
            found = self.number(one)
            if found is not None and math.isclose(found, number, rel_tol=1e-5):
                return other
        return None


def _gelu(uses: _Uses, op: Operation) -> _Match | None:
    """Match x/2 · (1 + erf(x/√2)), in any order of its products."""
    factors, parts, number = _factors(uses, op)
    plus = [f for f in factors if _erf_of(uses, f) is not None]
    others = [f for f in factors if f not in plus]
    if len(plus) != 1 or len(others) != 1 or not math.isclose(number, 0.5, rel_tol=1e-5):
        return None
    found = _erf_of(uses, plus[0])
    assert found is not None
    x, erf_parts = found
    if x != others[0]:
        return None
    return Operation("Gelu", op.name, (x,), op.outputs, {}), [*parts, *erf_parts]


def _factors(uses: _Uses, op: Operation) -> tuple[list[str], list[Operation], float]:
    """Return the factors of nested products, the inner products, and their constant factor."""
    factors: list[str] = []
    parts: list[Operation] = []
    number = 1.0
    for name in op.inputs:
        constant, inner = uses.number(name), uses.maker(name, "Mul")
        if constant is not None:
            number *= constant
        elif inner is not None:
            below, more, factor = _factors(uses, inner)
            factors += below
            parts += [inner, *more]
            number *= factor
        else:
            factors.append(name)
    return factors, parts, number


def _erf_of(uses: _Uses, name: str) -> tuple[str, list[Operation]] | None:
    """Return x and the parts of 1 + erf(x/√2)."""
    plus = uses.maker(name, "Add")
    erf_name = uses.beside(plus, 1.0) if plus is not None else None
    erf = uses.maker(erf_name, "Erf") if erf_name is not None else None
    if plus is None or erf is None:
        return None
    scaled = uses.maker(erf.inputs[0], "Div") or uses.maker(erf.inputs[0], "Mul")
    if scaled is None:
        return None
    if scaled.kind == "Div":
        number = uses.number(scaled.inputs[1])
        x = scaled.inputs[0]
        fits = number is not None and math.isclose(number, math.sqrt(2), rel_tol=1e-5)
    else:
        found = uses.beside(scaled, math.sqrt(0.5))
        x, fits = found or "", found is not None
    return (x, [plus, erf, scaled]) if fits else None


def _normalization(uses: _Uses, op: Operation) -> _Match | None:
    """Match (x - mean(x)) / √(mean((x - mean(x))²) + ε) over the last dimension."""
    root = uses.maker(op.inputs[1], "Sqrt")
    shifted = uses.maker(root.inputs[0], "Add") if root is not None else None
    if root is None or shifted is None:
        return None
    found = _variance(uses, shifted, op.inputs[0])
    centered = uses.makers.get(op.inputs[0])
    if found is None or centered is None or centered.kind != "Sub":
        return None
    epsilon, parts = found
    mean = uses.maker(centered.inputs[1], "ReduceMean")
    if mean is None or not _over_last(uses, mean) or mean.inputs[0] != centered.inputs[0]:
        return None
    attributes = {"axis": -1, "epsilon": epsilon}
    made = Operation("LayerNormalization", op.name, mean.inputs[:1], op.outputs, attributes)
    return made, [root, shifted, *parts, centered, mean]


def _variance(
    uses: _Uses, shifted: Operation, centered: str
) -> tuple[float, list[Operation]] | None:
    """Return ε and the parts of mean(centered²) + ε, if nothing else but a division reads it."""
    for epsilon, other in (shifted.inputs, shifted.inputs[::-1]):
        number, mean = uses.number(epsilon), uses.maker(other, "ReduceMean")
        if number is None or mean is None or not _over_last(uses, mean):
            continue
        square = uses.maker(mean.inputs[0], "Pow") or uses.maker(mean.inputs[0], "Mul")
        if square is None or square.inputs[0] != centered:
            continue
        by_itself = square.kind == "Mul" and square.inputs[1] == centered
        if by_itself or (square.kind == "Pow" and uses.number(square.inputs[1]) == 2):
            reads = 2 + by_itself
            return (number, [mean, square]) if uses.counts[centered] == reads else None
    return None


def _over_last(uses: _Uses, mean: Operation) -> bool:
    """Return whether a mean is over the last dimension, and keeps it."""
    axes = mean.attributes.get("axes")
    if len(mean.inputs) > 1 and mean.inputs[1] in uses.constants:
        axes = uses.constants[mean.inputs[1]].tolist()
    return axes == [-1] and bool(mean.attributes.get("keepdims", 1))


def _affine_normalization(uses: _Uses, op: Operation) -> _Match | None:
    """Match the product of a normalization and a constant vector, and the sum with another."""
    for one, other in (op.inputs, op.inputs[::-1]):
        if uses.rank(other) != 1:
            continue
        if op.kind == "Mul":
            division = uses.maker(one, "Div")
            found, parts = (_normalization(uses, division) if division else None), [division]
        else:
            product = uses.maker(one, "Mul")
            found, parts = (_affine_normalization(uses, product) if product else None), [product]
        if found is not None:
            made, inner = found
            joined = replace(made, inputs=(*made.inputs, other), outputs=op.outputs)
            return joined, [*inner, *(part for part in parts if part is not None)]
    return None


def _reciprocal_root(uses: _Uses, op: Operation) -> _Match | None:
    """Match 1/√x, which lowering looks for in an RMSNorm that is written out."""
    if op.kind == "Div" and uses.number(op.inputs[0]) != 1:
        return None
    root = uses.maker(op.inputs[-1], "Sqrt")
    if root is None or op.inputs[-1] in uses.of_sizes:
        return None
    return Operation("ReciprocalRoot", op.name, root.inputs, op.outputs, {}), [root]


def _layer(uses: _Uses, op: Operation) -> _Match | None:
    """Match a product with a constant matrix."""
    if uses.rank(op.inputs[1]) != 2:
        return None
    return replace(op, kind="LinearLayer"), []


def _biased_layer(uses: _Uses, op: Operation) -> _Match | None:
    """Match a product with a constant matrix that a constant vector is added to."""
    for one, other in (op.inputs, op.inputs[::-1]):
        product = uses.maker(one, "MatMul")
        if product is None or uses.rank(other) != 1:
            continue
        weight, bias = uses.constants.get(product.inputs[1]), uses.constants[other]
        if weight is not None and weight.ndim == 2 and len(bias) == weight.shape[1]:
            inputs = (*product.inputs, other)
            return Operation("LinearLayer", op.name, inputs, op.outputs, {}), [product]
    return None


def _scaled_product(uses: _Uses, op: Operation) -> _Match | None:
    """Match a product whose factors are scaled by numbers, also by those of sizes."""
    names, scales, parts = [], [], []
    for name in op.inputs:
        product = uses.maker(name, "Mul")
        inner, scale = _scaled(uses, product) if product is not None else None, ""
        if product is not None and inner is not None:
            name, scale = inner
            parts.append(product)
        names.append(name)
        scales.append(scale)
    if not parts:
        return None
    return Operation("ScaledMatMul", op.name, (*names, *scales), op.outputs, {}), parts


def _scaled(uses: _Uses, product: Operation) -> tuple[str, str] | None:
    """Return a factor and the number that it is scaled by."""
    for number, x in (product.inputs, product.inputs[::-1]):
        computed = number in uses.of_sizes and number not in uses.constants
        if (uses.number(number) is not None or computed) and x not in uses.of_sizes:
            return x, number
    return None


def _swapped(uses: _Uses, op: Operation) -> _Match | None:
    """Match a swap of the last two dimensions before a reshape, or between two."""
    if op.attributes.get("allowzero", 0) or len(op.inputs) < 2:
        return None
    swap = uses.maker(op.inputs[0], "Transpose")
    if swap is None or swap.attributes.get("perm") != [0, 2, 1]:
        return None
    before = uses.maker(swap.inputs[0], "Reshape")
    if before is None or len(before.inputs) < 2:
        first, parts = [swap.inputs[0], ""], [swap]
    else:
        first, parts = list(before.inputs[:2]), [swap, before]
    return Operation("Swapped", op.name, (*first, op.inputs[1]), op.outputs, {}), parts


# The patterns that end in an operator of this kind, in the order in which they are tried.
_PATTERNS: dict[str, tuple[Callable[[_Uses, Operation], _Match | None], ...]] = {
    "Add": (_biased_layer, _affine_normalization),
    "Div": (_normalization, _reciprocal_root),
    "MatMul": (_layer, _scaled_product),
    "Mul": (_gelu, _affine_normalization),
    "Reciprocal": (_reciprocal_root,),
    "Reshape": (_swapped,),
}


def _for_attention(graph: OnnxGraph, op: Operation) -> Operation:
    """Mark a transposition that ends in keys: lowering looks for its last two dimensions."""
    if op.kind != "Transpose":
        return op
    is_key = _is_key(graph, op.outputs[0])
    return replace(op, attributes={**op.attributes, "swap_last": is_key})


def _is_key(graph: OnnxGraph, name: str) -> bool:
    readers = [op for op in graph.operations if name in op.inputs]
    direct = [op for op in readers if op.kind == "MatMul" and op.inputs[1] == name]
    through = [op for op in readers if op.kind == "Mul" and _is_key(graph, op.outputs[0])]
    return bool(readers) and len(direct) + len(through) == len(readers)
