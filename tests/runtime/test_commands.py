"""`bench`, `plan` and `evaluate --engine sparse`, through the command line."""

import json

import pytest
import torch

import probmask
from probmask import models
from probmask.cli import main
from runtime.networks import masked

PLAN = ("plan", "--model", "smallconv", "--sparsity")


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of PyTorch threads, which the commands set."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def artifact(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    metadata = {
        "model": "smallconv",
        "model_args": {"width": 8},
        "data": "digits",
        "image_shape": [1, 8, 8],
    }
    probmask.save(masked(models.smallconv(width=8), 0.9), path, metadata=metadata)
    return path


def printed(capsys, *arguments):
    assert main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_bench_measures_each_batch_size(artifact, capsys):
    arguments = ("bench", str(artifact), "--batch", "1", "--batch", "3", "--threads", "1")
    result = json.loads(printed(capsys, *arguments, "--json"))
    assert result["input_shape"] == [1, 8, 8]
    assert [row["batch"] for row in result["results"]] == [1, 3]
    for row in result["results"]:
        assert row["engine_ms"] > 0
        assert row["pytorch_ms"] > 0
        assert row["ratio"] == pytest.approx(row["pytorch_ms"] / row["engine_ms"])
        assert row["layers"] == 5
        assert {node["runs"] for node in row["nodes"]} <= {"kernels", "PyTorch"}


def test_bench_prints_a_table_and_the_layers(artifact, capsys):
    text = printed(capsys, "bench", str(artifact), "--batch", "2", "--threads", "1", "--layers")
    assert "times faster" in text
    assert "compiled in" in text
    assert "features.3 (conv2d.default)" in text


def test_plan_reports_size_and_speed_before_training(capsys):
    arguments = ("plan", "--model", "smallconv", "--sparsity", "0.9", "--batch", "2")
    result = json.loads(printed(capsys, *arguments, "--threads", "1", "--json"))
    assert result["kept"] == result["size"] - round(0.9 * result["size"])
    assert result["file_bytes"] < 0.3 * result["dense_bytes"]
    assert result["results"][0]["batch"] == 2
    assert "with random masks" in printed(capsys, *arguments, "--threads", "1")


def test_the_sparse_engine_is_as_accurate(artifact, capsys):
    dense = json.loads(printed(capsys, "evaluate", str(artifact), "--json"))
    sparse = json.loads(printed(capsys, "evaluate", str(artifact), "--engine", "sparse", "--json"))
    assert sparse == dense


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--model", "smallconv", "--sparsity", "98"), "for 98 % pass 0.98"),
        (("plan", "--model", "smalconv", "--sparsity", "0.9"), "smallconv"),
        (("plan", "--model", "my.module:net", "--sparsity", "0.9"), "--input-shape"),
        (("plan", "--model", "smallconv", "--sparsity", "0.9", "--batch", "0"), "--batch 0"),
        (("plan", "--model", "smallconv", "--sparsity", "0.9", "--threads", "0"), "--threads 0"),
        ((*PLAN, "1.5"), "--sparsity 1.5"),
        ((*PLAN, "nan"), "--sparsity nan"),
        ((*PLAN, "0.9", "--batch", "1000000000000"), "--batch 1000000000000: "),
        ((*PLAN, "0.9", "--threads", "1000000"), "4 per processor"),
        ((*PLAN, "0.9", "--input-shape", "1,100000,100000"), "limit of 268,435,456 numbers"),
        ((*PLAN, "0.9", "--input-shape", "0,8,8"), "--input-shape 0,8,8: "),
        ((*PLAN, "0.9", "--input-shape", "1,8,8,8"), "--input-shape 1,8,8,8: the network fails"),
        ((*PLAN, "0.9", "--input-shape", "1,3,3"), "need at least 4×4"),
        (("bench", "nowhere.safetensors"), "no such file"),
        (("bench", __file__), "not an intact safetensors file"),
        (("bench", "ARTIFACT", "--batch", "0"), "--batch 0"),
        (("bench", "ARTIFACT", "--threads", "0"), "--threads 0"),
        (("bench", "ARTIFACT", "--batch", "1000000000000"), "--batch 1000000000000: "),
        (("bench", "ARTIFACT", "--input-shape", "3,8,8"), "--input-shape 3,8,8: the network fails"),
        (("bench", "ARTIFACT", "--input-shape", "1,3,3"), "need at least 4×4"),
        (("evaluate", __file__, "--engine", "sparse"), "not an intact safetensors file"),
    ],
)
def test_invalid_input_is_reported_in_one_line(arguments, message, artifact, capsys):
    given = [str(artifact) if word == "ARTIFACT" else word for word in arguments]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
