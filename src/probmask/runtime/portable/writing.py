"""The graph of a model for an artifact: lowered nodes as JSON, and the arrays that they need."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from probmask.errors import ArtifactError, InputError
from probmask.runtime.lower.export import export
from probmask.runtime.lower.frozen_model import frozen
from probmask.runtime.lower.graph import Constant
from probmask.runtime.lower.lowering import OutputPacker, lower
from probmask.runtime.lower.moves import without_pytorch
from probmask.runtime.lower.nodes import Convolution, Network, Node
from probmask.runtime.portable.node_checks import CHECKS, DTYPES, check_network
from probmask.runtime.portable.node_fields import node_to_json
from probmask.runtime.run.inputs import example_tensors
from probmask.storage.format import GRAPH_TENSOR

_SYMBOL = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Graph:
    """A network as JSON, and the tensors that it needs beyond those of the model, by name."""

    network: dict[str, Any]
    tensors: dict[str, Tensor]


def graph_of(model: nn.Module, example: Any, state: Mapping[str, Tensor]) -> Graph:
    """Lower a model with the tensors of ``state`` to a graph that refers to them by name.

    The artifact stores ``state``, whose weights may be rounded. What is computed from them, such as
    a weight with a folded BatchNorm, has to be computed from these values too.

    Raise `InputError` if an operation has no kernel.
    """
    examples = example_tensors(example, caller="save")
    stored = frozen(model, "save")
    stored.load_state_dict(dict(state), strict=False)  # tied weights are in it once
    network = _portable(lower(export(stored, examples, caller="save")))
    try:
        check_network(replace(network, input_dtypes=_dtypes(network)))
    except ArtifactError as error:
        raise InputError(f"save(graph=True): the graph cannot be stored: {error}") from error
    arrays = _Arrays(state)
    made = {
        "inputs": [
            {"name": name, "shape": list(shape), "dtype": dtype}
            for name, shape, dtype in zip(
                network.inputs, network.input_shapes, _dtypes(network), strict=True
            )
        ],
        "nodes": [_node(node, arrays) for node in network.nodes],
        "outputs": _outputs(network),
    }
    return Graph(_with_plain_symbols(made), arrays.own)


def _dtypes(network: Network) -> tuple[str, ...]:
    names = tuple(str(dtype).removeprefix("torch.") for dtype in network.input_dtypes)
    for name, dtype in zip(network.inputs, names, strict=True):
        if dtype not in DTYPES:
            raise InputError(
                f"save(graph=True): the input {name} has the dtype {dtype}; NumPy can pass "
                f"{', '.join(DTYPES)}."
            )
    return names


def _portable(network: Network) -> Network:
    """Return the network with nodes that run without PyTorch only."""
    if network.changed_inputs:
        raise InputError(
            f"save(graph=True): forward changes its input {next(iter(network.changed_inputs))} in "
            "place; only PyTorch can run that."
        )
    network = without_pytorch(network)
    unknown = {node.label: node for node in network.nodes if type(node) not in CHECKS}
    if unknown:
        named = ", ".join(list(unknown)[:5]) + (", …" if len(unknown) > 5 else "")
        raise InputError(
            f"save(graph=True): without PyTorch, {len(unknown)} operation"
            f"{'s' * (len(unknown) > 1)} of the network cannot run: {named}. Save it without a "
            "graph, or replace them; docs/performance.md lists what has kernels."
        )
    return network


def _outputs(network: Network) -> Any:
    packer = network.pack_outputs
    assert isinstance(packer, OutputPacker)
    return _tree(pytree.tree_unflatten(packer.outputs, packer.spec))


def _tree(value: Any) -> dict[str, Any]:
    """Return what the model returns as JSON."""
    if isinstance(value, Constant):
        plain = value.value is None or isinstance(value.value, bool | int | float | str)
        if not plain:
            raise InputError(
                "save(graph=True): the model returns a constant tensor; return only tensors that "
                "depend on the inputs."
            )
        return {"constant": value.value}
    if isinstance(value, str):
        return {"value": value}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: _tree(item) for key, item in value.items()}}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_tree(item) for item in value]}
    raise InputError(
        f"save(graph=True): the model returns a {type(value).__name__}; return tensors, or tuples, "
        "lists and dicts of them."
    )


def _node(node: Node, arrays: "_Arrays") -> dict[str, Any]:
    unfolded = None
    if isinstance(node, Convolution) and node.folded is not None:
        unfolded = arrays.unfolded(node)
    return node_to_json(node, arrays.refer, unfolded)


class _Arrays:
    """The arrays of a graph: tensors of the model where they are equal, others stored with it."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.own: dict[str, Tensor] = {}
        self._known: dict[tuple[int, int], tuple[str, bool, Any]] = {}
        self._by_size: dict[int, list[tuple[str, Any]]] = {}
        for name, tensor in state.items():
            if tensor.dtype not in (torch.float32, torch.float64, torch.float16):
                continue
            array = tensor.detach().cpu().to(torch.float32).numpy()
            self._by_size.setdefault(array.size, []).append((name, array))
            if array.ndim == 2:
                self._known.setdefault(_key(array.T), (name, True, array.T))
        for name, array in (pair for pairs in self._by_size.values() for pair in pairs):
            self._known[_key(array)] = (name, False, array)

    def refer(self, array: Any) -> dict[str, Any]:
        """Return a reference to a tensor with the numbers of an array."""
        found = self._known.get(_key(array))
        shape = list(array.shape)
        if found is not None and np.array_equal(found[2].reshape(-1), array.reshape(-1)):
            name, transposed, _ = found
            return {"tensor": name, "shape": shape} | ({"transposed": True} if transposed else {})
        name = f"{GRAPH_TENSOR}{len(self.own)}"
        self.own[name] = torch.from_numpy(np.ascontiguousarray(array))
        self._known[_key(array)] = (name, False, array)
        return {"tensor": name, "shape": shape}

    def unfolded(self, node: Convolution) -> dict[str, Any] | None:
        """Return a reference to the weight that a BatchNorm was folded into; None if unknown."""
        assert node.folded is not None
        if not np.array_equal(node.folded.of(node.weight)[1], node.bias):
            return None
        for name, array in self._by_size.get(node.weight.size, ()):
            if len(array) != len(node.weight):
                continue
            with np.errstate(all="ignore"):
                weight = node.folded.of(array.reshape(node.weight.shape))[0].astype(np.float32)
            if np.array_equal(weight, node.weight):
                return {"tensor": name, "shape": list(node.weight.shape)}
        return None


def _key(array: Any) -> tuple[int, int]:
    """Return a key that is equal for arrays of equal numbers; -0.0 equals 0.0."""
    plain = np.ascontiguousarray(array)
    plain = plain + np.float32(0) if plain.dtype == np.float32 else plain
    return plain.size, zlib.crc32(plain.reshape(-1).view(np.uint8).data)


def _with_plain_symbols(made: dict[str, Any]) -> dict[str, Any]:
    """Rename the sizes that may vary, whose names PyTorch chooses, to N, N1, N2, …"""
    names: dict[str, str] = {}

    def rename(text: str) -> str:
        return _SYMBOL.sub(
            lambda m: names.setdefault(m[0], f"N{len(names)}" if names else "N"), text
        )

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: sized(v) if k in ("leading", "shape") else walk(v) for k, v in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    def sized(value: Any) -> Any:
        if isinstance(value, list):
            return [sized(item) for item in value]
        return rename(value) if isinstance(value, str) else value

    return {
        "inputs": walk(made["inputs"]),
        "nodes": walk(made["nodes"]),
        "outputs": made["outputs"],
    }
