"""Tensors survive a round trip, all but the sign of zero; files are small and valid safetensors."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from probmask import artifact
from probmask.artifact.tensors import DTYPES, encode, to_tensor
from probmask.storage.format import MIN_UNPACKED_BYTES, decode
from reference.artifact_reader import read_artifact

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (8,), (1000,), (16, 3, 3, 3), (40, 50), (1, 4097)]


class Bag(nn.Module):
    """A model of named buffers."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def raw(tensor: Tensor) -> bytes:
    if not tensor.numel():  # PyTorch cannot view an empty tensor from NumPy
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def expected(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor that was saved and loaded: -0.0 has become 0.0."""
    return raw(torch.where(tensor == 0, torch.zeros((), dtype=tensor.dtype), tensor))


def sample(shape: tuple[int, ...], density: float, dtype: torch.dtype, seed: int) -> Tensor:
    """Return numbers, NaNs, infinities and negative zeros among zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(math.prod(shape))
    for special in (-0.0, math.nan, math.inf, -math.inf):
        values[rng.random(values.size) < 0.05] = special
    values[rng.random(values.size) >= density] = 0.0
    return torch.from_numpy(values).to(dtype).reshape(shape)


tensors = st.builds(
    sample,
    st.sampled_from(SHAPES),
    st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 0.9, 1.0]),
    st.sampled_from(FLOATS),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=300, deadline=None)
