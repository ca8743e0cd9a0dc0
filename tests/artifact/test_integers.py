"""Weights as integers: `save(values="int8")` to `save(values="int2")`."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import probmask
from probmask import artifact
from probmask.artifact.tensors import encode_integers
from probmask.core.integer_grid import narrow, quantized
from probmask.errors import ArtifactError
from probmask.storage.integers import INTEGERS, decode_integers
from reference.artifact_reader import from_integers, read_artifact


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def sparse_model(dtype=torch.float32, sparsity=0.9):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 20, 3), nn.BatchNorm2d(20), nn.Flatten(), nn.Linear(80, 7)
    ).to(dtype)
    with torch.no_grad():
        for layer in (model[0], model[3]):
            layer.weight.masked_fill_(torch.rand_like(layer.weight) < sparsity, 0.0)
        model[1].running_var.uniform_(0.5, 2)
    return model


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", INTEGERS)
@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 0.99])
def test_round_trip(path, dtype, values, sparsity):
    """Weights are on the grid, other tensors in fp16, and two readers agree on every bit."""
    model = sparse_model(dtype, sparsity)
    info = probmask.save(model, path, values=values)
    state, plain = artifact.load_state(path), read_artifact(path)[0]
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype
        if tensor.dim() >= 2:
            expected = quantized(tensor, INTEGERS[values])
        else:
            expected = narrow(tensor).to(tensor.dtype)
        assert torch.equal(state[name], expected), name
        assert plain[name][2] == as_bytes(state[name])
    rows = {row.name: row for row in info.tensors}
    for name in ("0.weight", "3.weight"):
        # The stream of a few weights would be larger than the weights.
        assert rows[name].values == values or rows[name].nnz < 10
        assert rows[name].nnz == int(model.state_dict()[name].count_nonzero())
    assert info.format == 2 or sparsity == 0.99
    assert info == artifact.read(path)
    assert info.rounding["values"] == values
    assert 0 < info.rounding["relative_error"] < 2 * 2.0 ** -INTEGERS[values]


def test_saving_the_loaded_network_changes_nothing(path, tmp_path):
    model = sparse_model()
    probmask.save(model, path, values="int4")
    loaded = probmask.load_into(sparse_model(), path)
    for values in ("int4", "int8"):
        again = probmask.save(loaded, tmp_path / values, values=values)
        assert again.rounding["max_error"] == again.rounding["relative_error"] == 0
        assert_same(artifact.load_state(tmp_path / values), loaded.state_dict())
    twin = copy.deepcopy(loaded)
    probmask.save(twin, tmp_path / "twin", values="int4")
    assert (tmp_path / "twin").read_bytes() == (tmp_path / "int4").read_bytes()


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_without_integers_the_file_has_version_1(path):
    assert probmask.save(sparse_model(), path).format == 1
    assert b'"probmask":"1"' in path.read_bytes()
    narrow_model = sparse_model(torch.float16)
    assert probmask.save(narrow_model, path, values="int8", overwrite=True).format == 1
    assert_same(artifact.load_state(path), narrow_model.state_dict())


def test_the_file_is_smaller_with_fewer_bits(path):
    model = sparse_model()
    sizes = [
        probmask.save(model, path, values=values, overwrite=True).file_bytes
        for values in (None, "fp16", "int8", "int6", "int4", "int2")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


def test_every_way_to_load(path, tmp_path):
    model = probmask.models.smallconv(width=4)
    described = {"model": "smallconv", "model_args": {"width": 4}}
    probmask.save(model, path, values="int8", metadata=described)
    state = artifact.load_state(path)
    assert_same(probmask.load(path).state_dict(), state)
    assert_same(probmask.load_into(probmask.models.smallconv(width=4), path).state_dict(), state)
    with torch.device("meta"):
        empty = probmask.models.smallconv(width=4)
    assert_same(probmask.load_into(empty, path).state_dict(), state)
    artifact.export(path, tmp_path / "dense.safetensors")
    layer = probmask.inspect(path).layers[0]
    assert layer.values == "int8"
    assert layer.bits_per_weight < 14
    assert "int8" in str(probmask.inspect(path))


def test_tied_weights_stay_tied(path):
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    info = probmask.save(model, path, values="int8")
    assert info.aliases == {"1.weight": "0.weight"}
    state = artifact.load_state(path)
    assert state["0.weight"] is state["1.weight"]


SPECIAL = {
    "zeros": torch.zeros(3, 4),
    "one value": torch.tensor([[0.0, 0.0], [0.0, 0.1]]),
    "equal values": torch.full((3, 4), 0.3),
    "empty channels": torch.tensor([[0.0, 0.0], [1.0, -0.7], [0.0, 0.0]]),
    "subnormal": torch.tensor([[1e-44, -3e-45, 1e-42]]),
    "huge": torch.tensor([[3e38, -1e30], [1e37, 2e36]]),
    "far apart": torch.tensor([[1e-40, 2e-41], [1e30, 3e37]]),
    "nan": torch.tensor([[math.nan, 1.0]]),
    "infinity": torch.tensor([[-math.inf, 1.0]]),
    "negative zero": torch.tensor([[-0.0, 1.3, -1.1]]),
    "no entries": torch.zeros(0, 3),
    "no columns": torch.zeros(3, 0),
    "four dimensions": torch.randn(2, 3, 4, 5),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tensors(path, name):
    model = nn.Module()
    model.register_buffer("weight", SPECIAL[name])
    info = probmask.save(model, path, values="int8")
    loaded, original = artifact.load_state(path)["weight"], SPECIAL[name]
    assert as_bytes(loaded) == read_artifact(path)[0]["weight"][2]
    assert info.tensors[0].nnz == int((original != 0).sum()) == int((loaded != 0).sum())
    if original.isfinite().all() and original.numel():
        scale = (
            original.abs().amax(1, keepdim=True) if original.dim() == 2 else original.abs().max()
        )
        assert bool(((loaded - original).abs() <= scale / 60).all()) or name == "subnormal"
    elif original.numel():
        assert as_bytes(loaded) == as_bytes(original)
        assert info.rounding["max_error"] == 0
    probmask.load_into(model, path)
    again = probmask.save(model, path, values="int8", overwrite=True)
    assert again.rounding["max_error"] == 0
    assert as_bytes(artifact.load_state(path)["weight"]) == as_bytes(loaded)


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numbers = torch.randn(rows, columns, generator=generator)
    numbers *= 10.0 ** draw(st.integers(-30, 30))
    density = draw(st.sampled_from([0.02, 0.3, 1.0]))
    return torch.where(torch.rand(rows, columns, generator=generator) < density, numbers, 0.0)


@settings(max_examples=150, deadline=None)
@given(matrices(), st.integers(2, 8))
def test_any_stream_is_decoded_by_both_readers(matrix, bits):
    rounded = quantized(matrix, bits)
    stream = encode_integers(rounded, bits)
    places = rounded.flatten().nonzero().flatten()
    if not places.numel():
        assert stream is None
        return
    values = decode_integers(stream, places.numpy(), tuple(matrix.shape), np.float32, bits)
    assert np.array_equal(values, rounded.flatten()[places])
    channels = (places // matrix.shape[1]).tolist()
    assert from_integers(stream.tobytes(), channels, bits) == values.tolist()


def test_a_tensor_off_the_grid_is_not_coded():
    assert encode_integers(torch.tensor([[1.0, math.pi]]), 8) is None
    assert encode_integers(torch.tensor([[1.0, 100.0]]), 4) is None
    assert encode_integers(torch.tensor([[1.0, 7.0]]), 4) is not None


def test_the_example_of_the_format(path):
    stream = encode_integers(torch.tensor([[-3.0, 1.0, 0.0], [0.0, 7.0, 0.0]]), 4)
    assert stream.tolist() == [248, 255, 4, 0, 138, 1, 2, 0, 8]


def test_a_dense_tensor_without_zeros_stores_no_positions(path):
    model = nn.Linear(30, 50, bias=False)
    info = probmask.save(model, path, values="int8")
    assert info.tensors[0].encoding == "dense"
    assert info.tensors[0].stored_bytes < 1.1 * 1500
    assert torch.equal(artifact.load_state(path)["weight"], quantized(model.weight.detach(), 8))


def test_names_that_collide_are_stored_exactly(path):
    inner = nn.Module()
    inner.register_buffer("values", torch.ones(1))
    wrapped = nn.Module()
    wrapped.add_module("weight", inner)
    wrapped._buffers["weight"] = torch.randn(4, 5)
    info = probmask.save(wrapped, path, values="int8")
    rows = {row.name: row.values for row in info.tensors}
    assert rows["weight"] == "F32"
    assert rows["weight.values"] == "F16"
    assert artifact.load_state(path)["weight"].shape == (4, 5)


def test_measure_sees_the_rounded_network(path):
    model = sparse_model().eval()
    inputs = torch.randn(5, 3, 4, 4)

    def measure(network):
        with torch.no_grad():
            return float(network(inputs).sum())

    info = probmask.save(model, path, values="int4", measure=measure)
    assert info.rounding["before"] == measure(model)
    loaded = probmask.load_into(sparse_model(), path).eval()
    assert info.rounding["after"] == measure(loaded) != info.rounding["before"]


def test_a_damaged_stream_raises(path):
    probmask.save(sparse_model(), path, values="int8")
    content = bytearray(path.read_bytes())
    content[-40] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError):
        artifact.load_state(path)
