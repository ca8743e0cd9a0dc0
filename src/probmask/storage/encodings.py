"""Encodings of the positions of a tensor's non-zero entries as bytes, one class per encoding.

`delta` and `rice` store *gaps*: the number of zeros before the first non-zero entry and between
consecutive non-zero entries. `docs/format.md` specifies the bytes. The comments here give the
reasons.
"""

from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from probmask.errors import ArtifactError

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]

ESCAPE = 255
# Largest k: the gaps of real networks need fewer bits, and sums of wider gaps could overflow.
MAX_RICE_WIDTH = 24


class Encoding(Protocol):
    """A way to store increasing indices below `n`."""

    def size(self, indices: Indices, n: int) -> int:
        """Return the number of bytes that `encode` returns."""
        ...

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return the indices as bytes."""
        ...

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return exactly `nnz` increasing indices below `n`, or raise `ArtifactError`.

        The memory needed is proportional to `nnz` and to the number of bytes, never to `n` alone.
        """
        ...


class Bitmap:
    """One bit per entry. The smallest encoding if about half of the entries are non-zero."""

    def size(self, indices: Indices, n: int) -> int:
        """Return the number of bytes that `encode` returns."""
        return -(-n // 8)

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return ceil(n / 8) bytes, least significant bit first."""
        return _bits_set_at(indices, n)

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return the indices of the bits that are set."""
        fits = stream.size == -(-n // 8)
        require(fits, f"a bitmap of {stream.size} bytes does not fit {n} entries")
        indices = _set_bits(stream)
        require(indices.size == nnz, f"nnz is {nnz}, but the bitmap has {indices.size} bits set")
        return _checked_range(indices, n)


class Delta:
    """One byte per gap, with escapes for long gaps. The simplest encoding to read."""

    def size(self, indices: Indices, n: int) -> int:
        """Return the number of bytes that `encode` returns."""
        return indices.size + int((_gaps(indices) // ESCAPE).sum())

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return each gap as gap // 255 escape bytes, followed by the byte gap % 255."""
        gaps = _gaps(indices)
        ends = np.cumsum(gaps // ESCAPE + 1) - 1
        stream = np.full(int(ends[-1]) + 1 if ends.size else 0, ESCAPE, dtype=np.uint8)
        stream[ends] = gaps % ESCAPE
        return stream

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return the cumulative sums at the bytes that are not escapes."""
        ends = np.flatnonzero(stream != ESCAPE)
        complete = ends.size == nnz and (not stream.size or stream[-1] != ESCAPE)
        require(complete, f"the delta stream does not contain nnz = {nnz} gaps")
        return _checked_range(np.cumsum(stream, dtype=np.int64)[ends] + np.arange(nnz), n)


class Rice:
    """The k low bits of each gap in binary, the rest in unary: near the entropy at any density.

    Low bits and unary parts are separate streams, so neither needs a loop over the gaps. The gaps
    add up to less than n. Any mask therefore takes at most about nnz * (log2(n / nnz) + 2) bits;
    the entropy of a uniformly random mask is about nnz * (log2(n / nnz) + 1.44) bits.
    """

    def size(self, indices: Indices, n: int) -> int:
        """Return the number of bytes that `encode` returns."""
        gaps = _gaps(indices)
        return _rice_bytes(gaps, _best_width(gaps))

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return one byte k, the k bit planes of the low bits, and the unary parts."""
        gaps = _gaps(indices)
        k = _best_width(gaps)
        planes = bit_planes(gaps, k)
        ends = np.cumsum((gaps >> k) + 1) - 1
        unary = _bits_set_at(ends, int(ends[-1]) + 1 if ends.size else 0)
        return np.concatenate([np.array([k], dtype=np.uint8), planes, unary])

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return the cumulative sums of the gaps."""
        require(stream.size > 0, "the rice stream is empty")
        k = int(stream[0])
        require(k <= MAX_RICE_WIDTH, f"the rice stream has k = {k}, more than {MAX_RICE_WIDTH}")
        split = 1 + -(-nnz * k // 8)
        require(split <= stream.size, f"the rice stream ends before its nnz = {nnz} gaps")
        unary = stream[split:]
        ends = _set_bits(unary)
        complete = ends.size == nnz and (not unary.size or unary[-1] != 0)
        require(complete, f"the rice stream does not contain nnz = {nnz} gaps")
        require(8 * unary.size - 8 - nnz < n >> k, f"the rice stream covers more than {n} entries")
        order = np.arange(nnz)
        indices = ((ends - order) << k) + order
        indices += np.cumsum(from_bit_planes(stream[1:split], nnz, k), dtype=np.int64)
        return _checked_range(indices, n)


# Ordered by decoding speed: of encodings of equal size, the first one is used.
ENCODINGS: dict[str, Encoding] = {"bitmap": Bitmap(), "delta": Delta(), "rice": Rice()}

_EMPTY: Bytes = np.empty(0, dtype=np.uint8)


def smallest(indices: Indices, n: int) -> tuple[str, int]:
    """Return the name of the encoding that needs the fewest bytes, and that number of bytes."""
    # With half of the entries or more, the gaps need more bits than a bitmap.
    names = ENCODINGS if 2 * indices.size < n else ("bitmap",)
    sizes = {name: ENCODINGS[name].size(indices, n) for name in names}
    name = min(sizes, key=lambda name: sizes[name])
    return name, sizes[name]


def require(condition: bool, reason: str) -> None:
    """Raise `ArtifactError` with the reason unless the condition holds."""
    if not condition:
        raise ArtifactError(reason)


def bit_planes(numbers: NDArray[Any], k: int) -> Bytes:
    """Return the k low bits of each number: bit 0 of all numbers, then bit 1 of all, ..."""
    low = [((numbers >> plane) & 1).astype(np.uint8) for plane in range(k)]
    return np.packbits(np.concatenate(low), bitorder="little") if low else _EMPTY


def from_bit_planes(stream: Bytes, count: int, k: int) -> NDArray[np.int32]:
    """Return the numbers whose k low bits `bit_planes` stored."""
    planes = np.unpackbits(stream, count=count * k, bitorder="little").reshape(k, count)
    low = np.zeros(count, dtype=np.int32)
    for plane, bits in enumerate(planes):
        low |= bits.astype(np.int32) << plane
    return low


def _gaps(indices: Indices) -> Indices:
    return np.diff(indices, prepend=-1) - 1


def _best_width(gaps: Indices) -> int:
    """Return the k that needs the fewest bytes. The size is a convex function of k."""
    mean = int(gaps.sum()) // max(1, gaps.size)
    guess = min(MAX_RICE_WIDTH, max(1, mean.bit_length() - 1))
    candidates = range(guess - 1, min(MAX_RICE_WIDTH, guess + 1) + 1)
    return min(candidates, key=lambda k: _rice_bytes(gaps, k))


def _rice_bytes(gaps: Indices, k: int) -> int:
    unary = gaps.size + int((gaps >> k).sum())
    return 1 + -(-gaps.size * k // 8) + -(-unary // 8)


def _bits_set_at(indices: Indices, count: int) -> Bytes:
    """Return `count` bits, padded to whole bytes, with those at `indices` set."""
    flags = np.zeros(count, dtype=np.uint8)
    flags[indices] = 1
    return np.packbits(flags, bitorder="little")


def _set_bits(stream: Bytes) -> Indices:
    """Return the indices of the bits that are set."""
    return np.flatnonzero(np.unpackbits(stream, bitorder="little").view(np.bool_))


def _checked_range(indices: Indices, n: int) -> Indices:
    """Return the increasing indices if they are below `n`. Checking the last one is enough."""
    if indices.size and indices[-1] >= n:
        raise ArtifactError(f"position {int(indices[-1])} is out of range for {n} entries")
    return indices
