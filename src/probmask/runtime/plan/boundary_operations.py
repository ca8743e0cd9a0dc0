"""The copies of tensors into the arena, into the lanes of groups, and out of the arena."""

from typing import Any

from probmask.runtime.kernels.operation_table import Field, Kind, Place
from probmask.runtime.lower.nodes import Attention, Form
from probmask.runtime.plan.arena import PlacedTensor, SlotPart
from probmask.runtime.plan.operations import Operations
from probmask.runtime.plan.partition import ExternalTensor, Step
from probmask.runtime.plan.token_operations import copy_fields


def add_packing(ops: Operations, index: int, external: ExternalTensor) -> None:
    """Copy an input of the step into the arena."""
    tensor = ops.arena.allocate(external.name, 1, external.form)
    fields = {**ops.from_to(tensor, tensor), Field.KIND: Kind.PACK, Field.EXTERNAL: index}
    is_mask = external.name in _masks(ops.step)
    if external.form.tokens or is_mask:
        fields = _token_copy(ops, tensor, external.form, index, into_arena=True)
        fields[Field.UNCHECKED] = is_mask
    ops.emit("(input)", fields)


def _masks(step: Step) -> set[str]:
    """Return the inputs that are masks of an attention: they may be infinite."""
    return {name for n in step.nodes if isinstance(n, Attention) for name in n.inputs[3:]}


def is_packed_in_groups(ops: Operations, external: ExternalTensor) -> bool:
    """Return whether an input consists of tokens that only groups read."""
    of_single = ops.arena.reads[external.name, 1]
    is_interleaved = external.name in ops.arena.interleaved
    return external.form.tokens and is_interleaved and of_single == 1


def add_group_packing(ops: Operations, index: int, external: ExternalTensor) -> None:
    """Copy the tokens of all images of a group into their lanes."""
    tensor = ops.arena.allocate(external.name, ops.lanes, external.form)
    fields = {
        **ops.from_to(tensor, tensor),
        Field.KIND: Kind.PACK_TOKENS,
        Field.EXTERNAL: index,
    }
    ops.emit("(input)", fields)


def _token_copy(
    ops: Operations, tensor: PlacedTensor, form: Form, external: int, *, into_arena: bool
) -> dict[Field, Any]:
    """Return the copy between a tensor of tokens and an external tensor, channels last."""
    inside = [
        (form.height, tensor.layout.stride),
        (form.width, 1),
        (form.channels, tensor.layout.plane),
    ]
    outside = [form.width * form.channels, form.channels, 1]
    loops = [
        (size, step, other) if not into_arena else (size, other, step)
        for (size, step), other in zip(inside, outside, strict=True)
    ]
    arena = SlotPart(tensor.slot, tensor.layout.lead)
    fields: dict[Field, Any] = {
        Field.SOURCE: 0 if into_arena else arena,
        Field.TARGET: arena if into_arena else 0,
        Field.SOURCE_IS: Place.EXTERNAL if into_arena else Place.ARENA,
        Field.TARGET_IS: Place.ARENA if into_arena else Place.EXTERNAL,
        Field.EXTERNAL: external,
        Field.IMAGE_SIZE: form.size,
    }
    return fields | copy_fields(loops, ops.data)


def add_unpacking(ops: Operations, lanes: int) -> None:
    """Copy the outputs of the step that are computed for this number of lanes."""
    for index, external in enumerate(ops.step.outputs):
        name = ops.arena.root(external.name)
        is_single = (name, 1) in ops.arena.tensors
        if is_single != (lanes == 1) or (name, lanes) not in ops.arena.tensors:
            continue
        tensor = ops.arena.get(external.name, lanes)
        number = len(ops.step.inputs) + index
        fields = {
            **ops.from_to(tensor, tensor),
            Field.KIND: Kind.UNPACK,
            Field.EXTERNAL: number,
            Field.TOKENS: external.form.tokens,
        }
        if external.form.tokens and lanes == 1:
            fields = _token_copy(ops, tensor, external.form, number, into_arena=False)
        ops.emit("(output)", fields)
        ops.arena.mark_read((external.name,), lanes)


def add_interleaving(ops: Operations, direct: set[str]) -> None:
    """Copy the tensors that groups read from single images into their lanes.

    Those in ``direct`` are packed into their lanes instead.
    """
    forms = {tensor.name: tensor.form for tensor in ops.step.inputs}
    forms.update({node.name: node.form for node in ops.step.nodes if node.form is not None})
    copied = [name for name in ops.arena.interleaved if name not in direct]
    for name in copied:
        source = ops.arena.get(name, 1)
        target = ops.arena.allocate(name, ops.lanes, forms[name])
        fields = {
            **ops.from_to(source, target),
            Field.KIND: Kind.INTERLEAVE,
            Field.TARGET_LANES: ops.lanes,
        }
        ops.emit("(lanes)", fields)
    ops.arena.mark_read(copied, 1)
