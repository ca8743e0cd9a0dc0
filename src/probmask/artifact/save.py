"""Saving a finished network to one file, exactly or with rounded weights."""

import copy
import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from probmask.artifact.rounding import ROUNDINGS, may_be_rounded, round_tensors
from probmask.artifact.tensors import DTYPE_NAMES, encode, shared_names
from probmask.checks import check_choice, is_number
from probmask.errors import InputError
from probmask.files import writable_target, write_atomically
from probmask.masking.parametrization import masked_parameters
from probmask.masking.sharding import is_dtensor
from probmask.masking.sites import check_not_pruned_by_torch
from probmask.masking.zeros import warn_if_filled
from probmask.storage.format import (
    FORMAT_KEY,
    MAX_TABLE_BYTES,
    RESERVED,
    TABLE,
    WIDTHS,
    Bits,
    Entry,
    Header,
    Part,
    Stored,
    StoredGraph,
    checksum,
    is_name,
    pack,
    raw,
)
from probmask.storage.integers import INTEGERS
from probmask.storage.reader import ArtifactInfo, read

Model = TypeVar("Model", bound=nn.Module)

_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors readers
# Suffixes of files that other programs write and `torch.load` or ONNX Runtime read.
_OTHER_FORMATS = (".bin", ".ckpt", ".onnx", ".pickle", ".pkl", ".pt", ".pth")


