"""Lowering: from a model to an exported program, and from there to a list of nodes.

`BUILDERS` lists the operations that have kernels.
"""

import inspect
import operator
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from probmask.errors import InputError
from probmask.messages import one_line
from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.lower.elementwise_nodes import (
    build_activation,
    build_add,
    build_concatenation,
    build_gelu,
    build_hardtanh,
    build_identity,
    build_multiply,
    build_reshape,
)
from probmask.runtime.lower.graph import Builder, Constant, Graph, size_of
from probmask.runtime.lower.layer_nodes import (
    BATCH_NORM,
    build_adaptive_pool,
    build_average_pool,
    build_batch_norm,
    build_convolution,
    build_linear,
    build_max_pool,
    build_mean,
    build_normalized,
)
from probmask.runtime.lower.nodes import Activation, Network, Node

_aten = torch.ops.aten
BUILDERS: dict[Any, Builder] = {
    _aten.conv1d.default: build_convolution,
    _aten.conv1d.padding: build_convolution,
    _aten.conv2d.default: build_convolution,
    _aten.conv2d.padding: build_convolution,
    _aten.linear.default: build_linear,
    BATCH_NORM: build_batch_norm,
    operator.getitem: build_normalized,
    _aten.relu.default: build_activation(Activation(low=0.0)),
    _aten.relu6.default: build_activation(Activation(low=0.0, high=6.0)),
    _aten.hardtanh.default: build_hardtanh,
    _aten.silu.default: build_activation(Activation(curve=Curve.SILU)),
    _aten.hardswish.default: build_activation(Activation(curve=Curve.HARDSWISH)),
    _aten.gelu.default: build_gelu,
    _aten.add.Tensor: build_add,
    _aten.mul.Tensor: build_multiply,
    _aten.max_pool1d.default: build_max_pool(1),
    _aten.max_pool2d.default: build_max_pool(2),
    _aten.avg_pool1d.default: build_average_pool(1),
    _aten.avg_pool2d.default: build_average_pool(2),
    _aten.adaptive_avg_pool1d.default: build_adaptive_pool(1),
    _aten.adaptive_avg_pool2d.default: build_adaptive_pool(2),
    _aten.mean.dim: build_mean,
    _aten.cat.default: build_concatenation,
    _aten.view.default: build_reshape,
    _aten.reshape.default: build_reshape,
    _aten.flatten.using_ints: build_reshape,
    _aten.squeeze.dims: build_reshape,
    _aten.dropout.default: build_identity,
    _aten.clone.default: build_identity,
    _aten.contiguous.default: build_identity,
}


def export(model: nn.Module, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Export the model for any batch size, or for the examples' if the model fixes it."""
    examples = tuple(example.contiguous() for example in examples)
    # An input of size 1 next to larger ones is shared by the whole batch, so its size is fixed.
    batch = max((len(example) for example in examples if example.dim()), default=0)
    varies = [bool(example.dim()) and len(example) >= min(2, batch) for example in examples]
    wide = tuple(_at_least_two(x) if v else x for x, v in zip(examples, varies, strict=True))
    dynamic = _match_forward(model, [{0: torch.export.Dim.AUTO} if v else {} for v in varies])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, wide, dynamic_shapes=dynamic)
            if not _has_dynamic_batch(program):
                program = torch.export.export(model, examples)
        except Exception:
            try:
                program = torch.export.export(model, examples)
            except Exception as error:
                reason = one_line(error)[:300]
                raise InputError(
                    f"runtime.compile({type(model).__name__}): torch.export cannot export it: "
                    f"{reason}"
                ) from error
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    return functional


def _match_forward(model: nn.Module, items: list[Any]) -> tuple[Any, ...]:
    """Group the items of inputs that ``*args`` of `forward` collects into a tuple."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return tuple(items)
    named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*items[:named], tuple(items[named:]))


def _has_dynamic_batch(program: torch.export.ExportedProgram) -> bool:
    """Return whether the first dimension of some input may vary."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(v, Tensor) and v.dim() and isinstance(size_of(v.shape[0]), str) for v in values
    )


def _at_least_two(example: Tensor) -> Tensor:
    """Repeat a batch of one: `torch.export` would treat its size as a constant."""
    if not example.dim() or len(example) >= 2:
        return example
    return example.expand(2, *example.shape[1:]).contiguous()


