"""Tensors of PyTorch as parts of a file, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from probmask.core.integer_grid import grid_of, kept_places, round_to_grid
from probmask.storage.encodings import ENCODINGS, Bytes, bit_planes, smallest
from probmask.storage.entropy_coding import encode_symbols
from probmask.storage.format import SPARSE_DTYPES, Bits, Entry
from probmask.storage.integers import INTEGERS
from probmask.storage.reader import Reader

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A sparse entry needs this many more bytes in the table than a dense one.
_SPARSE_ENTRY_BYTES = 16
_MAX_CODE = 255  # of a channel, relative to the lowest


def bits(tensor: Tensor) -> Bits:
    """Return the entries in row-major order as integers of the same width."""
    return tensor.reshape(-1).view(_WORDS[tensor.dtype.itemsize]).numpy()


def to_tensor(dtype: str, words: Bits) -> Tensor:
    """Return the tensor with these bits."""
    return torch.from_numpy(words).view(DTYPES[dtype])


def stored_tensor(artifact: Reader, name: str) -> Tensor:
    """Return one tensor of an open artifact, dense."""
    return to_tensor(artifact.entries[name].dtype, artifact.words(name))


def encode(
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    sparse: bool = True,
    values: str | None = None,
) -> tuple[Entry, list[Bits]]:
    """Return the table entry and the parts of a contiguous CPU tensor, in the fewest bytes.

    `dtype` is the dtype in the network, if the tensor has been rounded to another one.
    `sparse=False` forces the dense encoding. `values` names the integers to store the values as, if
    they are on a grid of that many bits.
    """
    tensor = _with_positive_zeros(tensor)
    stored, words = DTYPE_NAMES[tensor.dtype], bits(tensor)
    original, shape = DTYPE_NAMES[dtype or tensor.dtype], tuple(tensor.shape)
    if not sparse or stored not in SPARSE_DTYPES:
        nnz = int(np.count_nonzero(words))
        return Entry(name, original, shape, "dense", nnz, stored, 0), [words]
    indices = np.flatnonzero(words != 0)
    nnz = indices.size
    chosen, size = smallest(indices, words.size)
    stream = None if values is None else encode_integers(tensor, INTEGERS[values])
    if values is not None and stream is not None and stream.size < nnz * words.itemsize:
        if nnz == words.size:
            return Entry(name, original, shape, "dense", nnz, values, 0, stream.size), [stream]
        positions = ENCODINGS[chosen].encode(indices, words.size)
        entry = Entry(name, original, shape, chosen, nnz, values, positions.size, stream.size)
        return entry, [stream, positions]
    if size + _SPARSE_ENTRY_BYTES >= (words.size - nnz) * words.itemsize:
        return Entry(name, original, shape, "dense", nnz, stored, 0), [words]
    positions = ENCODINGS[chosen].encode(indices, words.size)
    entry = Entry(name, original, shape, chosen, nnz, stored, positions.size)
    return entry, [words[indices], positions]


def _with_positive_zeros(tensor: Tensor) -> Tensor:
    """Return the tensor with 0.0 for every -0.0, copied only if there is one.

    A negative weight times a mask of 0 is -0.0. Adding 0.0 would change the bits of some NaNs.
    """
    if tensor.is_complex():
        return torch.view_as_complex(_with_positive_zeros(torch.view_as_real(tensor)))
    if not tensor.is_floating_point():
        return tensor
    words = bits(tensor)
    negative = words == (1 << 7 if words.itemsize == 1 else np.iinfo(words.dtype).min)
    if not negative.any():
        return tensor
    positive = np.where(negative, words.dtype.type(0), words)
    return torch.from_numpy(positive).view(tensor.dtype).reshape(tensor.shape)


def encode_integers(tensor: Tensor, bits: int) -> Bytes | None:
    """Return the nonzero entries as a stream, or None if they are not on a grid of these bits."""
    places, counts = kept_places(tensor)
    weights = tensor.flatten()[places]
    if not weights.numel() or not bool(weights.isfinite().all()):
        return None
    codes, exact = grid_of(weights, counts, bits)
    base = int(codes.min())
    if not bool(exact.all()) or int(codes.max()) - base > _MAX_CODE:
        return None
    integers = round_to_grid(weights, codes, counts, bits).numpy()
    return np.concatenate(
        [
            np.frombuffer(np.array([base], dtype="<i2").tobytes(), dtype=np.uint8),
            encode_symbols((codes.numpy() - base).astype(np.uint8)),
            bit_planes((integers < 0).view(np.uint8), 1),
            encode_symbols((np.abs(integers) - 1).astype(np.uint8)),
        ]
    )


def shared_names(state: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of a state_dict in groups, one group for each distinct tensor.

    Tied weights have several names. The file stores them once and lists the others as aliases.
    """
    groups: dict[Any, list[str]] = {}
    for name, value in state.items():
        key: Any = name
        if isinstance(value, Tensor) and value.layout == torch.strided and not is_lazy(value):
            if value.is_meta:
                key = id(value)
            elif value.data_ptr():  # an empty tensor has no memory to share
                memory = (value.device, value.data_ptr())
                key = (*memory, value.dtype, value.shape, value.stride())
        groups.setdefault(key, []).append(name)
    return list(groups.values())
