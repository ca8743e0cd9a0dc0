"""Entropy coding of small integers: exact for any symbols, near the entropy, and checked."""

from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from probmask.errors import ArtifactError
from probmask.storage.entropy_coding import Cursor, decode_symbols, encode_symbols
from reference.artifact_reader import from_block

SYMBOLS = arrays.arrays(
    np.uint8,
    st.integers(1, 3000),
    elements=st.one_of(st.integers(0, 255), st.integers(0, 3), st.just(255)),
)


def decoded(block, count):
    cursor = Cursor(block)
    symbols = decode_symbols(cursor, count)
    cursor.finish()
    return symbols


def skewed(count, seed=0):
    """Return symbols like the magnitudes of trained weights: none is small, few are large."""
    generator = np.random.default_rng(seed)
    return np.clip(np.abs(40 + 25 * generator.standard_normal(count)), 0, 126).astype(np.uint8)


def entropy_bytes(symbols):
    counts = np.bincount(symbols)
    shares = counts[counts > 0] / symbols.size
    return symbols.size * float(-(shares * np.log2(shares)).sum()) / 8


@settings(max_examples=200, deadline=None)
@given(SYMBOLS)
def test_any_symbols_are_decoded(symbols):
    assert np.array_equal(decoded(encode_symbols(symbols), symbols.size), symbols)


@settings(max_examples=50, deadline=None)
@given(arrays.arrays(np.uint8, st.integers(1, 40)))
def test_the_slow_reader_agrees(symbols):
    source = BytesIO(encode_symbols(symbols).tobytes())
    assert from_block(source, symbols.size) == symbols.tolist()
    assert source.read() == b""


@pytest.mark.parametrize("count", [2000, 1 << 15, (1 << 15) + 77, 100_001])
def test_one_lane_and_many(count):
    """From 2**15 symbols on, there are many lanes."""
    symbols = skewed(count)
    block = encode_symbols(symbols)
    assert np.array_equal(decoded(block, count), symbols)
    if count < 40_000:
        assert from_block(BytesIO(block.tobytes()), count) == symbols.tolist()


@pytest.mark.parametrize(("count", "limit"), [(300, 1.16), (3000, 1.02), (30_000, 1.01)])
def test_the_size_is_near_the_entropy(count, limit):
    symbols = skewed(count)
    assert encode_symbols(symbols).size < limit * entropy_bytes(symbols)
    assert encode_symbols(symbols).size < 2 + count  # never more than plain bytes


def test_rare_symbols_keep_a_frequency():
    symbols = np.concatenate([np.zeros(100_000, np.uint8), np.arange(256, dtype=np.uint8)])
    assert np.array_equal(decoded(encode_symbols(symbols), symbols.size), symbols)


@pytest.mark.parametrize("count", [500, 1 << 15])
def test_a_changed_byte_raises_or_gives_other_symbols(count):
    """A forged block has no checksum: nothing but `ArtifactError` may be raised."""
    block, generator = encode_symbols(skewed(count)), np.random.default_rng(1)
    refused = 0
    for at in [*range(40), *generator.integers(0, block.size, 200)]:
        forged = block.copy()
        forged[at] = generator.integers(256)
        try:
            symbols = decoded(forged, count)
        except ArtifactError:
            refused += 1
        else:
            assert symbols.size == count
    assert refused > 50


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ([], "ends too early"),
        ([9, 0], "has 9 low bits, more than 8"),
        ([7, 2], "symbols of more than 8 bits"),
        ([0, 1, 1, 1], "add up to 2, not 4096"),
        ([0, 1, 255, 255, 255, 255, 1], "more than four bytes"),
        ([0, 1, 255, 31, 1, 13], r"2\*\*13 lanes"),
        ([0, 1, 255, 31, 1, 0, 255, 255, 0, 0, 0], "a state of the coded integers is too small"),
        ([0, 1, 255, 31, 1, 0, 0, 0, 1, 0, 1], "ends too early"),
        ([0, 1, 255, 31, 1, 0, 255, 15, 1, 0, 0], "words of the coded integers end too early"),
        ([0, 1, 255, 31, 1, 0, 0, 0, 1, 0, 1, 0, 0], "do not end in the states"),
    ],
)
def test_an_invalid_block_raises(block, reason):
    with pytest.raises(ArtifactError, match=reason):
        decoded(np.array(block, dtype=np.uint8), 1)


def test_bytes_after_the_block_raise():
    block = encode_symbols(skewed(100))
    with pytest.raises(ArtifactError, match="1 bytes too many"):
        decoded(np.append(block, np.uint8(0)), 100)
