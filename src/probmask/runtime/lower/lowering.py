"""Lowering: from an exported program to a list of nodes.

`BUILDERS` lists the operations that have kernels.
"""

import operator
import pickle
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from probmask.errors import InputError
from probmask.messages import one_line
from probmask.runtime.kernels.operation_table import Curve
from probmask.runtime.lower.attention_nodes import build_attention, build_product
from probmask.runtime.lower.channel_nodes import (
    build_channel_product,
    build_channel_sum,
    build_group_norm,
    build_instance_norm,
    build_prelu,
    build_softmax,
)
from probmask.runtime.lower.elementwise_nodes import (
    ActivationOf,
    build_activation,
    build_add,
    build_concatenation,
    build_identity,
    build_multiply,
    build_reshape,
    clamp,
    elu,
    gelu,
    hardtanh,
    leaky_relu,
)
from probmask.runtime.lower.export import Export
from probmask.runtime.lower.fallback_reasons import fallback_reason
from probmask.runtime.lower.graph import Builder, Built, Constant, Graph, size_of
from probmask.runtime.lower.image_inputs import PADDINGS
from probmask.runtime.lower.joined_nodes import build_concatenated_rows
from probmask.runtime.lower.known import Known, per_image
from probmask.runtime.lower.known_operations import is_input, known_value
from probmask.runtime.lower.layer_nodes import (
    BATCH_NORM,
    build_addmm,
    build_batch_norm,
    build_convolution,
    build_linear,
    build_normalized,
)
from probmask.runtime.lower.moves import needed_nodes, output_node
from probmask.runtime.lower.nodes import Activation, Fallback, Network, Node
from probmask.runtime.lower.padding_nodes import build_padding
from probmask.runtime.lower.pool_nodes import (
    build_adaptive_pool,
    build_average_pool,
    build_max_pool,
    build_mean,
)
from probmask.runtime.lower.recurrent_nodes import (
    CELLS,
    SINGLE_STEPS,
    build_recurrent,
    build_recurrent_result,
    build_single_step,
)
from probmask.runtime.lower.reordered_nodes import build_flip, build_roll
from probmask.runtime.lower.shuffle_nodes import channel_shuffle, pixel_shuffle, pixel_unshuffle
from probmask.runtime.lower.token_elementwise import (
    build_negation,
    build_token_activation,
    build_token_add,
    build_token_divide,
    build_token_multiply,
    build_token_subtract,
)
from probmask.runtime.lower.token_nodes import build_layer_norm, build_rms_norm, build_token_mean
from probmask.runtime.lower.upsampling_nodes import (
    build_linear_interpolation,
    build_nearest,
    build_transposed_convolution,
)
from probmask.runtime.lower.view_nodes import (
    FILLS,
    build_embedding,
    build_expansion,
    build_filled,
    build_move,
    build_part,
    drop_nothing,
    keep,
    narrow,
    permute,
    repeat,
    reshape,
    select,
    transpose,
)

_aten = torch.ops.aten


def _first_of(*builders: Builder) -> Builder:
    """Return a builder that tries several."""

    def build(graph: Graph, node: fx.Node) -> Built:
        return next((made for b in builders if (made := b(graph, node)) is not None), None)

    return build


def _activation(of: Activation | ActivationOf) -> Builder:
    """Return a builder of an activation function, on images and on tokens."""
    activation_of = (lambda _: of) if isinstance(of, Activation) else of
    return _first_of(build_activation(activation_of), build_token_activation(activation_of))


_SELU = Activation(
    curve=Curve.ELU, positive=1.0507009873554805, negative=1.0507009873554805 * 1.6732632423543772
)

