"""Operations that move numbers or only rename them: concatenation, reshaping, copies."""

from typing import TYPE_CHECKING

import torch
from torch import fx

from probmask.runtime.arguments import arguments_of, label_of
from probmask.runtime.building.forms import Built, plain_of_any_rank, tail
from probmask.runtime.exporting import size_of
from probmask.runtime.nodes import Concatenate, Form, Reshape

if TYPE_CHECKING:
    from probmask.runtime.lower import Lowering


def build_concatenation(to: "Lowering", node: fx.Node) -> Built:
    """Channels of tensors that are otherwise of one form."""
    arguments = arguments_of(node)
    value = node.meta["val"]
    if arguments["dim"] not in (1, 1 - value.dim()):
        return None
    names = [to.source(part) for part in arguments["tensors"]]
    forms = [to.form_of(name) for name in names]
    form = plain_of_any_rank(value)
    if form is None or any(other is None or other.flat for other in forms):
        return None
    known = [other for other in forms if other is not None]
    if any((f.unit, f.height, f.width) != (form.unit, form.height, form.width) for f in known):
        return None
    return Concatenate(
        node.name,
        tuple(names),
        lambda *tensors: torch.cat(tensors, 1),
        label_of(node),
        form=form,
        input_forms=tuple(known),
        tail=tail(node, form),
    )


def build_reshape(to: "Lowering", node: fx.Node) -> Built:
    """Channels, rows and columns made one dimension, or a dimension of one position dropped."""
    source = to.source(node.args[0])
    before = to.form_of(source)
    value = node.meta["val"]
    if before is None or len(before.unit) != 1 or not value.dim():
        return None
    if str(value.shape[0]) != before.unit[0]:
        return None
    shape = tuple(map(size_of, value.shape[1:]))
    if shape == (before.size,):
        form = Form(
            before.unit, before.channels, before.height, before.width, flat=before.positions > 1
        )
    elif before.positions == 1 and shape in ((before.channels, 1, 1), (before.channels, 1)):
        form = before
    else:
        return None
    return Reshape(
        node.name,
        (source,),
        lambda x: x.reshape(len(x), *shape),
        label_of(node),
        form=form,
        input_forms=(before,),
        tail=tail(node, form),
    )


def build_identity(to: "Lowering", node: fx.Node) -> Built:
    """Another name for what it copies, or leaves as it is."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    dropout = node.target is torch.ops.aten.dropout.default
    if x.meta["val"].dtype != node.meta["val"].dtype:
        return None
    if dropout and arguments_of(node)["train"]:
        return None
    # A copy of what PyTorch computed may be there for its strides.
    if not dropout and to.form_of(to.source(x)) is None:
        return None
    to.aliases[node.name] = to.source(x)
    return True