@given(tensors)
def test_a_decoded_tensor_equals_the_encoded_one(tensor):
    entry, parts = encode("t", tensor)
    back = to_tensor(entry.dtype, decode(entry, parts))
    assert (back.shape, back.dtype, raw(back)) == (tensor.shape, tensor.dtype, expected(tensor))
    assert entry.nnz == int(tensor.count_nonzero())
    assert sum(part.nbytes for part in parts) == entry.stored_bytes <= tensor.nbytes


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors, max_size=4), st.dictionaries(st.text(), st.integers() | st.text()))
def test_a_file_is_read_alike_by_probmask_and_by_the_reference_reader(
    tmp_path_factory, values, metadata
):
    path = tmp_path_factory.mktemp("artifact") / "model.safetensors"
    state = {f"t{i}": value for i, value in enumerate(values)}
    artifact.save(Bag(state), path, metadata=metadata)
    assert artifact.read(path).metadata == metadata
    back, (plain, notes) = artifact.load_state(path), read_artifact(path)
    assert back.keys() == plain.keys() == state.keys()
    assert notes == metadata
    for name, tensor in state.items():
        dtype, shape, content = plain[name]
        assert DTYPES[dtype] == back[name].dtype == tensor.dtype
        assert tuple(shape) == back[name].shape == tensor.shape
        assert content == raw(back[name]) == expected(tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_survives(tmp_path, dtype):
    tensor = torch.tensor([0, 1, 0, 1] * 50).to(dtype)
    artifact.save(Bag({"t": tensor}), tmp_path / "m")
    back = artifact.load_state(tmp_path / "m")["t"]
    assert (back.dtype, raw(back)) == (dtype, raw(tensor))
    assert read_artifact(tmp_path / "m")[0]["t"][2] == raw(tensor)
    assert artifact.read(tmp_path / "m").tensors[0].nnz == 100


@pytest.mark.parametrize(
    "dtype", [d for d in DTYPES.values() if (d.is_floating_point or d.is_complex)], ids=str
)
def test_negative_zeros_of_every_dtype_are_zeros(tmp_path, dtype):
    tensor = torch.tensor([-0.0, -1.0] * 100).to(dtype)
    assert any(raw(tensor[:1]))
    artifact.save(Bag({"t": tensor}), tmp_path / "m")
    assert artifact.read(tmp_path / "m").tensors[0].nnz == 100
    assert not any(raw(artifact.load_state(tmp_path / "m")["t"][::2]))


def test_only_floating_tensors_are_stored_sparse(tmp_path):
    zeros = torch.zeros(5000)
    artifact.save(Bag({"whole": zeros.long(), "real": zeros}), tmp_path / "m")
    rows = {row.name: row.encoding for row in artifact.read(tmp_path / "m").tensors}
    assert rows == {"whole": "dense", "real": "delta"}


def test_a_strided_tensor_is_stored_in_row_major_order(tmp_path):
    tensor = sample((8, 4, 5, 5), 0.2, torch.float32, 0).to(memory_format=torch.channels_last)
    artifact.save(Bag({"t": tensor, "u": tensor[::2, 1]}), tmp_path / "m")
    back = artifact.load_state(tmp_path / "m")
    assert raw(back["t"]) == expected(tensor)
    assert raw(back["u"]) == expected(tensor[::2, 1])


@pytest.mark.parametrize(
    ("density", "encoding"),
    [(1.0, "dense"), (0.9, "bitmap"), (0.5, "bitmap"), (0.1, "rice"), (0.001, "rice")],
)
def test_the_smallest_encoding_wins(density, encoding):
    tensor = (torch.rand(64, 1000, generator=torch.Generator().manual_seed(0)) < density).float()
    assert encode("t", tensor)[0].encoding == encoding


def test_a_tensor_stays_dense_if_the_table_would_grow_more_than_it_shrinks():
    tensor = torch.ones(20)
    tensor[3:7] = 0.0
    assert encode("t", tensor)[0].encoding == "dense"


def test_special_values_keep_their_bits(tmp_path):
    """Subnormal numbers, NaNs with a payload, signalling NaNs, infinities."""
    words = [0x7F800000, 0x00000001, 0x807FFFFF, 0x7FC12345, 0xFFC00001, 0x7F800001, 0xFF800000]
    for n in (7, 4000):
        tensor = torch.zeros(n, dtype=torch.int32)
        tensor[:7] = torch.tensor(words, dtype=torch.int64).to(torch.int32)
        path = tmp_path / f"m{n}"
        artifact.save(Bag({"t": tensor.view(torch.float32)}), path)
        assert torch.equal(artifact.load_state(path)["t"].view(torch.int32), tensor)
        model = artifact.load_into(Bag({"t": torch.zeros(n)}), path)
        assert torch.equal(model.t.view(torch.int32), tensor)


def test_any_safetensors_reader_opens_the_file(tmp_path):
    large = torch.arange(5000.0) + 1
    tensors = {"t": sample((90_000,), 0.1, torch.float32, 1), "d": torch.ones(3), "large": large}
    artifact.save(Bag(tensors), tmp_path / "m")
    with safe_open(tmp_path / "m", framework="np") as file:
        own = {"large", "t.values", "t.positions"}
        assert set(file.keys()) == own | {"probmask:F32", "probmask:table"}
        assert file.get_tensor("large").tolist() == large.tolist()
        assert file.get_tensor("probmask:F32").tolist() == [1, 1, 1]
        assert file.metadata() == {"probmask": "1"}


def test_large_dense_tensors_are_mapped_and_all_are_aligned(tmp_path):
    wide, odd = (
        torch.randn(MIN_UNPACKED_BYTES),
        torch.randint(1, 9, (MIN_UNPACKED_BYTES + 1,), dtype=torch.int8),
    )
    tensors = {"odd": odd, "wide": wide, "few": torch.ones(3), "wider": wide.double()}
    artifact.save(Bag(tensors), tmp_path / "m")
    state = artifact.load_state(tmp_path / "m")
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / "m"))
    ]
    for name, tensor in state.items():
        assert tensor.data_ptr() % tensor.itemsize == 0
        mapped = any(begin <= tensor.data_ptr() < end for begin, end in ranges)
        assert mapped == (name != "few"), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes  # it keeps no other memory alive


@pytest.mark.parametrize("density", [0.1, 0.05, 0.02, 0.01, 0.001])
def test_a_file_is_within_5_percent_of_the_entropy(tmp_path, density):
    """The bound: 4 bytes for each value, n H(nnz / n) bits for the positions."""
    tensors, bound = {}, 0.0
    for index in range(20):
        tensor = sample((100, 1000), density, torch.float32, index)
        n, nnz = tensor.numel(), int(tensor.count_nonzero())
        p = nnz / n
        bound += 4 * nnz - n * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8
        tensors[f"t{index}"] = tensor
    assert artifact.save(Bag(tensors), tmp_path / "m").file_bytes < 1.05 * bound + 1000