BUILDERS: dict[Any, Builder] = {
    _aten.conv1d.default: build_convolution,
    _aten.conv1d.padding: build_convolution,
    _aten.conv2d.default: build_convolution,
    _aten.conv2d.padding: build_convolution,
    _aten.conv3d.default: build_convolution,
    _aten.conv3d.padding: build_convolution,
    _aten.conv_transpose1d.default: build_transposed_convolution,
    _aten.conv_transpose2d.input: build_transposed_convolution,
    _aten.upsample_nearest1d.vec: build_nearest(1),
    _aten.upsample_nearest2d.vec: build_nearest(2),
    _aten._upsample_nearest_exact1d.vec: build_nearest(1),
    _aten._upsample_nearest_exact2d.vec: build_nearest(2),
    _aten.upsample_linear1d.vec: build_linear_interpolation(1),
    _aten.upsample_bilinear2d.vec: build_linear_interpolation(2),
    _aten.linear.default: build_linear,
    _aten.addmm.default: build_addmm,
    BATCH_NORM: build_batch_norm,
    operator.getitem: _first_of(build_normalized, build_recurrent_result, build_part),
    _aten.relu.default: _activation(Activation(low=0.0)),
    _aten.relu6.default: _activation(Activation(low=0.0, high=6.0)),
    _aten.hardtanh.default: _activation(hardtanh),
    _aten.silu.default: _activation(Activation(curve=Curve.SILU)),
    _aten.hardswish.default: _activation(Activation(curve=Curve.HARDSWISH)),
    _aten.gelu.default: _activation(gelu),
    _aten.tanh.default: _activation(Activation(curve=Curve.TANH)),
    _aten.mish.default: _activation(Activation(curve=Curve.MISH)),
    _aten.leaky_relu.default: _activation(leaky_relu),
    _aten.elu.default: _activation(elu),
    _aten.selu.default: _activation(_SELU),
    _aten.sigmoid.default: _activation(Activation(curve=Curve.SIGMOID)),
    _aten.hardsigmoid.default: _activation(Activation(curve=Curve.HARDSIGMOID)),
    _aten.clamp.default: _activation(clamp),
    _aten.clamp_min.default: _activation(clamp),
    _aten.prelu.default: build_prelu,
    _aten.group_norm.default: build_group_norm,
    _aten.instance_norm.default: build_instance_norm,
    _aten.softmax.int: build_softmax,
    _aten.add.Tensor: _first_of(build_add, build_token_add, build_channel_sum),
    _aten.mul.Tensor: _first_of(build_multiply, build_token_multiply, build_channel_product),
    _aten.sub.Tensor: build_token_subtract,
    _aten.div.Tensor: build_token_divide,
    _aten.neg.default: build_negation,
    _aten.max_pool1d.default: build_max_pool(1),
    _aten.max_pool2d.default: build_max_pool(2),
    _aten.max_pool3d.default: build_max_pool(3),
    _aten.avg_pool1d.default: build_average_pool(1),
    _aten.avg_pool2d.default: build_average_pool(2),
    _aten.avg_pool3d.default: build_average_pool(3),
    _aten.adaptive_avg_pool1d.default: build_adaptive_pool(1),
    _aten.adaptive_avg_pool2d.default: build_adaptive_pool(2),
    _aten.adaptive_avg_pool3d.default: build_adaptive_pool(3),
    _aten.mean.dim: _first_of(build_mean, build_token_mean),
    _aten.cat.default: _first_of(build_concatenation, build_concatenated_rows),
    **dict.fromkeys(PADDINGS, build_padding),
    _aten.roll.default: build_roll,
    _aten.flip.default: build_flip,
    _aten.layer_norm.default: build_layer_norm,
    _aten.rms_norm.default: build_rms_norm,
    _aten.scaled_dot_product_attention.default: build_attention,
    _aten.matmul.default: build_product,
    _aten.bmm.default: build_product,
    _aten.embedding.default: build_embedding,
    _aten.expand.default: build_expansion,
    _aten.view.default: _first_of(build_reshape, build_move(reshape)),
    _aten.reshape.default: _first_of(build_reshape, build_move(reshape)),
    _aten.flatten.using_ints: _first_of(build_reshape, build_move(reshape)),
    _aten.squeeze.dims: _first_of(build_reshape, build_move(reshape)),
    _aten._unsafe_view.default: build_move(reshape),
    _aten.squeeze.dim: build_move(reshape),
    _aten.unsqueeze.default: build_move(reshape),
    _aten.unflatten.int: build_move(reshape),
    _aten.transpose.int: build_move(transpose),
    _aten.t.default: build_move(transpose),
    _aten.permute.default: build_move(permute),
    _aten.pixel_shuffle.default: build_move(pixel_shuffle, of_images=True),
    _aten.pixel_unshuffle.default: build_move(pixel_unshuffle, of_images=True),
    _aten.channel_shuffle.default: build_move(channel_shuffle, of_images=True),
    _aten.select.int: build_move(select),
    _aten.slice.Tensor: build_move(narrow),
    _aten.repeat_interleave.self_int: build_move(repeat),
    _aten.dropout.default: _first_of(build_identity, build_move(drop_nothing)),
    _aten.clone.default: _first_of(build_identity, build_move(keep)),
    _aten.contiguous.default: _first_of(build_identity, build_move(keep)),
    _aten._to_copy.default: build_move(keep),
    **dict.fromkeys(FILLS, build_filled),
    **dict.fromkeys(CELLS, build_recurrent),
    **dict.fromkeys(SINGLE_STEPS, build_single_step),
}
# Operations whose first argument may be constant.
_TAKE_CONSTANTS = (
    _aten.add.Tensor, _aten.mul.Tensor, _aten.addmm.default, _aten.expand.default,
    _aten.embedding.default, *FILLS,
)  # fmt: skip


