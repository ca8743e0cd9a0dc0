"""Entropy coding of small integers: interleaved rANS, decoded in a few vector operations per step.

`docs/format.md` specifies the bytes. Each symbol is split into a high part, which is entropy-coded
with frequencies in the stream, and low bits in bit planes. The writer chooses the number of low
bits: with few symbols, a table of all frequencies would be larger than what it saves.

K lanes decode K symbols at a time. A lane costs about two bytes, so K is a small fraction of the
number of symbols. Short sequences have one lane, for which a plain loop is the fastest.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from probmask.errors import ArtifactError
from probmask.storage.encodings import Bytes, bit_planes, from_bit_planes, require

Symbols: TypeAlias = NDArray[np.uint8]
Frequencies: TypeAlias = NDArray[np.int64]
Numbers: TypeAlias = NDArray[np.uint64]

_PRECISION = 12  # frequencies add up to 2**12
_TOTAL = 1 << _PRECISION
_LOW = 1 << 16  # states are at least this, and words have 16 bits
_FULL = 32 - _PRECISION  # a state of frequency << 20 or more emits a word before it is encoded
_MAX_LANES_LOG = 12
_TOO_FEW_WORDS = "the words of the coded integers end too early"
_WRONG_END = "the coded integers do not end in the states they begin with"
_SYMBOLS_PER_LANE = 512
_MIN_SYMBOLS_FOR_LANES = 1 << 15


class Cursor:
    """A stream that is read from its start. Reading beyond its end raises `ArtifactError`."""

    def __init__(self, stream: Bytes) -> None:
        self._stream, self._at = stream, 0

    def take(self, count: int) -> Bytes:
        """Return the next bytes."""
        require(count <= self._stream.size - self._at, "the stream of its values ends too early")
        self._at += count
        return self._stream[self._at - count : self._at]

    def number(self) -> int:
        """Return the next number: 7 bits per byte, the lowest first, 128 added to all but the last.

        It has at most four bytes.
        """
        value = 0
        for shift in range(0, 28, 7):
            byte = int(self.take(1)[0])
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ArtifactError("a number in the stream of its values has more than four bytes")

    def finish(self) -> None:
        """Raise `ArtifactError` if bytes are left."""
        left = self._stream.size - self._at
        require(left == 0, f"the stream of its values has {left} bytes too many")


class _Model(NamedTuple):
    """How symbols are split, and the frequencies of the high parts; they add up to 4,096."""

    low_bits: int
    frequencies: Frequencies


def encode_symbols(symbols: Symbols) -> Bytes:
    """Return a block of bytes with at least one symbol, each below 256."""
    model = min(map(_model, [symbols] * 9, range(9)), key=lambda m: _estimated_size(symbols, m))
    high = symbols.astype(np.int64) >> model.low_bits
    alphabet = model.frequencies.size
    head = bytes([model.low_bits, alphabet - 1])
    planes = bit_planes(symbols, model.low_bits)
    if alphabet == 1:
        return _joined(head, planes)
    table = b"".join(map(_number, model.frequencies.tolist()))
    lanes_log = _lanes_log(symbols.size)
    states, words = _encode_lanes(high, model.frequencies, 1 << lanes_log)
    tail = states.astype("<u4").tobytes() + _number(words.size) + words.astype("<u2").tobytes()
    return _joined(head + table, planes, bytes([lanes_log]) + tail)


def decode_symbols(cursor: Cursor, count: int) -> Symbols:
    """Return the `count` symbols of the block at the cursor, or raise `ArtifactError`.

    The memory needed is proportional to `count`, which the caller must have bounded.
    """
    low_bits, last = cursor.take(2).tolist()
    require(low_bits <= 8, f"a block of integers has {low_bits} low bits, more than 8")
    require((last + 1) << low_bits <= 256, "a block of integers has symbols of more than 8 bits")
    frequencies = None
    if last:
        frequencies = np.array([cursor.number() for _ in range(last + 1)], dtype=np.int64)
        total = int(frequencies.sum())
        require(total == _TOTAL, f"the frequencies of integers add up to {total}, not {_TOTAL}")
    planes = cursor.take(-(-count * low_bits // 8))
    symbols = from_bit_planes(planes, count, low_bits).astype(np.uint8)
    if frequencies is not None:
        symbols |= _decode_lanes(cursor, frequencies, count) << np.uint8(low_bits)
    return symbols


def _model(symbols: Symbols, low_bits: int) -> _Model:
    counts = np.bincount(symbols.astype(np.int64) >> low_bits)
    return _Model(low_bits, _normalized(counts) if counts.size > 1 else np.array([_TOTAL]))


def _normalized(counts: Frequencies) -> Frequencies:
    """Return frequencies that add up to 4,096, at least 1 for every symbol that occurs."""
    frequencies = np.where(counts > 0, np.maximum(1, counts * _TOTAL // counts.sum()), 0)
    excess = int(frequencies.sum()) - _TOTAL
    while excess > 0:  # rare symbols were raised to 1: the most frequent ones pay for it
        largest = int(frequencies.argmax())
        paid = min(excess, max(1, int(frequencies[largest]) // 8))
        frequencies[largest] -= paid
        excess -= paid
    frequencies[int(frequencies.argmax())] -= excess
    return frequencies


def _estimated_size(symbols: Symbols, model: _Model) -> float:
    """Return the approximate number of bytes of the block."""
    planes = -(-symbols.size * model.low_bits // 8)
    if model.frequencies.size == 1:
        return 2 + planes
    counts = np.bincount(symbols.astype(np.int64) >> model.low_bits)
    used = counts > 0
    bits = float((counts[used] * (_PRECISION - np.log2(model.frequencies[used]))).sum())
    table = model.frequencies.size + int((model.frequencies >= 128).sum())
    return 2 + table + planes + 1 + (2 << _lanes_log(symbols.size)) + 2 + bits / 8


def _lanes_log(count: int) -> int:
    if count < _MIN_SYMBOLS_FOR_LANES:
        return 0
    return min(_MAX_LANES_LOG, (count // _SYMBOLS_PER_LANE).bit_length() - 1)


def _encode_lanes(
    symbols: NDArray[np.int64], frequencies: Frequencies, lanes: int
) -> tuple[Numbers, Numbers]:
    """Return the states and words from which `_decode_lanes` starts: it undoes these steps."""
    frequency = frequencies[symbols].astype(np.uint64)
    start = (np.cumsum(frequencies) - frequencies)[symbols].astype(np.uint64)
    if lanes == 1:
        return _encode_one_lane(frequency, start)
    states = np.full(lanes, _LOW, dtype=np.uint64)
    emitted = []
    for begin in reversed(range(0, symbols.size, lanes)):
        f = frequency[begin : begin + lanes]
        x = states[: f.size]
        full = x >= f << np.uint64(_FULL)
        emitted.append(x[full] & np.uint64(_LOW - 1))
        x[full] >>= np.uint64(16)
        x[:] = ((x // f) << np.uint64(_PRECISION)) + x % f + start[begin : begin + lanes]
    return states, np.concatenate(emitted[::-1])


def _encode_one_lane(frequency: Numbers, start: Numbers) -> tuple[Numbers, Numbers]:
    x, emitted = _LOW, []
    for f, first in zip(frequency[::-1].tolist(), start[::-1].tolist(), strict=True):
        if x >= f << _FULL:
            emitted.append(x & (_LOW - 1))
            x >>= 16
        x = ((x // f) << _PRECISION) + x % f + first
    return np.array([x], dtype=np.uint64), np.array(emitted[::-1], dtype=np.uint64)


def _decode_lanes(cursor: Cursor, frequencies: Frequencies, count: int) -> Symbols:
    """Return `count` symbols. Symbol i is decoded by lane i mod K."""
    lanes_log = int(cursor.take(1)[0])
    require(lanes_log <= _MAX_LANES_LOG, f"a block of integers has 2**{lanes_log} lanes")
    states = np.frombuffer(cursor.take(4 << lanes_log).tobytes(), dtype="<u4").astype(np.uint64)
    require(bool((states >= _LOW).all()), "a state of the coded integers is too small")
    words = np.frombuffer(cursor.take(2 * cursor.number()).tobytes(), dtype="<u2").astype(np.uint64)
    symbol_of = np.repeat(np.arange(frequencies.size, dtype=np.uint8), frequencies)
    offset = np.arange(_TOTAL) - (np.cumsum(frequencies) - frequencies)[symbol_of]
    slots = _Slots(symbol_of, frequencies[symbol_of].astype(np.uint64), offset.astype(np.uint64))
    decode = _in_one_lane if states.size == 1 else _in_many_lanes
    return decode(slots, states, words, count)


class _Slots(NamedTuple):
    """For the lowest 12 bits of a state: the symbol, its frequency, and the offset within it."""

    symbol: Symbols
    frequency: Numbers
    offset: Numbers


def _in_many_lanes(slots: _Slots, states: Numbers, words: Numbers, count: int) -> Symbols:
    symbols = np.empty(count, dtype=np.uint8)
    used = 0
    for begin in range(0, count, states.size):
        x = states[: count - begin]
        slot = x & np.uint64(_TOTAL - 1)
        symbols[begin : begin + states.size] = slots.symbol[slot]
        x[:] = slots.frequency[slot] * (x >> np.uint64(_PRECISION)) + slots.offset[slot]
        low = np.flatnonzero(x < _LOW)
        require(used + low.size <= words.size, _TOO_FEW_WORDS)
        x[low] = (x[low] << np.uint64(16)) | words[used : used + low.size]
        used += low.size
    require(used == words.size and bool((states == _LOW).all()), _WRONG_END)
    return symbols


def _in_one_lane(slots: _Slots, states: Numbers, words: Numbers, count: int) -> Symbols:
    """Return the same as `_in_many_lanes`, several times faster if there is only one lane."""
    frequency, offset = slots.frequency.tolist(), slots.offset.tolist()
    x, following, found = int(states[0]), iter(words.tolist()), []
    for _ in range(count):
        slot = x & (_TOTAL - 1)
        found.append(slot)
        x = frequency[slot] * (x >> _PRECISION) + offset[slot]
        if x < _LOW:
            word = next(following, None)
            if word is None:
                raise ArtifactError(_TOO_FEW_WORDS)
            x = x << 16 | word
    require(next(following, None) is None and x == _LOW, _WRONG_END)
    return slots.symbol[np.array(found, dtype=np.int64)]


def _number(value: int) -> bytes:
    """Return what `Cursor.number` reads."""
    low = []
    while value >= 128:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])


def _joined(*pieces: bytes | Bytes) -> Bytes:
    return np.concatenate([np.frombuffer(bytes(piece), dtype=np.uint8) for piece in pieces])
