"""What goes in comes out, bit for bit, whatever it is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from probmask import artifact
from probmask.artifact.format import DTYPES, decode, encode
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
    if not tensor.numel():  # torch views no empty tensor that came from numpy
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


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
def test_a_tensor_survives_its_encoding(tensor):
    entry, parts = encode(tensor)
    back = decode(entry, parts)
    assert (back.shape, back.dtype, raw(back)) == (tensor.shape, tensor.dtype, raw(tensor))
    assert sum(part.nbytes for part in parts.values()) <= tensor.nbytes


@settings(max_examples=60, deadline=None)
@given(st.lists(tensors, max_size=4), st.dictionaries(st.text(), st.integers() | st.text()))
def test_a_file_gives_back_the_model_and_so_does_a_reader_written_from_the_page(
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
        assert content == raw(back[name]) == raw(tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_kept(tmp_path, dtype):
    tensor = torch.tensor([0, 1, 0, 1] * 50).to(dtype)
    artifact.save(Bag({"t": tensor}), tmp_path / "m")
    back = artifact.load_state(tmp_path / "m")["t"]
    assert (back.dtype, raw(back)) == (dtype, raw(tensor))
    assert read_artifact(tmp_path / "m")[0]["t"][2] == raw(tensor)
    assert artifact.read(tmp_path / "m").tensors[0].nnz == 100


def test_only_floating_tensors_are_stored_sparse(tmp_path):
    zeros = torch.zeros(5000)
    artifact.save(Bag({"whole": zeros.long(), "real": zeros}), tmp_path / "m")
    rows = {row.name: row.encoding for row in artifact.read(tmp_path / "m").tensors}
    assert rows == {"whole": "dense", "real": "delta"}


def test_a_strided_tensor_is_stored_in_row_major_order(tmp_path):
    tensor = sample((8, 4, 5, 5), 0.2, torch.float32, 0).to(memory_format=torch.channels_last)
    artifact.save(Bag({"t": tensor, "u": tensor[::2, 1]}), tmp_path / "m")
    back = artifact.load_state(tmp_path / "m")
    assert raw(back["t"]) == raw(tensor)
    assert raw(back["u"]) == raw(tensor[::2, 1])


@pytest.mark.parametrize(
    ("density", "encoding"), [(1.0, "dense"), (0.5, "bitmap"), (0.05, "delta"), (0.0, "delta")]
)
def test_the_smallest_encoding_wins(density, encoding):
    tensor = (torch.rand(64, 1000, generator=torch.Generator().manual_seed(0)) < density).float()
    assert encode(tensor)[0].encoding == encoding


def test_a_saving_below_the_cost_of_a_header_line_is_left_alone():
    assert encode(torch.zeros(32))[0].encoding == "dense"


def test_the_example_of_the_page():
    tensor = torch.zeros(263)
    tensor[[1, 260]] = 1.0
    assert encode(tensor)[1][".positions"].tolist() == [1, 255, 3, 2]


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_around_the_escape(gap):
    tensor = torch.zeros(200_100)
    tensor[gap] = tensor[2 * gap + 1] = -0.0
    entry, parts = encode(tensor)
    assert (entry.encoding, entry.nnz) == ("delta", 2)
    assert raw(decode(entry, parts)) == raw(tensor)


def test_any_safetensors_reader_opens_the_file(tmp_path):
    artifact.save(
        Bag({"t": sample((900,), 0.1, torch.float32, 1), "d": torch.ones(3)}), tmp_path / "m"
    )
    with safe_open(tmp_path / "m", framework="np") as file:
        assert set(file.keys()) == {"d", "t.values", "t.positions"}
        assert file.get_tensor("d").tolist() == [1, 1, 1]
