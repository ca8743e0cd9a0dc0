"""Where the non-zeros of a tensor are, as bytes: one small class for each way to write it down.

Every encoding writes the *gaps*: the zeros before the first non-zero, and between each and the
next. `docs/format.md` specifies the bytes; the comments here say why they are so.
"""

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from probmask.errors import ArtifactError

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.int64]

ESCAPE = 255
# Wider remainders than any real gap asks for, and so narrow that no sum of them overflows.
WIDEST = 24


class Encoding(Protocol):
    """A way to write down increasing indices below `n`."""

    def size(self, indices: Indices, n: int) -> int:
        """Return how many bytes `encode` would give."""
        ...

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return the bytes."""
        ...

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return exactly `nnz` increasing indices below `n`, or refuse the bytes.

        What this allocates is in proportion to `nnz` and the bytes, never to `n` alone.
        """
        ...


class Bitmap:
    """One bit per entry: cannot be beaten where about every second entry is kept."""

    def size(self, indices: Indices, n: int) -> int:
        """Return how many bytes `encode` would give."""
        return -(-n // 8)

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return ceil(n / 8) bytes, least significant bit first."""
        return _bits_at(indices, n)

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return the places of the bits that are set."""
        _require(stream.size == -(-n // 8), f"a bitmap of {stream.size} bytes for {n} entries")
        indices = _places(stream)
        _require(indices.size == nnz, f"nnz is {nnz} but the bitmap has {indices.size} bits set")
        return _below(indices, n)


class Delta:
    """One byte per gap, with escapes: the simplest to read."""

    def size(self, indices: Indices, n: int) -> int:
        """Return how many bytes `encode` would give."""
        return indices.size + int((_gaps(indices) // ESCAPE).sum())

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return every gap as gap // 255 escapes and one byte, gap % 255."""
        gaps = _gaps(indices)
        ends = np.cumsum(gaps // ESCAPE + 1) - 1
        stream = np.full(int(ends[-1]) + 1 if ends.size else 0, ESCAPE, dtype=np.uint8)
        stream[ends] = gaps % ESCAPE
        return stream

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return the running sums at the bytes that are no escapes."""
        ends = np.flatnonzero(stream != ESCAPE)
        complete = ends.size == nnz and (not stream.size or stream[-1] != ESCAPE)
        _require(complete, f"the delta stream does not hold nnz = {nnz} gaps")
        return _below(np.cumsum(stream, dtype=np.int64)[ends] + np.arange(nnz), n)


class Rice:
    """A gap's k low bits as they are, the rest in unary: close to the entropy at any density.

    Low bits and unary parts are two streams, so that neither needs a loop over values. Because the
    gaps add up to less than n, no mask, however uneven, takes more than
    nnz * (log2(n / nnz) + 2) bits or so, where the entropy of an even one is nnz * (... + 1.44).
    """

    def size(self, indices: Indices, n: int) -> int:
        """Return how many bytes `encode` would give."""
        gaps = _gaps(indices)
        return _rice_bytes(gaps, _best_width(gaps))

    def encode(self, indices: Indices, n: int) -> Bytes:
        """Return one byte k, the k planes of low bits, and the unary parts."""
        gaps = _gaps(indices)
        k = _best_width(gaps)
        low = [((gaps >> plane) & 1).astype(np.uint8) for plane in range(k)]
        planes = np.packbits(np.concatenate(low), bitorder="little") if low else _EMPTY
        ends = np.cumsum((gaps >> k) + 1) - 1
        unary = _bits_at(ends, int(ends[-1]) + 1 if ends.size else 0)
        return np.concatenate([np.array([k], dtype=np.uint8), planes, unary])

    def decode(self, stream: Bytes, n: int, nnz: int) -> Indices:
        """Return the running sums of the gaps."""
        _require(stream.size > 0, "the rice stream is empty")
        k = int(stream[0])
        _require(k <= WIDEST, f"the rice stream has k = {k}, more than {WIDEST}")
        split = 1 + -(-nnz * k // 8)
        _require(split <= stream.size, f"the rice stream ends before its nnz = {nnz} gaps")
        unary = stream[split:]
        ends = _places(unary)
        complete = ends.size == nnz and (not unary.size or unary[-1] != 0)
        _require(complete, f"the rice stream does not hold nnz = {nnz} gaps")
        _require(8 * unary.size - 8 - nnz < n >> k, f"the rice stream covers more than {n} entries")
        each = np.arange(nnz)
        indices = ((ends - each) << k) + each
        indices += np.cumsum(_low_bits(stream[1:split], nnz, k), dtype=np.int64)
        return _below(indices, n)


# The order decides between equals: what is faster to read comes first.
ENCODINGS: dict[str, Encoding] = {"bitmap": Bitmap(), "delta": Delta(), "rice": Rice()}

_EMPTY: Bytes = np.empty(0, dtype=np.uint8)


def smallest(indices: Indices, n: int) -> tuple[str, int]:
    """Return the encoding with the fewest bytes, and how many."""
    # From half of the entries on, a gap costs more than the bits that it spans.
    names = ENCODINGS if 2 * indices.size < n else ("bitmap",)
    return min(((name, ENCODINGS[name].size(indices, n)) for name in names), key=lambda of: of[1])


def _gaps(indices: Indices) -> Indices:
    return np.diff(indices, prepend=-1) - 1


def _best_width(gaps: Indices) -> int:
    """Return the k with the fewest bytes; they are a convex function of it."""
    mean = int(gaps.sum()) // max(1, gaps.size)
    guess = min(WIDEST, max(1, mean.bit_length() - 1))
    return min(range(guess - 1, min(WIDEST, guess + 1) + 1), key=lambda k: _rice_bytes(gaps, k))


def _rice_bytes(gaps: Indices, k: int) -> int:
    unary = gaps.size + int((gaps >> k).sum())
    return 1 + -(-gaps.size * k // 8) + -(-unary // 8)


def _low_bits(stream: Bytes, count: int, k: int) -> NDArray[np.int32]:
    planes = np.unpackbits(stream, count=count * k, bitorder="little").reshape(k, count)
    low = np.zeros(count, dtype=np.int32)
    for plane, bits in enumerate(planes):
        low |= bits.astype(np.int32) << plane
    return low


def _bits_at(places: Indices, count: int) -> Bytes:
    """Return `count` bits, rounded up to bytes, of which those at `places` are set."""
    flags = np.zeros(count, dtype=np.uint8)
    flags[places] = 1
    return np.packbits(flags, bitorder="little")


def _places(stream: Bytes) -> Indices:
    return np.flatnonzero(np.unpackbits(stream, bitorder="little").view(np.bool_))


def _below(indices: Indices, n: int) -> Indices:
    """Return the increasing indices if the last, and so each, is one of the `n` entries."""
    if indices.size and indices[-1] >= n:
        raise ArtifactError(f"a position is {int(indices[-1])}, past the {n} entries")
    return indices


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise ArtifactError(reason)
