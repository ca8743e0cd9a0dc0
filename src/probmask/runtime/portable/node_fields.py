"""Nodes as JSON: each field by its type. Arrays are references, which the caller resolves.

What is read is checked only by type. `node_checks` checks that the nodes fit together.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, Union

import numpy as np

from probmask.runtime.lower.nodes import Convolution, Node
from probmask.storage.encodings import require

# Returns the JSON that stands for an array.
Refer = Callable[[Any], Any]
# Returns the array that JSON stands for.
Resolve = Callable[[Any], Any]

_MAX_INTEGER = 2**40
_MAX_TEXT = 1000
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
# Fields that are not stored.
_UNSTORED = ("call", "reason")
# Marks a layer whose weight is stored without the BatchNorm that is folded into it.
_UNFOLDED = "unfolded"


def node_to_json(node: Node, refer: Refer, unfolded: Any = None) -> dict[str, Any]:
    """Return a node as JSON, without the fields that have their default values.

    If ``unfolded`` is given, it is stored as the weight, and the reader folds the BatchNorm.
    """
    skipped = ("folded",) if unfolded is None else ("weight", "bias")
    fields = {"kind": type(node).__name__, **_fields_to_json(node, refer, skipped)}
    return fields if unfolded is None else fields | {"weight": unfolded, _UNFOLDED: True}


def _fields_to_json(value: Any, refer: Refer, skipped: tuple[str, ...] = ()) -> dict[str, Any]:
    made = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if field.name not in (*_UNSTORED, *skipped) and not _is_default(field, own):
            made[field.name] = _to_json(own, refer)
    return made


def _is_default(field: "dataclasses.Field[Any]", value: Any) -> bool:
    if isinstance(value, np.ndarray) or field.default is dataclasses.MISSING:
        return False
    return bool(value == field.default)


def _to_json(value: Any, refer: Refer) -> Any:
    if isinstance(value, np.ndarray):
        return refer(value)
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return _fields_to_json(value, refer)
    if isinstance(value, tuple | list):
        return [_to_json(item, refer) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def node_from_json(fields: Any, kinds: dict[str, type[Node]], resolve: Resolve) -> Node:
    """Return the node that JSON describes, or raise `ArtifactError`."""
    require(isinstance(fields, dict), "a node is not an object")
    kind, name = fields.get("kind"), fields.get("name")
    require(isinstance(name, str) and 0 < len(name) <= _MAX_TEXT, "a node has no name")
    known = isinstance(kind, str) and kind in kinds
    require(known, f"node {name!r:.80}: unknown kind {kind!r:.40}")
    unfolded = fields.get(_UNFOLDED, False)
    stored = {k: v for k, v in fields.items() if k not in ("kind", _UNFOLDED)}
    node: Node = _from_fields(kinds[kind], stored, resolve, f"node {name!r:.80}")
    if unfolded is not False:
        fits = unfolded is True and isinstance(node, Convolution) and node.folded is not None
        require(fits, f"node {name!r:.80}: it has no BatchNorm to fold")
        assert isinstance(node, Convolution)
        _fold(node)
    return node


def _fold(node: Convolution) -> None:
    """Fold the BatchNorm into the weight, with the arithmetic of the lowering."""
    assert node.folded is not None
    norm, channels = node.folded.norm, len(node.weight) if node.weight.ndim else 0
    arrays = (node.folded.bias, norm.mean, norm.variance, norm.weight, norm.bias)
    fits = all(array is None or array.shape == (channels,) for array in arrays)
    require(fits and channels > 0, f"node {node.name!r:.80}: its BatchNorm does not fit its weight")
    weight, bias = node.folded.of(node.weight)
    with np.errstate(all="ignore"):
        node.weight, node.bias = weight.astype(np.float32), bias


def _from_fields(kind: Any, fields: Any, resolve: Resolve, where: str) -> Any:
    require(isinstance(fields, dict), f"{where}: a {kind.__name__} is not an object")
    hints = _hints(kind)
    own = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(fields) - (set(own) - set(_UNSTORED)))
    require(not unknown, f"{where}: unknown field {unknown[:1]!r:.60}")
    made = {
        key: _from_json(hints[key], value, resolve, f"{where}: {key}")
        for key, value in fields.items()
    }
    for key, field in own.items():
        missing = field.default is dataclasses.MISSING
        missing = missing and field.default_factory is dataclasses.MISSING
        if missing and key not in made:
            require(key == "call", f"{where}: it has no {key}")
            made[key] = _no_call
    return kind(**made)


def _no_call(*_: Any) -> Any:
    raise AssertionError("a node on the kernels has no call without PyTorch")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _from_json(hint: Any, value: Any, resolve: Resolve, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        assert len(inner) == 1, hint
        return None if value is None else _from_json(inner[0], value, resolve, where)
    if origin is np.ndarray:
        return _array(arguments[1], resolve(value), where)
    if origin is tuple:
        return _tuple(arguments, value, resolve, where)
    if isinstance(hint, type) and issubclass(hint, Enum):
        require(isinstance(value, str) and value in hint.__members__, f"{where} is {value!r:.40}")
        return hint[value]
    if dataclasses.is_dataclass(hint):
        return _from_fields(hint, value, resolve, where)
    return _scalar(hint, value, where)


def _tuple(arguments: Any, value: Any, resolve: Resolve, where: str) -> tuple[Any, ...]:
    require(isinstance(value, list), f"{where} is not a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_from_json(arguments[0], item, resolve, where) for item in value)
    require(len(value) == len(arguments), f"{where} has {len(value)} items, not {len(arguments)}")
    pairs = zip(arguments, value, strict=True)
    return tuple(_from_json(argument, item, resolve, where) for argument, item in pairs)


def _array(dtype_hint: Any, array: Any, where: str) -> Any:
    (scalar,) = typing.get_args(dtype_hint)
    require(array.dtype == np.dtype(scalar), f"{where} has the dtype {array.dtype}")
    return array


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float:
        if isinstance(value, str):
            require(value in _INFINITIES, f"{where} is {value!r:.40}, not a number")
            return _INFINITIES[value]
        require(type(value) in (int, float), f"{where} is {value!r:.40}, not a number")
        fits = abs(value) <= _MAX_INTEGER if type(value) is int else math.isfinite(value)
        require(fits, f"{where} is {value!r:.40}")
        return float(value)
    require(type(value) is hint, f"{where} is {value!r:.40}")
    if hint is int:
        require(abs(value) <= _MAX_INTEGER, f"{where} is {value!r:.40}")
    if hint is str:
        require(len(value) <= _MAX_TEXT, f"{where} has {len(value)} characters")
    return value
