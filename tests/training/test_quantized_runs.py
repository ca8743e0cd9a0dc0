"""Runs with a table `quantize`: the weights are trained as integers in further epochs."""

import json

import pytest
import torch

import probmask
from probmask.cli import main
from probmask.core.integer_grid import quantized
from probmask.errors import CheckpointError, InputError
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.config import to_table
from probmask.training.run_directory import RunReader
from probmask.training.trainer import train
from training.small import Stopped, flags, small, stop_after_checkpoint

# 20 updates of the method, then 10 with quantization.
BRIEF = {
    "epochs": 4,
    "batch_size": 280,
    "method__sparsity": 0.9,
    "quantize__bits": 4,
    "quantize__epochs": 2,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run, uninterrupted."""
    return train(small(**BRIEF), out=tmp_path_factory.mktemp("whole")).directory


def weights_of(directory):
    state = probmask.load(directory / "model.safetensors").state_dict()
    return {name: tensor for name, tensor in state.items() if tensor.dim() > 1}


def test_the_artifact_has_integers_and_the_sparsity(whole):
    info = probmask.read(whole / "model.safetensors")
    assert info.rounding == {"values": "int4", "max_error": 0.0, "relative_error": 0.0}
    assert {row.values for row in info.tensors if len(row.shape) > 1} == {"int4"}
    record = json.loads((whole / "record.json").read_text())
    assert record["kept"] == probmask.inspect(whole / "model.safetensors").kept
    assert record["sparsity"]["reached"] == pytest.approx(0.9, abs=1e-4)
    assert record["bytes"] == info.file_bytes
    assert (record["epochs"], record["updates"]) == (6, 30)
    assert [(each["name"], each["epochs"]) for each in record["phases"]] == [
        ("train", 4),
        ("quantize", 2),
    ]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["expected_sparsity"] == pytest.approx(0.9, abs=1e-4)
    assert lines[4]["learning_rate"] < 0.01 < lines[0]["learning_rate"]
    for tensor in weights_of(whole).values():
        assert torch.equal(quantized(tensor, 4), tensor)


def test_the_recorded_accuracy_is_that_of_the_file(whole, capsys):
    assert main(["evaluate", str(whole)]) == 0
    assert "as recorded" in capsys.readouterr().out
    assert main(["inspect", str(whole), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert all(layer["values"] == "int4" for layer in printed["layers"])
    assert all(0 < layer["bits_per_weight"] < 16 for layer in printed["layers"])


@pytest.mark.parametrize("stop", [3, 19, 20, 21, 25, 29, 30])
def test_resuming_from_any_step_gives_the_same_result(tmp_path, whole, monkeypatch, stop):
    """Steps before, at and after the beginning of the quantization, and the last step."""
    out = tmp_path / "run"
    stop_after_checkpoint(monkeypatch, stop)
    with pytest.raises(Stopped):
        train(small(**BRIEF, checkpoint_seconds=0), out=out)
    monkeypatch.undo()
    assert read_checkpoint(out / "checkpoint.safetensors")["step"] == stop
    state = RunReader().read(out)
    assert (state.status, state.phases[state.phase].name) == (
        "stopped",
        "quantize" if stop >= 20 else "train",
    )
    train(out=out, resume=True)
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("method", ["probmask", "rigl", "dense", "edge-popup", "lottery"])
def test_other_methods(tmp_path, method, monkeypatch):
    settings = {"method__name": method, "quantize__bits": 8, "quantize__epochs": 1, "epochs": 3}
    config = small(**settings | ({} if method == "dense" else {"method__sparsity": 0.8}))
    whole = train(config, out=tmp_path / "whole")
    last = whole.record["updates"] - 1
    stop_after_checkpoint(monkeypatch, last)
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        train(
            small(
                **settings
                | {"checkpoint_seconds": 0}
                | ({} if method == "dense" else {"method__sparsity": 0.8})
            ),
            out=out,
        )
    monkeypatch.undo()
    train(out=out, resume=True)
    content = [(path / "model.safetensors").read_bytes() for path in (out, whole.directory)]
    assert content[0] == content[1]
    assert whole.record["kept"] == probmask.inspect(out / "model.safetensors").kept


def test_without_epochs_it_only_rounds(tmp_path):
    exact = {key: value for key, value in BRIEF.items() if not key.startswith("quantize")}
    plain = train(small(**exact), out=tmp_path / "plain").directory
    outcome = train(small(**exact, quantize__bits=8, quantize__epochs=0), out=tmp_path / "rounded")
    assert outcome.record["updates"] == 20
    rounded = weights_of(outcome.directory)
    for name, tensor in weights_of(plain).items():
        assert torch.equal(rounded[name], quantized(tensor, 8)), name


def test_the_dense_twin_is_not_quantized(tmp_path):
    settings = {**BRIEF, "epochs": 1, "quantize__epochs": 1, "dense_twin": True}
    outcome = train(small(**settings), out=tmp_path / "run")
    assert outcome.dense["epochs"] == 1
    assert probmask.read(tmp_path / "run" / "dense" / "model.safetensors").rounding is None


def test_the_table_is_absent_by_default():
    assert "quantize" not in to_table(small())
    table = to_table(small(quantize__bits=4))["quantize"]
    assert table == {"bits": 4, "epochs": 3, "rate_scale": 0.1}


def test_a_forged_checkpoint_raises(tmp_path, monkeypatch):
    out = tmp_path / "run"
    stop_after_checkpoint(monkeypatch, 25)
    with pytest.raises(Stopped):
        train(small(**BRIEF, checkpoint_seconds=0), out=out)
    monkeypatch.undo()
    path = out / "checkpoint.safetensors"
    intact = read_checkpoint(path)
    first = next(iter(intact["sparsifier"]["masks"]))
    for masks, reason in (
        ({}, "masks.features.0.weight is missing"),
        (3, "masks is 3, expected a table"),
        (intact["sparsifier"]["masks"] | {first: torch.ones(3)}, "is a tensor of shape"),
    ):
        write_checkpoint(path, intact | {"sparsifier": {"masks": masks}})
        with pytest.raises(CheckpointError, match=reason):
            train(out=out, resume=True)
    write_checkpoint(path, intact | {"step": 3})  # of the method, but with the quantizer's state
    with pytest.raises(CheckpointError, match="sparsifier"):
        train(out=out, resume=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("quantize.bits=9", "--set quantize.bits=9: must be a number of bits, from 2 to 8."),
        ("quantize.bits=1", "--set quantize.bits=1: must be a number of bits"),
        ("quantize.bits=4.5", "--set quantize.bits=4.5: expected a whole number."),
        ("quantize.epochs=-1", "--set quantize.epochs=-1: must be a number of epochs"),
        ("quantize.rate_scale=-1", "--set quantize.rate_scale=-1: must be a factor"),
        ("quantize.bit=4", "unknown key quantize.bit; did you mean 'bits'?"),
        ("bits=4", "unknown key bits; did you mean 'quantize.bits'?"),
        ("quantize=4", "quantize must be a table, not 4."),
    ],
)
def test_wrong_settings_are_reported(tmp_path, capsys, setting, message):
    arguments = ["train", *flags(), "--set", setting, "--out", str(tmp_path / "run")]
    assert main(arguments) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_bits(whole):
    with pytest.raises(InputError, match=r"quantize = .* differs from the run's"):
        train(small(**BRIEF | {"quantize__bits": 8}), out=whole, resume=True)