def lower(program: torch.export.ExportedProgram) -> Network:
    """Turn an exported program into nodes.

    BatchNorm is folded into the layer before it. Residual sums and activations are fused into it.
    """
    graph = Graph(program)
    for node in program.graph.nodes:
        if node.op == "call_function":
            _add(graph, node)
    return _network(graph)


def _add(graph: Graph, node: fx.Node) -> None:
    """Evaluate a constant operation, or add a node for it to the graph."""
    if _is_constant(graph, node):
        graph.constants[node.name] = graph.eager(node, "").call()
        return
    build = BUILDERS.get(node.target) if not _reads_constants(graph, node) else None
    built = build(graph, node) if build is not None else None
    if built is True:  # it became part of another node
        return
    if built is None:
        built = graph.eager(node, "no kernel" if build is None else "no kernel for this form")
    assert isinstance(built, Node)
    graph.nodes[built.name] = built


def _is_constant(graph: Graph, node: fx.Node) -> bool:
    """Return whether the operation computes one tensor from constants, the same at each call."""
    sources = [graph.resolve(argument.name) for argument in node.all_input_nodes]
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    known = bool(sources) and all(name in graph.constants for name in sources)
    return known and not random and isinstance(node.meta.get("val"), Tensor)


def _reads_constants(graph: Graph, node: fx.Node) -> bool:
    """Return whether the first argument, which a kernel would read, is a constant."""
    first = node.args[0] if node.args else None
    return isinstance(first, fx.Node) and graph.resolve(first.name) in graph.constants


def _network(graph: Graph) -> Network:
    """Collect the nodes that the outputs depend on."""
    signature = graph.signature
    outputs = [_output(graph, output) for output in signature.outputs]
    changed = {
        name: graph.resolve(output.name) for name, output in signature.changed_inputs.items()
    }
    names = tuple(dict.fromkeys([*_computed(outputs), *changed.values()]))
    inputs = [graph.fx_nodes[name].meta["val"] for name in signature.inputs]
    return Network(
        nodes=_needed(list(graph.nodes.values()), names),
        inputs=signature.inputs,
        outputs=names,
        pack_outputs=_OutputPacker(outputs, signature.out_spec),
        changed_inputs=changed,
        input_shapes=tuple(tuple(map(size_of, value.shape)) for value in inputs),
        input_dtypes=tuple(value.dtype for value in inputs),
    )


def _output(graph: Graph, output: Any) -> Constant | str:
    """Return the name of the node that computes an output, or its constant value."""
    if not isinstance(output, fx.Node):
        return Constant(output)
    name = graph.resolve(output.name)
    return Constant(graph.constants[name]) if name in graph.constants else name


class _OutputPacker:
    """Arranges the outputs as the model's `forward` returns them, constants included."""

    def __init__(self, outputs: list[Constant | str], spec: Any) -> None:
        self.outputs, self.spec = outputs, spec

    def __reduce__(self) -> Any:
        """Pickle what `forward` returns, with names for its tensors. Pickling a spec warns."""
        returned = pytree.tree_unflatten(self.outputs, self.spec)
        try:
            pickle.dumps(returned)
        except Exception as error:
            raise InputError(
                "the engine cannot be pickled, because what the model returns cannot be "
                f"({one_line(error)[:200]})."
            ) from error
        return _packer_like, (returned,)

    def __call__(self, values: dict[str, Any]) -> Any:
        returned: set[str] = set()
        leaves = []
        for output in self.outputs:
            value = output.value if isinstance(output, Constant) else values[output]
            # Copy constants and repeated outputs: a caller may change what it gets in place.
            if isinstance(value, Tensor) and (isinstance(output, Constant) or output in returned):
                value = value.clone()
            returned.update(_computed([output]))
            leaves.append(value)
        return pytree.tree_unflatten(leaves, self.spec)


def _packer_like(returned: Any) -> _OutputPacker:
    return _OutputPacker(*pytree.tree_flatten(returned))


def _computed(outputs: list[Constant | str]) -> list[str]:
    return [output for output in outputs if isinstance(output, str)]


def _needed(nodes: list[Node], outputs: tuple[str, ...]) -> list[Node]:
    """Return the nodes that the outputs depend on, in order."""
    read, needed = set(outputs), []
    for node in reversed(nodes):
        if node.name in read:
            needed.append(node)
            read.update(node.inputs)
    return needed[::-1]
