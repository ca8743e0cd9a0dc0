"""A network as JSON: inputs, nodes and outputs. `docs/format.md` specifies it."""

from typing import Any

import numpy as np

from probmask.errors import ArtifactError
from probmask.runtime.lower.nodes import Network
from probmask.runtime.portable.node_checks import CHECKS, check_network
from probmask.runtime.portable.node_fields import node_from_json
from probmask.runtime.portable.numpy_calls import numpy_call
from probmask.runtime.portable.outputs import OutputTree
from probmask.storage.encodings import require
from probmask.storage.reader import Reader

# The kinds of nodes that can be stored: those that can be checked.
KINDS = {kind.__name__: kind for kind in CHECKS}
_FLOATS = {"F32": np.float32, "F64": np.float64, "F16": np.float16}


def read_network(artifact: Reader) -> Network:
    """Return the network of an open artifact, or raise `ArtifactError`."""
    fields = artifact.network
    if fields is None:
        raise ArtifactError(
            "the file has no graph; save the network with probmask.save(..., graph=True, "
            "example=...), or export it with probmask export --format graph."
        )
    tensors = _Tensors(artifact)
    nodes = _list(fields, "nodes")
    inputs = [_input(item) for item in _list(fields, "inputs")]
    tree = OutputTree(fields.get("outputs"))
    network = Network(
        nodes=[node_from_json(node, KINDS, tensors.resolve) for node in nodes],
        inputs=tuple(name for name, _, _ in inputs),
        outputs=tuple(dict.fromkeys(tree.names)),
        pack_outputs=tree,
        changed_inputs={},
        input_shapes=tuple(shape for _, shape, _ in inputs),
        input_dtypes=tuple(dtype for _, _, dtype in inputs),
    )
    check_network(network)
    for node in network.nodes:
        call = numpy_call(node)
        if call is not None:
            node.call = call
    return network


def _list(fields: dict[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    require(isinstance(value, list), f"the graph has no valid {key!r}")
    assert isinstance(value, list)
    return value


def _input(item: Any) -> tuple[str, tuple[int | str, ...], str]:
    require(isinstance(item, dict), "an input is not an object")
    name, shape, dtype = (item.get(key) for key in ("name", "shape", "dtype"))
    require(isinstance(name, str) and bool(name), "an input has no name")
    require(isinstance(dtype, str), f"input {name!r:.80}: it has no dtype")
    sized = isinstance(shape, list) and len(shape) <= 16
    sized = sized and all(type(n) in (int, str) and len(str(n)[:100]) < 100 for n in shape)
    require(sized, f"input {name!r:.80}: it has no valid shape")
    return name, tuple(shape), dtype


class _Tensors:
    """The arrays that a graph refers to."""

    def __init__(self, artifact: Reader) -> None:
        self._artifact = artifact
        self._aliases = artifact.info.aliases
        self._read: dict[str, Any] = {}

    def resolve(self, reference: Any) -> Any:
        """Return the array of a reference: a tensor of the file, in another shape."""
        require(isinstance(reference, dict), "a reference to a tensor is not an object")
        name, shape = reference.get("tensor"), reference.get("shape")
        stored = self._aliases.get(name, name) if isinstance(name, str) else None
        known = stored is not None and stored in self._artifact.entries
        require(known, f"the graph refers to a tensor {name!r:.80} that the file does not have")
        sizes = isinstance(shape, list) and len(shape) <= 16
        sizes = sizes and all(type(n) is int and 0 <= n <= 2**40 for n in shape)
        require(sizes, f"the graph refers to {name!r:.80} with the shape {shape!r:.60}")
        assert stored is not None
        array = self._array(stored)
        if reference.get("transposed", False):
            require(array.ndim == 2, f"{name!r:.80} is not a matrix that can be transposed")
            array = array.T
        fits = array.size == int(np.prod(shape, dtype=object))
        require(fits, f"{name!r:.80} does not have the shape {shape!r:.60}")
        return np.ascontiguousarray(array).reshape(shape)

    def _array(self, name: str) -> Any:
        if name not in self._read:
            dtype = self._artifact.entries[name].dtype
            words = self._artifact.words(name)
            if dtype == "I64":
                self._read[name] = words
            else:
                require(dtype in _FLOATS, f"the graph refers to {name!r:.80}, which is {dtype}")
                with np.errstate(over="ignore", invalid="ignore"):
                    self._read[name] = words.view(_FLOATS[dtype]).astype(np.float32)
        return self._read[name]
