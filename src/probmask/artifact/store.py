"""Save a finished network to one file."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from probmask.artifact.format import DTYPE_NAMES, Entry, Part, encode, raw
from probmask.artifact.header import Header, checked_metadata, checksum, container, is_name
from probmask.artifact.packing import RESERVED, pack
from probmask.artifact.reader import ArtifactInfo
from probmask.artifact.restore import read
from probmask.artifact.rounding import measure_change, round_to_fp16
from probmask.artifact.ties import same_memory
from probmask.checks import check_choice
from probmask.errors import InputError
from probmask.files import writable_target, write_atomically

Model = TypeVar("Model", bound=nn.Module)


def save(
    model: Model,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, Any] | None = None,
    values: Literal["fp16"] | None = None,
    measure: Callable[[Model], float] | None = None,
    overwrite: bool = False,
) -> ArtifactInfo:
    """Write the parameters and persistent buffers of `model` to one safetensors file.

    `values="fp16"` stores fp32 and fp64 weights (what has two dimensions or more) in half the
    bytes; they come back as the dtype they had, rounded. The file and the result then tell the
    `rounding`, and, if `measure` is given, what it returned for the model before and after.

    Returns what `read` will. Equal models and metadata give equal bytes. An existing file is
    refused unless `overwrite`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"save(model): a {type(model).__name__}; pass the network, an nn.Module")
    _refuse_unfinished(model)
    check_choice("save", "values", values, (None, "fp16"))
    if measure is not None and values is None:
        raise InputError("save(measure=...): nothing is rounded; pass values='fp16' too.")
    notes = checked_metadata(metadata or {})
    writable_target(path, overwrite=overwrite)  # or say so before measuring for an hour
    tensors, aliases = _distinct(model.state_dict())
    stored, rounding = tensors, None
    if values is not None:
        stored, rounding = round_to_fp16(tensors)
        if measure is not None:
            rounding |= measure_change(model, measure, stored)
    entries, parts = _encode(tensors, stored)
    _warn_of_negative_zeros(entries, parts)
    packed = pack(parts)
    crc32 = {key: checksum(packed[key]) for key in sorted(packed)}
    start, ordered = container(Header(entries, aliases, crc32, notes, rounding), packed)
    write_atomically(path, chain([start], map(raw, ordered)), overwrite=overwrite)
    return read(path)


def _encode(
    tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor]
) -> tuple[list[Entry], list[tuple[Part, Tensor]]]:
    """Return the table of `tensors`, and the parts that hold them as they are in `stored`."""
    entries: list[Entry] = []
    parts: list[tuple[Part, Tensor]] = []
    for name, tensor in stored.items():
        # A name that the parts would take from another tensor leaves only the dense encoding.
        free = not {name + ".values", name + ".positions"} & tensors.keys()
        plain = tensor.detach().cpu().resolve_conj().contiguous()
        entry, content = encode(name, plain, dtype=tensors[name].dtype, sparse=free)
        entries.append(entry)
        parts += zip(entry.parts, content, strict=True)
    return entries, parts


def _warn_of_negative_zeros(entries: Iterable[Entry], parts: Iterable[tuple[Part, Tensor]]) -> None:
    """Say so if the zeros are in the file because they are no zeros, bit by bit."""
    sparse = {f"{entry.name}.values" for entry in entries if entry.encoding != "dense"}
    values = [tensor for part, tensor in parts if part.name in sparse]
    negative = sum(tensor.numel() - int(tensor.count_nonzero()) for tensor in values)
    if negative >= 100 and 10 * negative > sum(tensor.numel() for tensor in values):
        warnings.warn(
            f"save(model): {negative} weights are -0.0, as a negative weight times a mask of 0 is, "
            "and are stored like any value; to leave them out, add 0.0 to the weights first",
            stacklevel=3,
        )


def _refuse_unfinished(model: nn.Module) -> None:
    """Refuse masks that are still being learned; others' parametrizations are plain tensors."""
    package = __name__.partition(".")[0]
    for prefix, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        for name, steps in module.parametrizations.items():
            if any(type(step).__module__.partition(".")[0] == package for step in steps):
                where = f"{prefix}.{name}" if prefix else name
                raise InputError(
                    f"save(model): there is a mask on {where} still; call finalize() first, of the "
                    "sparsifier or of what freeze_masks gave; a copy has "
                    "none: load its state_dict() into the model that has, and finalize that."
                )


def _distinct(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, by its first name, and the other names of those shared."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for names in same_memory(state):
        tensors[names[0]] = _storable(names[0], state[names[0]])
        aliases |= dict.fromkeys(names[1:], names[0])
    return tensors, aliases


def _storable(name: str, value: Any) -> Tensor:
    plain = isinstance(value, Tensor) and not is_lazy(value) and not value.is_meta
    if not plain or value.layout != torch.strided or value.dtype not in DTYPE_NAMES:
        raise InputError(
            f"save(model): {name} is {_kind(value)}, which the format cannot hold; "
            "store plain initialised tensors only"
        )
    if name == "__metadata__" or name.startswith(RESERVED):
        raise InputError(f"save(model): the file format reserves the name {name}; rename it")
    if not is_name(name):
        raise InputError(f"save(model): the name {name!r} is not Unicode; rename it")
    assert isinstance(value, Tensor)
    return value


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, no tensor"
    if is_lazy(value) or value.is_meta:
        return f"a {type(value).__name__} without data"
    layout = "" if value.layout == torch.strided else f" of layout {value.layout}"
    return f"a {value.dtype} tensor{layout}"
