"""Checks of a network from a file: compiled code must not read or write outside of its tensors.

`check_network` raises `ArtifactError` unless every index, size and shape of every node fits the
tensors that the node reads and writes. A kind of node without a check here cannot be stored.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import numpy as np

from probmask.runtime.kernels.operation_table import GATES, Cell, Curve
from probmask.runtime.lower.copy_loops import can_copy, loops_of
from probmask.runtime.lower.nodes import (
    Activate,
    Activation,
    AttendedKeys,
    Attention,
    Broadcast,
    Combine,
    Concatenate,
    Convolution,
    Depth,
    Embed,
    Form,
    Move,
    Network,
    Node,
    Normalize,
    NormalizeGroups,
    Pair,
    Pool,
    Rearrange,
    Recurrent,
    Reshape,
    Resize,
    Softmax,
    TransposedConvolution,
)
from probmask.runtime.lower.views import Axis, Factor, View
from probmask.storage.encodings import require

# The largest number of elements of a tensor, for one image.
_MAX_SIZE = 2**28
_MAX_NODES = 100_000
_MAX_SIDE = 2**20  # of kernels, strides, paddings
DTYPES = ("float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class Value:
    """A tensor of a network: the sizes of its leading dimensions, by name, and the others."""

    leading: tuple[str, ...]
    trailing: tuple[int, ...]
    dtype: str = "float32"
    form: Form | None = None

    @property
    def size(self) -> int:
        """Number of elements of one image."""
        return prod(self.trailing)


# A tensor whose batch is not its first dimension: it can be returned, but no node can read it.
_RETURNED = Value((), ())


def check_network(network: Network) -> None:
    """Raise `ArtifactError` unless the nodes fit together."""
    require(len(network.nodes) <= _MAX_NODES, f"the graph has more than {_MAX_NODES:,} nodes")
    values = _inputs(network)
    for node in network.nodes:
        where = f"node {node.name!r:.80}"
        require(node.name not in values, f"{where}: the name is used twice")
        for name in node.inputs:
            require(name in values, f"{where}: {name!r:.80} is not computed before it")
        sources = [values[name] for name in node.inputs]
        values[node.name] = CHECKS[type(node)](node, sources, where)
    for name in network.outputs:
        require(name in values, f"the output {name!r:.80} is not computed")
    require(len(network.outputs) > 0, "the graph has no output")


def _inputs(network: Network) -> dict[str, Value]:
    require(len(network.inputs) > 0, "the graph has no input")
    require(len(set(network.inputs)) == len(network.inputs), "two inputs have the same name")
    values = {}
    specs = zip(network.inputs, network.input_shapes, network.input_dtypes, strict=True)
    for name, shape, dtype in specs:
        where = f"input {name!r:.80}"
        require(dtype in DTYPES, f"{where}: unknown dtype {dtype!r:.40}")
        require(len(shape) >= 1, f"{where}: it has no dimensions")
        sizes = [size for size in shape[1:] if isinstance(size, int)]
        require(len(sizes) == len(shape) - 1, f"{where}: only its first size may vary")
        _check_size(sizes, where)
        if isinstance(shape[0], int):
            _check_size([shape[0]], where)
        values[name] = Value((str(shape[0]),), tuple(sizes), dtype)
    return values


def _check_size(sizes: Any, where: str) -> None:
    positive = all(0 < size <= _MAX_SIZE for size in sizes) and prod(sizes) <= _MAX_SIZE
    require(positive, f"{where}: the sizes {list(sizes)!s:.80} are not valid")


def _check_form(form: Form | None, where: str) -> Form:
    require(form is not None, f"{where}: it has no form")
    assert form is not None
    _check_size((form.channels, form.height, form.width), where)
    return form


def _check_kernel_node(node: Node, sources: list[Value], where: str) -> tuple[Form, list[Form]]:
    """Check what holds for every node on the kernels; return its form and those of its inputs."""
    form = _check_form(node.form, where)
    require(len(node.input_forms) == len(node.inputs), f"{where}: it has not one form per input")
    require(1 <= len(form.leading) <= 8, f"{where}: its form has no batch")
    for own, source in zip(node.input_forms, sources, strict=True):
        _check_form(own, where)
        fits = own.leading == form.leading and own.size == _size_of(source, own)
        require(fits and source.dtype == "float32", f"{where}: an input has another form")
        same = source.form is None or source.form == own or _is_reread(source.form, own)
        require(same, f"{where}: an input has another form than the node that computes it")
    _check_size(node.trailing or (1,), where)
    require(prod(node.trailing) == form.size, f"{where}: its shape does not fit its form")
    return form, list(node.input_forms)


def _size_of(source: Value, form: Form) -> int:
    """Return the elements of one image if the source is read with this form; 0 if it cannot."""
    known = (*source.leading, *map(str, source.trailing))
    if known[: len(form.leading)] != form.leading:
        return 0
    return prod(source.trailing[len(form.leading) - len(source.leading) :])


def _is_reread(source: Form, own: Form) -> bool:
    """Return whether the elements of one image are read in another arrangement, from memory."""
    return source.size == own.size or len(source.leading) != len(own.leading)


def _value(node: Node, form: Form) -> Value:
    return Value(form.leading, node.trailing, form=form)


def _check_array(array: Any, shape: tuple[int, ...], what: str, where: str) -> None:
    fits = array is not None and array.dtype == np.float32 and array.shape == shape
    require(fits, f"{where}: its {what} has not the shape {list(shape)!s:.60}")
    require(array.flags.c_contiguous, f"{where}: its {what} is not contiguous")


def _check_activation(activation: Activation, where: str) -> None:
    require(activation.low <= 0 <= activation.high, f"{where}: its activation does not keep 0")
    clamps = activation.low > -np.inf or activation.high < np.inf
    require(activation.curve is Curve.NONE or not clamps, f"{where}: its activation is not one")


def _check_view(view: View, form: Form, where: str) -> None:
    """Check that a view of a tensor of this form stays within it."""
    sizes = view.channels == form.channels and view.positions == form.positions
    require(sizes and len(form.leading) == 1, f"{where}: a view does not fit its tensor")
    require(view.leading == form.leading[0], f"{where}: a view has another batch")
    batches = [factor for factor in view.factors if factor.axis is Axis.BATCH]
    whole = [(factor.size, factor.step) for factor in batches] in ([], [(view.batch, 1)])
    fixed = form.leading[0].isdecimal()
    require(
        whole and (len(batches) > 0 or fixed), f"{where}: a view does not run over the batch once"
    )
    require(len(view.factors) <= 64, f"{where}: a view has more than 64 loops")
    for axis, start, size in (
        (Axis.CHANNEL, view.channel, view.channels),
        (Axis.POSITION, view.position, view.positions),
    ):
        own = [factor for factor in view.factors if factor.axis is axis]
        counted = all(1 <= f.size <= _MAX_SIZE and 0 <= f.step <= _MAX_SIZE for f in own)
        last = start + sum((factor.size - 1) * factor.step for factor in own)
        inside = counted and start >= 0 and last < size
        require(inside, f"{where}: a view leaves its tensor")


def _check_whole_views(node: Node, forms: list[Form], where: str) -> list[int]:
    """Return the channels that the node reads of each input."""
    if not node.views:
        return [form.channels for form in forms]
    require(len(node.views) == len(forms), f"{where}: it has not one view per input")
    for view, form in zip(node.views, forms, strict=True):
        _check_view(view, form, where)
        inside = view.is_whole() and view.channel + view.width() <= form.channels
        require(inside, f"{where}: a view is not a range of channels")
    return [view.width() for view in node.views]


def _same_plane(*forms: Form) -> bool:
    return len({(form.height, form.width) for form in forms}) == 1


def _check_convolution(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    require(1 <= len(forms) <= 2, f"{where}: it has {len(forms)} inputs")
    channels = _check_whole_views(node, forms, where)
    require(node.weight.ndim == 4, f"{where}: its weight has not four dimensions")
    outputs, inputs, rows, columns = node.weight.shape
    _check_array(node.weight, (outputs, inputs, rows, columns), "weight", where)
    _check_array(node.bias, (outputs,), "bias", where)
    depth = node.depth if node.depth is not None else Depth(1, 1)
    _check_depth(depth, node, where)
    sizes = (*node.stride, *node.dilation, node.groups, outputs, inputs, rows, columns)
    require(all(1 <= size <= _MAX_SIZE for size in sizes), f"{where}: a size is not valid")
    fits = outputs % node.groups == 0 and form.channels == outputs * depth.outputs
    require(fits, f"{where}: its weight does not fit its output")
    _check_activation(node.activation, where)
    before = forms[0]
    if node.rank == 0:
        _check_linear(node, form, before, channels[0], where)
    else:
        fits = inputs * node.groups * depth.inputs == channels[0] * depth.kernel
        require(fits, f"{where}: its weight does not fit its input")
        after = tuple(
            _outputs(size, kernel, stride, padding, dilation, where)
            for size, kernel, stride, padding, dilation in zip(
                (before.height, before.width), (rows, columns), node.stride, node.padding,
                node.dilation, strict=True,
            )
        )  # fmt: skip
        require(after == (form.height, form.width), f"{where}: its output has another size")
    if len(forms) == 2:
        fits = channels[1] == form.channels and _same_plane(form, forms[1])
        require(fits, f"{where}: its second input does not fit its output")
    return _value(node, form)


def _check_depth(depth: Depth, node: Any, where: str) -> None:
    """Check the slices of a convolution on volumes; any other has one slice."""
    require(0 <= node.rank <= 3, f"{where}: its rank is {node.rank}")
    require((node.depth is not None) == (node.rank == 3), f"{where}: its rank is {node.rank}")
    sizes = (depth.inputs, depth.outputs, depth.kernel, depth.stride, depth.dilation)
    require(all(1 <= size <= _MAX_SIZE for size in sizes), f"{where}: a size is not valid")
    divided = node.weight.shape[1] % depth.kernel == 0
    require(divided, f"{where}: its weight does not fit its slices")
    outputs = _outputs(
        depth.inputs, depth.kernel, depth.stride, depth.padding, depth.dilation, where
    )
    require(outputs == depth.outputs, f"{where}: its output has another number of slices")


def _check_transposed(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    require(len(forms) == 1 and node.weight.ndim == 4, f"{where}: its weight does not fit")
    inputs, outputs, *kernel = node.weight.shape
    _check_array(node.weight, node.weight.shape, "weight", where)
    sizes = (*node.stride, *node.dilation, node.groups, inputs, outputs, *kernel)
    require(all(1 <= size <= _MAX_SIDE for size in sizes), f"{where}: a size is not valid")
    require(node.rank in (1, 2), f"{where}: its rank is {node.rank}")
    fits = inputs == channels[0] and inputs % node.groups == 0
    require(fits, f"{where}: its weight does not fit its input")
    require(form.channels == outputs * node.groups, f"{where}: its weight does not fit its output")
    _check_array(node.bias, (form.channels,), "bias", where)
    _check_activation(node.activation, where)
    axes = zip(
        (forms[0].height, forms[0].width), (form.height, form.width), kernel, node.stride,
        node.padding, node.output_padding, node.dilation, strict=True,
    )  # fmt: skip
    weights = form.channels * inputs // node.groups
    for before, after, size, stride, padding, extra, dilation in axes:
        inside = 0 <= padding <= _MAX_SIDE and 0 <= extra < max(stride, dilation)
        reached = (before - 1) * stride - 2 * padding + dilation * (size - 1) + extra + 1
        require(inside and reached == after, f"{where}: its output has another size")
        weights *= stride * (dilation * (size - 1) // stride + 2)
    # The planner makes a convolution of it, whose kernel has zeros between the elements.
    require(weights <= _MAX_SIZE, f"{where}: its stride or dilation is too large")
    return _value(node, form)


def _check_linear(node: Any, form: Form, before: Form, channels: int, where: str) -> None:
    plain = (node.stride, node.dilation, node.padding) == ((1, 1), (1, 1), ((0, 0), (0, 0)))
    single = node.weight.shape[2:] == (1, 1) and node.groups == 1 and plain
    require(single, f"{where}: a linear layer has a kernel of one weight")
    inputs = node.weight.shape[1]
    if node.views:
        fits = inputs == channels and _same_plane(form, before)
    else:
        fits = inputs == before.size and form.positions == 1
    require(fits, f"{where}: its weight does not fit its input")


def _outputs(size: int, kernel: int, stride: int, padding: Pair, dilation: int, where: str) -> int:
    fits = all(0 <= n <= _MAX_SIDE for n in padding) and max(kernel, stride, dilation) <= _MAX_SIDE
    require(fits, f"{where}: its kernel, stride, padding or dilation is not valid")
    covered = size + sum(padding) - dilation * (kernel - 1) - 1
    require(covered >= 0, f"{where}: its kernel is larger than its input")
    return covered // stride + 1


def _check_pool(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    require(len(forms) == 1, f"{where}: it has {len(forms)} inputs")
    slices = max(1, len(node.slices))
    own, rest = divmod(form.channels, slices)
    before, other_rest = divmod(channels[0], max(1, own))
    fits = rest == other_rest == 0 and (bool(node.slices) or channels == [form.channels])
    require(fits, f"{where}: its channels do not fit")
    _check_array(node.slice_factors, (len(node.slices),), "factors", where)
    for windows, size, count in (
        (node.slices, before, len(node.slices)),
        (node.rows, forms[0].height, form.height),
        (node.columns, forms[0].width, form.width),
    ):
        inside = all(0 <= start < end <= size for start, end in windows)
        require(inside and len(windows) == count, f"{where}: a window leaves its input")
    _check_array(node.factors, (form.height, form.width), "factors", where)
    return _value(node, form)


def _check_combine(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    _check_activation(node.activation, where)
    fits = set(channels) == {form.channels} and _same_plane(form, *forms)
    require(fits, f"{where}: its inputs do not fit its output")
    if node.constant is not None:
        require(len(forms) == 1, f"{where}: it has a constant and {len(forms)} inputs")
        _check_array(node.constant, (form.positions, form.channels), "constant", where)
    else:
        require(len(forms) == 2, f"{where}: it has {len(forms)} inputs")
    return _value(node, form)


def _check_activate(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    _check_activation(node.activation, where)
    fits = len(forms) == 1 and channels == [form.channels] and _same_plane(form, *forms)
    require(fits, f"{where}: its input does not fit its output")
    if node.slopes is not None:
        _check_array(node.slopes, (form.channels,), "slopes", where)
    return _value(node, form)


def _check_broadcast(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    require(channels == [form.channels] * 2, f"{where}: its channels do not fit")
    fits = _same_plane(form, forms[0]) and forms[1].positions == 1
    require(fits, f"{where}: its inputs do not fit its output")
    return _value(node, form)


def _check_softmax(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    fits = channels == [form.channels] and _same_plane(form, *forms)
    require(fits, f"{where}: its input does not fit its output")
    return _value(node, form)


def _check_resize(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    require(channels == [form.channels], f"{where}: its channels do not fit")
    sizes = (forms[0].height, form.height), (forms[0].width, form.width)
    for axis, (size, count) in enumerate(sizes):
        _check_array(node.weights[axis], (count,), "weights", where)
        for indices in (node.first[axis], node.second[axis]):
            inside = indices.shape == (count,) and indices.min() >= 0 and indices.max() < size
            require(bool(inside), f"{where}: an index leaves its input")
    return _value(node, form)


def _check_groups(node: Any, sources: list[Value], where: str) -> Value:
    value = _check_softmax(node, sources, where)
    assert value.form is not None
    divides = node.groups > 0 and value.form.channels % node.groups == 0
    require(divides, f"{where}: its groups do not fit its channels")
    _check_array(node.scale, (value.form.channels,), "scale", where)
    _check_array(node.bias, (value.form.channels,), "bias", where)
    require(0 <= node.epsilon < np.inf, f"{where}: its epsilon is not valid")
    return value


def _check_concatenate(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = sum(own.channels for own in forms)
    fits = channels == form.channels and _same_plane(form, *forms) and not node.views
    require(fits and len(forms) > 0, f"{where}: its inputs do not fit its output")
    return _value(node, form)


def _check_normalize(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    fits = len(forms) == 1 and channels == [form.channels] and _same_plane(form, *forms)
    require(fits, f"{where}: its input does not fit its output")
    _check_array(node.scale, (form.channels,), "scale", where)
    _check_array(node.bias, (form.channels,), "bias", where)
    require(0 <= node.epsilon < np.inf, f"{where}: its epsilon is not valid")
    return _value(node, form)


def _check_attention(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    require(3 <= len(forms) <= 4 and len(node.views) == 3, f"{where}: it has not enough inputs")
    require(all(f.height == 1 for f in (form, *forms)), f"{where}: its inputs are images")
    require(len(form.leading) == 1, f"{where}: its form has no batch")
    for view, own in zip(node.views, forms, strict=False):
        _check_view(view, own, where)
    query, key, value = forms[:3]
    heads, keys, depth = len(node.heads), node.keys, node.depth
    counted = 1 <= depth <= _MAX_SIZE and 1 <= keys <= _MAX_SIZE and heads > 0
    require(counted and heads * depth == form.channels, f"{where}: its heads do not fit its output")
    rooted = node.views[0].position == 0 and query.positions == form.positions
    require(rooted and form.positions > 1, f"{where}: its queries do not fit its output")
    for view, own in zip(node.views[1:], (key, value), strict=True):
        require(view.position + keys <= own.positions, f"{where}: its keys leave their tensor")
    for channels in node.heads:
        inside = all(
            channel >= 0 and channel + depth <= own.channels
            for channel, own in zip(channels, (query, key, value), strict=True)
        )
        require(inside, f"{where}: a head leaves its tensor")
    require(isfinite(node.scale) and node.scale > 0, f"{where}: its scale is not valid")
    _check_mask(node, form, forms, where)
    return _value(node, form)


def _check_mask(node: Any, form: Form, forms: list[Form], where: str) -> None:
    require(node.mask_heads in (1, len(node.heads)), f"{where}: its mask does not fit its heads")
    width = node.mask_heads * node.keys
    if len(forms) == 4:
        own = forms[3]
        fits = own.channels == width and own.positions in (1, form.positions)
        require(fits and node.mask is None, f"{where}: its mask does not fit")
        require(not node.causal, f"{where}: it has two masks")
    elif node.mask is not None:
        require(node.mask.ndim == 2 and not node.causal, f"{where}: its mask does not fit")
        rows = len(node.mask)
        require(rows in (1, form.positions), f"{where}: its mask does not fit its queries")
        _check_array(node.mask, (rows, width), "mask", where)
    else:
        require(node.mask_heads == 1, f"{where}: it has no mask")


def _check_recurrent(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    channels = _check_whole_views(node, forms, where)
    flat = len(form.leading) == 1 and all(own.height == 1 for own in (form, *forms))
    require(flat, f"{where}: its inputs are images")
    layers = len(node.layers)
    directions = len(node.layers[0]) if layers else 0
    alike = all(len(cells) == directions for cells in node.layers)
    require(directions in (1, 2) and alike, f"{where}: it has not one or two directions")
    units, rest = divmod(form.channels, directions)
    require(rest == 0, f"{where}: its units do not fit its output")
    rows, inputs = GATES[node.cell] * units, channels[0]
    for cells in node.layers:
        for cell in cells:
            _check_array(cell.of_input, (rows, inputs), "weight of the input", where)
            _check_array(cell.of_state, (rows, units), "weight of the state", where)
            _check_array(cell.input_bias, (rows,), "bias of the input", where)
            _check_array(cell.state_bias, (rows,), "bias of the state", where)
        inputs = directions * units
    is_lstm = node.cell is Cell.LSTM
    states = list(zip(channels[1:], forms[1:], strict=True))
    fits = len(states) in (0, 2 if is_lstm else 1) and all(
        width == units and own.positions == layers * directions for width, own in states
    )
    require(fits, f"{where}: its initial states do not fit")
    counts = (node.steps, layers, layers)
    positions = sum(n for n, needed in zip(counts, node.returned, strict=True) if needed)
    fits = node.steps == forms[0].positions and positions == form.positions
    require(fits and (is_lstm or not node.returned[2]), f"{where}: its steps do not fit its output")
    return _value(node, form)


def _check_rearrange(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    require(len(form.leading) == 1, f"{where}: its form has no batch")
    read = [part for part in node.parts if part.source is not None]
    require(len(read) == len(forms), f"{where}: it has not one part per input")
    given = iter(forms)
    for part in node.parts:
        if part.source is None:
            _check_target(part.target, form, where, batch=False)
            sizes = [factor.size for factor in part.target.factors]
            shaped = part.constant is not None and part.constant.size == prod(sizes)
            require(shaped and len(sizes) <= 4, f"{where}: a constant does not fit its place")
            _check_rows(part.target, part.target.factors, form, where)
            _check_array(part.constant, part.constant.shape, "constant", where)
            continue
        own = next(given)
        _check_view(part.source, own, where)
        _check_target(part.target, form, where, batch=True)
        pairs = list(zip(part.source.factors, part.target.factors, strict=False))
        same = len(part.source.factors) == len(part.target.factors)
        same = same and all(a.size == b.size for a, b in pairs)
        same = same and all((a.axis is Axis.BATCH) == (b.axis is Axis.BATCH) for a, b in pairs)
        require(same, f"{where}: a part and its place differ")
        require(can_copy(part, own), f"{where}: a part needs more loops than the kernel has")
        loops = loops_of(part, own.height, own.width)
        assert loops is not None
        _check_rows(part.target, [place for _, _, place in loops], form, where)
    return _value(node, form)


def _check_rows(target: View, loops: Iterable[Factor], form: Form, where: str) -> None:
    """Check that loops over the positions of an image stay within its rows and columns."""
    if form.height == 1:
        return
    row, column = divmod(target.position, form.width)
    for loop in loops:
        if loop.axis is Axis.POSITION:
            rows, columns = divmod(loop.step, form.width)
            row, column = row + (loop.size - 1) * rows, column + (loop.size - 1) * columns
    inside = row < form.height and column < form.width
    require(inside, f"{where}: a place leaves the rows of its image")


def _check_target(view: View, form: Form, where: str, *, batch: bool) -> None:
    """Check the place of a part in its new root. Constants have no loop over the batch."""
    if batch:
        _check_view(view, form, where)
        return
    require(view.channels == form.channels, f"{where}: a place does not fit its tensor")
    require(view.positions == form.positions, f"{where}: a place does not fit its tensor")
    for axis, start, size in (
        (Axis.CHANNEL, view.channel, view.channels),
        (Axis.POSITION, view.position, view.positions),
    ):
        own = [factor for factor in view.factors if factor.axis is axis]
        counted = all(1 <= f.size <= _MAX_SIZE and 0 <= f.step <= _MAX_SIZE for f in own)
        last = start + sum((factor.size - 1) * factor.step for factor in own)
        require(counted and start >= 0 and last < size, f"{where}: a place leaves its tensor")
    moves = all(factor.axis is not Axis.BATCH for factor in view.factors)
    require(moves, f"{where}: a constant has a batch")


def _check_reshape(node: Any, sources: list[Value], where: str) -> Value:
    form, forms = _check_kernel_node(node, sources, where)
    fits = len(forms) == 1 and not node.views and _same_plane(form, *forms)
    require(fits and form.channels == forms[0].channels, f"{where}: it changes its elements")
    return _value(node, form)


def _check_outside(node: Node, sources: list[Value], where: str) -> Value:
    """Check what holds for every node that NumPy computes; return its input."""
    require(node.form is None, f"{where}: it has no kernel")
    plain = not node.input_forms and not node.views and len(sources) == 1
    require(plain and len(sources[0].leading) == 1, f"{where}: it has not one input")
    return sources[0]


def _check_move(node: Any, sources: list[Value], where: str) -> Value:
    source = _check_outside(node, sources, where)
    view = node.view
    require(view is not None and source.dtype == "float32", f"{where}: it has no view")
    sizes = view.channels, view.positions
    _check_size(sizes, where)
    require(prod(sizes) == source.size, f"{where}: a view does not fit its tensor")
    _check_view(view, Form(source.leading, view.channels, 1, view.positions), where)
    require(bool(view.dimensions), f"{where}: it has no dimensions")
    for dimension in view.dimensions:
        _check_size([prod(f.size for f in dimension if f.axis is not Axis.BATCH)], where)
    if not view.has_batch_first():
        return _RETURNED
    shape = view.shape[1:]
    _check_size(shape, where)
    return Value(source.leading, shape)


def _check_embed(node: Any, sources: list[Value], where: str) -> Value:
    source = _check_outside(node, sources, where)
    require(source.dtype in _INTEGERS, f"{where}: it takes integers, not {source.dtype}")
    require(node.table.ndim == 2 and node.table.size > 0, f"{where}: its table has no rows")
    _check_array(node.table, node.table.shape, "table", where)
    trailing = (*source.trailing, node.table.shape[1])
    _check_size(trailing, where)
    return Value(source.leading, trailing)


def _check_attended(node: Any, sources: list[Value], where: str) -> Value:
    source = _check_outside(node, sources, where)
    require(len(source.trailing) == 1, f"{where}: its input has not two dimensions")
    (keys,) = source.trailing
    both = (node.where_equal is None) == (node.elsewhere is None)
    require(both, f"{where}: it has only one of its sides")
    shape = node.sides(keys)[0].shape
    fits = len(shape) == 2 and min(shape) > 0 and shape[1] % keys == 0
    require(fits, f"{where}: its sides do not fit its input")
    for side in node.sides(keys):
        _check_array(side, shape, "sides", where)
    return Value(source.leading, shape)


CHECKS: Mapping[type[Node], Callable[[Any, list[Value], str], Value]] = {
    Activate: _check_activate,
    AttendedKeys: _check_attended,
    Attention: _check_attention,
    Broadcast: _check_broadcast,
    Combine: _check_combine,
    Concatenate: _check_concatenate,
    Convolution: _check_convolution,
    Embed: _check_embed,
    Move: _check_move,
    Normalize: _check_normalize,
    NormalizeGroups: _check_groups,
    Pool: _check_pool,
    Rearrange: _check_rearrange,
    Recurrent: _check_recurrent,
    Reshape: _check_reshape,
    Resize: _check_resize,
    Softmax: _check_softmax,
    TransposedConvolution: _check_transposed,
}
