"""Encodings of positions, compared with plain loops and with the entropy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probmask.errors import ArtifactError
from probmask.storage.encodings import ENCODINGS, MAX_RICE_WIDTH, smallest
from reference.artifact_reader import PLACES

N = 300


def indices_of(gaps):
    return np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1


def decoded_plainly(name, stream, nnz):
    """Return the indices decoded by the reader written from docs/format.md."""
    return PLACES[name](stream.tobytes(), nnz)


gap_lists = st.lists(
    st.integers(0, 3) | st.integers(250, 260) | st.integers(505, 515) | st.integers(0, 10**5),
    max_size=40,
)


@pytest.mark.parametrize("name", ENCODINGS)
@settings(max_examples=150, deadline=None)
@given(gaps=gap_lists, rest=st.integers(0, 20))
def test_encoded_positions_are_decoded_also_by_a_plain_loop(name, gaps, rest):
    indices, nnz = indices_of(gaps), len(gaps)
    n = int(indices[-1]) + 1 + rest if gaps else rest
    stream = ENCODINGS[name].encode(indices, n)
    assert stream.dtype == np.uint8
    assert stream.size == ENCODINGS[name].size(indices, n)
    assert ENCODINGS[name].decode(stream, n, nnz).tolist() == indices.tolist()
    if n < 20_000:
        assert decoded_plainly(name, stream, nnz) == indices.tolist()


def test_the_examples_of_the_format_page():
    indices = np.array([1, 6, 265])
    assert ENCODINGS["delta"].encode(indices, N).tolist() == [1, 4, 255, 3]
    assert ENCODINGS["rice"].encode(indices, N).tolist() == [5, 161, 0, 3, 4]


@pytest.mark.parametrize("name", ENCODINGS)
@settings(max_examples=300, deadline=None)
@given(stream=st.binary(max_size=60), n=st.integers(0, 2**40), nnz=st.integers(0, 100))
def test_any_bytes_decode_to_valid_positions_or_raise(name, stream, n, nnz):
    try:
        indices = ENCODINGS[name].decode(np.frombuffer(stream, dtype=np.uint8), n, nnz)
    except ArtifactError:
        return
    assert indices.size == nnz
    assert (np.diff(indices) > 0).all()
    assert not nnz or (indices[0] >= 0 and indices[-1] < n)
    assert decoded_plainly(name, np.frombuffer(stream, dtype=np.uint8), nnz) == indices.tolist()


@pytest.mark.parametrize("k", [0, 1, 24])
def test_every_width_of_a_rice_stream_is_decoded(k):
    low, high = [1 % 2**k, 0, (2**k) - 1], [0, 2, 1]
    bits = [low[i] >> j & 1 for j in range(k) for i in range(3)]
    bits += [0] * (-len(bits) % 8)
    unary = [1, 0, 0, 1, 0, 1, 0, 0]
    stream = np.concatenate([[k], np.packbits([*bits, *unary], bitorder="little")]).astype(np.uint8)
    gaps = [(h << k) + m for h, m in zip(high, low, strict=True)]
    assert ENCODINGS["rice"].decode(stream, 2**30, 3).tolist() == indices_of(gaps).tolist()
    assert decoded_plainly("rice", stream, 3) == indices_of(gaps).tolist()


def test_a_gap_of_more_bits_than_the_largest_width():
    indices = np.array([2 ** (MAX_RICE_WIDTH + 3)])
    stream = ENCODINGS["rice"].encode(indices, 2**40)
    assert stream.size < 8
    assert ENCODINGS["rice"].decode(stream, 2**40, 1).tolist() == indices.tolist()


def entropy_bytes(n, nnz):
    p = nnz / n
    return -n * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8


@pytest.mark.parametrize("density", [0.3, 0.1, 0.03, 0.01, 0.001, 0.0001])
def test_uniform_masks_come_close_to_the_entropy(density):
    indices = np.flatnonzero(np.random.default_rng(0).random(1_000_000) < density)
    _, size = smallest(indices, 1_000_000)
    assert size < 1.06 * entropy_bytes(1_000_000, indices.size) + 2


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("rows", [0.5, 0.1, 0.01])
def test_masks_with_empty_rows_stay_close_to_the_entropy(density, rows):
    """Weights kept in few rows, as in trained networks, take at most log2(n / nnz) + 2 bits."""
    rng, n = np.random.default_rng(0), 1_000_000
    alive = rng.random(1000) < rows
    indices = np.flatnonzero((rng.random((1000, 1000)) < density / rows) & alive[:, None])
    _, size = smallest(indices, n)
    assert 8 * size <= indices.size * (math.log2(n / indices.size) + 2.1) + 16