def save(
    model: Model,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    values: str | None = None,
    measure: Callable[[Model], float] | None = None,
    graph: bool = False,
    example: Any = None,
    overwrite: bool = False,
) -> ArtifactInfo:
    """Write the parameters and persistent buffers of a model to one compact safetensors file.

    Zeros are not stored; -0.0 is a zero and is loaded as 0.0. Equal models and metadata give equal
    bytes. The file is written in one step: a crash leaves the old file or the new one.

    Args:
        model: A plain model. Call ``finalize()`` on the sparsifier first.
        path: The file to write, with the suffix ``.safetensors``.
        metadata: Any JSON to store in the file.
        values: How to store fp32 and fp64 weights (tensors of two dimensions or more). They are
            loaded in their original dtype, rounded. ``"fp16"`` rounds them to fp16. ``"int8"``
            (``"int7"`` to ``"int2"``) rounds them to integers of that many bits times one scale per
            output channel, and other tensors to fp16; what `probmask.quantize` has trained is
            stored exactly. Default: exact values.
        measure: Called with the model and with a rounded copy, to return a number such as an
            accuracy. Both results are stored in the file. Only with ``values``.
        graph: Also store the graph of the network, so that `probmask.runtime.load` can run it
            without PyTorch and without the model's code. Needs ``example`` and Numba.
        example: An input, or a tuple of inputs, as tensors or arrays, for ``graph``. Their sizes
            are those that the graph takes; the batch size may differ if the model allows it.
        overwrite: Replace an existing file.

    Returns:
        The header of the new file, as `probmask.read` returns it. Its ``rounding`` contains the
        rounding errors and the results of ``measure``.

    Raises:
        InputError: The model still has masks or contains what the format cannot store, an
            argument is invalid, the file exists and ``overwrite`` is False, or ``graph`` is True
            and an operation of the network has no kernel.

    Warns:
        UserWarning: The suffix of ``path`` is that of another format, such as ``.pt``.
        RefilledWeightsWarning: Pruned weights have become nonzero, as by merged adapters.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch, probmask
        >>> model = torch.nn.Linear(1000, 100)
        >>> with torch.no_grad():
        ...     model.weight[:, 20:] = 0.0
        >>> with TemporaryDirectory() as folder:
        ...     info = probmask.save(model, f"{folder}/model.safetensors", metadata={"run": 3})
        >>> info.tensors[0].nnz, info.file_bytes < 0.03 * info.dense_bytes
        (2000, True)
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"save(model): got a value of type {type(model).__name__}; pass the network, "
            "an nn.Module."
        )
    _check_finished(model)
    warn_if_filled("save", model)
    check_choice("save", "values", values, (None, *ROUNDINGS))
    if measure is not None and values is None:
        raise InputError("save(measure=...): nothing is rounded; pass values='int8' too.")
    if graph and example is None:
        raise InputError("save(graph=True): pass example=, an input or a tuple of inputs.")
    if example is not None and not graph:
        raise InputError("save(example=...): only a graph needs an example; pass graph=True too.")
    checked = _checked_metadata(metadata or {})
    writable_target(path, overwrite=overwrite)  # raises now, not after an hour of measuring
    _warn_of_misleading_suffix(path)
    tensors, aliases = _distinct(model.state_dict())
    stored, rounding = tensors, None
    if values is not None:
        stored, rounding = round_tensors(tensors, values)
        if measure is not None:
            rounding |= _measure_change(model, measure, stored)
    entries, parts = _encode(tensors, stored, values if values in INTEGERS else None)
    stored_graph, graph_parts = _graph(model, example, stored) if graph else (None, [])
    packed = pack([*parts, *graph_parts])
    crc32 = {key: checksum(packed[key].words) for key in sorted(packed)}
    header = Header(entries, aliases, crc32, checked, rounding, stored_graph)
    start, ordered = _serialize(header, packed)
    write_atomically(path, chain([start], map(raw, ordered)), overwrite=overwrite)
    return read(path)


def _graph(
    model: nn.Module, example: Any, stored: Mapping[str, Tensor]
) -> tuple[StoredGraph, list[tuple[Part, Bits]]]:
    """Return the graph of the model as stored, and the parts of the tensors that only it needs."""
    from probmask.runtime.portable.writing import graph_of  # imports Numba

    made = graph_of(model, example, stored)
    entries, parts = _encode(made.tensors, made.tensors, None)
    return StoredGraph(made.network, entries), parts


def _warn_of_misleading_suffix(path: str | os.PathLike[str]) -> None:
    """Warn only: an error after a long training could cost the network."""
    target = Path(path)
    if target.suffix.lower() in _OTHER_FORMATS:
        warnings.warn(
            f"save({str(path)!r}): this is a safetensors file, which torch.load cannot read; name "
            f"it {target.with_suffix('.safetensors').name}, and load it with probmask.load or "
            "probmask.load_into.",
            stacklevel=3,
        )


def _encode(
    tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor], integers: str | None
) -> tuple[list[Entry], list[tuple[Part, Bits]]]:
    """Return the table entries of `tensors`, and the parts with the values in `stored`.

    `integers` names the integers as which values are stored.
    """
    entries: list[Entry] = []
    parts: list[tuple[Part, Bits]] = []
    for name, tensor in stored.items():
        # If another tensor already has the name of one of the parts, store this one dense.
        free = not {name + ".values", name + ".positions"} & tensors.keys()
        plain = tensor.detach().cpu().resolve_conj().contiguous()
        dtype, weight = tensors[name].dtype, may_be_rounded(tensors[name])
        entry, content = encode(
            name, plain, dtype=dtype, sparse=free, values=integers if weight else None
        )
        entries.append(entry)
        parts += zip(entry.parts, content, strict=True)
    return entries, parts


def _check_finished(model: nn.Module) -> None:
    """Raise if a parameter is still masked, by probmask or by `torch.nn.utils.prune`."""
    check_not_pruned_by_torch("save", model)
    for name, _, _, _ in masked_parameters(model):
        raise InputError(
            f"save(model): {name} still has a mask; call finalize() on the sparsifier, or on the "
            "result of freeze_masks, first. To save a copy of the model, load its state_dict() "
            "into the original and finalize that."
        )
    for name, tensor in model.state_dict().items():
        if is_dtensor(tensor):
            raise InputError(
                f"save(model): {name} is sharded; gather the weights with "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
                "StateDictOptions(full_state_dict=True, cpu_offload=True)), load them into a plain "
                "model on one rank, and save that."
            )


def _checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with sorted keys, equal to what reading the file returns.

    Raise `InputError` if JSON cannot represent it.
    """
    try:
        plain = json.loads(json.dumps(dict(metadata), allow_nan=False, sort_keys=True))
        _require_text_keys(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"save(metadata=...): not plain JSON ({error}); use text keys, and text, finite "
            "numbers, booleans, None, lists and dicts as values."
        ) from error
    assert isinstance(plain, dict)
    return plain


