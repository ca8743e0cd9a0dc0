"""`probmask.inspect`: what an artifact contains, layer by layer."""

import dataclasses

import pytest
import torch
from torch import nn

import probmask
from probmask.errors import ArtifactError


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 40))
    with torch.no_grad():
        model[0].weight.masked_fill_(torch.rand_like(model[0].weight) < 0.9, 0.0)
        model[3].weight.masked_fill_(torch.rand_like(model[3].weight) < 0.9, 0.0)
    return model


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_layers_and_totals_are_those_of_the_model(model, path):
    info = probmask.save(model, path, metadata={"note": "mine"})
    summary = probmask.inspect(path)
    weights = {"0.weight": model[0].weight, "3.weight": model[3].weight}
    stored = {row.name: row for row in info.tensors}
    assert [layer.name for layer in summary.layers] == list(weights)
    for layer, weight in zip(summary.layers, weights.values(), strict=True):
        assert layer.shape == tuple(weight.shape)
        assert layer.kept == int(weight.count_nonzero())
        assert layer.size == weight.numel()
        assert layer.sparsity == 1 - layer.kept / layer.size
        assert layer.encoding == stored[layer.name].encoding != "dense"
        assert layer.bytes == stored[layer.name].stored_bytes
        assert layer.values == "F32"
        assert layer.bits_per_weight == 8 * layer.bytes / layer.kept > 32
    assert summary.kept == sum(int(weight.count_nonzero()) for weight in weights.values())
    assert summary.size == sum(weight.numel() for weight in weights.values())
    assert summary.sparsity == 1 - summary.kept / summary.size
    parts = summary.layer_bytes + summary.other_bytes + summary.header_bytes
    assert parts == summary.file_bytes == path.stat().st_size
    assert summary.layer_bytes + summary.other_bytes == sum(r.stored_bytes for r in info.tensors)
    assert summary.dense_bytes == info.dense_bytes
    assert (summary.metadata, summary.rounding) == ({"note": "mine"}, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        summary.file_bytes = 0


def test_a_dense_layer_is_in_the_total_but_not_in_that_of_the_layers_with_zeros(model, path):
    model.add_module("recurrent", nn.GRU(40, 10))
    probmask.save(model, path)
    summary = probmask.inspect(path)
    dense = 3 * 10 * (40 + 10)
    assert (summary.pruned.size, summary.size) == (144 + 320, 144 + 320 + dense)
    assert summary.kept == summary.pruned.kept + dense
    assert summary.pruned.sparsity > 0.85 > 0.3 > summary.sparsity
    rows = str(summary).splitlines()
    assert [row.split("  ")[0] for row in rows[-3:-1]] == ["layers with zeros", "all"]


def test_macs_come_from_the_metadata(model, path):
    probmask.save(model, path)
    unknown = probmask.inspect(path)
    assert unknown.macs is unknown.layers[0].macs is unknown.layers[0].dense_macs is None
    uses = {"0.weight": 9, "3.weight": 1}
    probmask.save(model, path, metadata={"macs_per_weight": uses}, overwrite=True)
    summary = probmask.inspect(path)
    conv, linear = summary.layers
    assert (conv.macs, conv.dense_macs) == (9 * conv.kept, 9 * conv.size)
    assert summary.macs == conv.macs + linear.macs


@pytest.mark.parametrize("uses", [3, {"0.weight": -1}, {"0.weight": 2**63}, {"0.weight": "9"}])
def test_macs_that_are_not_counts_are_ignored(model, path, uses):
    probmask.save(model, path, metadata={"macs_per_weight": uses})
    assert probmask.inspect(path).macs is None


def test_the_text_is_an_aligned_table(path):
    model = nn.Linear(100, 10, bias=False)
    with torch.no_grad():
        model.weight[:, 2:] = 0.0
    probmask.save(model, path)
    size = path.stat().st_size
    assert str(probmask.inspect(path)).splitlines() == [
        "layer   shape   kept   size  sparsity  encoding  values  bytes  bits",
        "weight  10×100    20  1,000   98.00 %  delta     F32       100  40.0",
        "all               20  1,000   98.00 %                      100  40.0",
        f"file: {size} bytes, {size / 40:.1f} % of the 4,000 bytes of its tensors stored dense",
    ]


def test_names_from_the_file_are_escaped(path):
    model = nn.Module()
    model.register_buffer("\x1b[2J\nforged", torch.ones(2, 2))
    probmask.save(model, path)
    lines = str(probmask.inspect(path)).splitlines()
    assert len(lines) == 4
    assert lines[1].startswith(r"\x1b[2J\nforged")


def test_a_network_without_layers(path):
    probmask.save(nn.BatchNorm1d(3), path)
    summary = probmask.inspect(path)
    assert (summary.layers, summary.kept, summary.size, summary.sparsity) == ((), 0, 0, 0.0)
    assert str(summary).count("\n") == 2


def test_what_is_not_an_artifact_raises(path):
    with pytest.raises(ArtifactError, match="no such file"):
        probmask.inspect(path)
