"""Which parts share a stored tensor: each line of a safetensors header costs 80 bytes or so.

Parts of at least a page are stored under their own names. Smaller ones follow each other, in the
order of the table, in one stored tensor per dtype.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from probmask.artifact.format import DTYPES, Part, bits
from probmask.errors import ArtifactError

RESERVED = "probmask:"
PAGE = 4096


Shape: TypeAlias = tuple[str, tuple[int, ...]]  # dtype and sizes


class Place(NamedTuple):
    """Where a part lies: in the stored tensor `key`, all of it or, if packed, from `begin` on."""

    key: str
    begin: int | None


def pack(parts: Iterable[tuple[Part, Tensor]]) -> dict[str, Tensor]:
    """Return the stored tensors by their names in the file."""
    stored: dict[str, Tensor] = {}
    small: dict[str, list[Tensor]] = {}
    for part, tensor in parts:
        if tensor.nbytes < PAGE:
            small.setdefault(part.dtype, []).append(tensor)
        else:
            stored[part.name] = tensor
    for dtype, tensors in small.items():
        words = np.concatenate([bits(tensor) for tensor in tensors])
        stored[RESERVED + dtype] = torch.from_numpy(words).view(DTYPES[dtype])
    return stored


def locate(parts: Iterable[Part], stored: Mapping[str, Shape]) -> dict[str, Place]:
    """Return the place of every part by its name; what is stored must be just what they ask for."""
    places: dict[str, Place] = {}
    unclaimed = dict(stored)
    filled: Counter[str] = Counter()
    for part in parts:
        if part.name in places:
            raise ArtifactError(f"two parts go by the name {part.name!r:.90}")
        if part.name in unclaimed:
            places[part.name] = Place(part.name, None)
            _require_same(part.name, unclaimed.pop(part.name), (part.dtype, part.shape))
        else:
            pack_name = RESERVED + part.dtype
            places[part.name] = Place(pack_name, filled[pack_name])
            filled[pack_name] += part.numel
    for pack_name, count in filled.items():
        expected = (pack_name.removeprefix(RESERVED), (count,))
        _require_same(pack_name, unclaimed.pop(pack_name, None), expected)
    if unclaimed:
        raise ArtifactError(f"tensor {min(unclaimed)!r:.90}: the table does not know it")
    return places


def _require_same(key: str, found: Shape | None, expected: Shape) -> None:
    if found != expected:
        dtype, shape = expected
        raise ArtifactError(
            f"tensor {key!r:.90} is not there as the table says: {dtype}, shape {list(shape)!s:.60}"
        )