def _require_text_keys(value: Any) -> None:
    """Raise for keys that are not text: `json.dumps` would convert them without a warning."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _require_text_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_text_keys(inner)


def _distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each distinct tensor by its first name, and the further names of tied ones."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for names in shared_names(state):
        tensors[names[0]] = _storable(names[0], state[names[0]])
        aliases |= dict.fromkeys(names[1:], names[0])
    return tensors, aliases


def _storable(name: str, value: Any) -> Tensor:
    """Return the value if the format can store it under this name; raise if not."""
    plain = isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta
    if not plain or value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
        raise InputError(
            f"save(model): {name} is {_kind(value)}, which the format cannot store; "
            "use plain, initialized tensors only."
        )
    if name == "__metadata__" or name.startswith(RESERVED):
        raise InputError(f"save(model): the file format reserves the name {name}; rename it.")
    if not is_name(name):
        raise InputError(f"save(model): the name {name!r} is not valid Unicode; rename it.")
    assert isinstance(value, Tensor)
    return value


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, not a tensor"
    if is_lazy(value) or value.is_meta:
        return f"a {type(value).__name__} without data"
    layout = "" if value.layout == torch.strided else f" of layout {value.layout}"
    return f"a {value.dtype} tensor{layout}"


def _measure_change(
    model: Model, measure: Callable[[Model], float], rounded: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the results of `measure` for the model and for a copy with rounded weights."""
    twin = copy.deepcopy(model)
    twin.load_state_dict(dict(rounded), strict=False)
    results = {"before": measure(model), "after": measure(twin)}
    for result in results.values():
        if not is_number(result):
            raise InputError(
                f"save(measure=...): returned {result!r:.80}; expected a finite number, "
                "such as an accuracy."
            )
    return results


def _serialize(header: Header, stored: Mapping[str, Stored]) -> tuple[bytes, list[Bits]]:
    """Return the safetensors header as bytes, and the arrays in the order in which they follow."""
    table = np.frombuffer(_compressed(header), dtype=np.uint8)
    everything = {**stored, TABLE: Stored("U8", table.shape, table)}
    # Wide dtypes first: each tensor then starts at a multiple of the width of its dtype.
    ordered = sorted(everything.items(), key=lambda kv: (-WIDTHS[kv[1].dtype], kv[0]))
    fields: dict[str, Any] = {"__metadata__": {FORMAT_KEY: header.version}}
    offset = 0
    for name, (dtype, shape, words) in ordered:
        end = offset + words.nbytes
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = _to_json(fields).encode()
    text += b" " * (-len(text) % 8)  # aligns the data
    _check_length("safetensors header", len(text), _MAX_HEADER_BYTES)
    return len(text).to_bytes(8, "little") + text, [tensor.words for _, tensor in ordered]


def _compressed(header: Header) -> bytes:
    fields: dict[str, Any] = {
        "created_by": header.created_by,
        "tensors": [_to_fields(entry) for entry in header.entries],
        "aliases": header.aliases,
        "crc32": header.crc32,
        "metadata": header.metadata,
    }
    if header.rounding is not None:
        fields["rounding"] = header.rounding
    if header.graph is not None:
        tensors = [_to_fields(entry) for entry in header.graph.entries]
        fields["graph"] = {"version": 1, "tensors": tensors, "network": header.graph.network}
    text = _to_json(fields).encode()
    _check_length("table", len(text), MAX_TABLE_BYTES)
    return zlib.compress(text, 9)


def _check_length(what: str, length: int, limit: int) -> None:
    if length > limit:
        raise InputError(
            f"save(model): the {what} has {length} bytes, and the limit is {limit}; "
            "put less into metadata."
        )


def _to_fields(entry: Entry) -> dict[str, Any]:
    """Return the fields of an entry without those that follow from others."""
    fields = dict(vars(entry))
    if entry.values == entry.dtype:
        del fields["values"]
    if entry.encoding == "dense":
        del fields["positions"]
    if not entry.has_integers:
        del fields["coded"]
    return fields


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