def lower(exported: Export) -> Network:
    """Turn an exported program into nodes.

    BatchNorm is folded into the layer before it. Residual sums and activations are fused into it.
    """
    graph = Graph(exported.program)
    for node in exported.program.graph.nodes:
        if node.op == "call_function":
            _add(graph, node)
    return _network(graph, exported.fixed_by)


def _add(graph: Graph, node: fx.Node) -> None:
    """Evaluate a constant operation, or add a node for it to the graph."""
    if _is_constant(graph, node):
        graph.constants[node.name] = graph.eager(node, "").call()
        return
    known = known_value(graph, node)
    if known is not None:
        _note(graph, node, known)
        if is_input(graph, known):
            graph.aliases[node.name] = known.view.root
            return
    build = BUILDERS.get(node.target) if known is None else None
    if node.target not in _TAKE_CONSTANTS and _reads_constants(graph, node):
        build = None
    built = build(graph, node) if build is not None else None
    if built is True:  # it became part of another node
        return
    if built is None:
        built = graph.eager(node, fallback_reason(graph, node, has_kernel=build is not None))
        built.moved = graph.views.get(node.name)
    assert isinstance(built, Node)
    graph.nodes[built.name] = built


def _note(graph: Graph, node: fx.Node, known: Known) -> None:
    """Note what is known of a value. PyTorch computes it only if something else reads it."""
    graph.known[node.name] = known
    value = per_image(known)
    if value is not None:
        graph.shared[node.name] = value


def _is_constant(graph: Graph, node: fx.Node) -> bool:
    """Return whether the operation computes tensors from constants, the same at each call."""
    sources = [graph.resolve(argument.name) for argument in node.all_input_nodes]
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    known = all(name in graph.constants for name in sources)
    # An operation without inputs, such as arange, makes a constant; a branch has no such tag.
    known = known and (bool(sources) or isinstance(node.target, torch._ops.OpOverload))
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else (value,)
    return known and not random and all(isinstance(part, Tensor) for part in parts)


def _reads_constants(graph: Graph, node: fx.Node) -> bool:
    """Return whether the first argument, which a kernel would read, is a constant."""
    first = node.args[0] if node.args else None
    return isinstance(first, fx.Node) and graph.resolve(first.name) in graph.constants


def _network(graph: Graph, batch_fixed_by: str) -> Network:
    """Collect the nodes that the outputs depend on."""
    signature = graph.signature
    outputs = [_output(graph, output) for output in signature.outputs]
    changed = {
        name: graph.resolve(output.name) for name, output in signature.changed_inputs.items()
    }
    names = tuple(dict.fromkeys([*_computed(outputs), *changed.values()]))
    inputs = [graph.fx_nodes[name].meta["val"] for name in signature.inputs]
    for node in graph.nodes.values():
        if isinstance(node, Fallback) and node.moved is not None:
            node.moved = replace(node.moved, root=graph.resolve(node.moved.root))
    for name in names:
        output = graph.nodes.get(name)
        if isinstance(output, Fallback) and output.moved is not None:
            graph.nodes[name] = output_node(graph, output)
    return Network(
        nodes=needed_nodes(list(graph.nodes.values()), names),
        inputs=signature.inputs,
        outputs=names,
        pack_outputs=OutputPacker(outputs, signature.out_spec),
        changed_inputs=changed,
        input_shapes=tuple(_shape(graph, value) for value in inputs),
        input_dtypes=tuple(value.dtype for value in inputs),
        batch_fixed_by=batch_fixed_by,
        returns_constants=any(isinstance(output, Constant) for output in outputs),
    )


def _shape(graph: Graph, value: Tensor) -> tuple[int | str, ...]:
    """Return the shape of an input, with one name for sizes that have to be equal."""
    return tuple(graph.equal_sizes.get(str(size), size_of(size)) for size in value.shape)


def _output(graph: Graph, output: Any) -> Constant | str:
    """Return the name of the node that computes an output, or its constant value."""
    if not isinstance(output, fx.Node):
        return Constant(output)
    name = graph.resolve(output.name)
    return Constant(graph.constants[name]) if name in graph.constants else name


class OutputPacker:
    """Arranges the outputs as the model's `forward` returns them, constants included."""

    def __init__(self, outputs: list[Constant | str], spec: Any) -> None:
        self.outputs, self.spec = outputs, spec
        self._only = outputs[0] if spec.is_leaf() and isinstance(outputs[0], str) else None

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
        """Return what the model's `forward` returns."""
        if self._only is not None:
            return values[self._only]
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


def _packer_like(returned: Any) -> OutputPacker:
    return OutputPacker(*pytree.tree_flatten(returned))


def _computed(outputs: list[Constant | str]) -> list[str]:
    return [output for output in outputs if isinstance(output, str)]
