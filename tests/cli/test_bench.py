"""`probmask bench` of a run: its record then knows how fast it is."""

import json
import shutil

import pytest
import torch

from probmask.analysis.records import find_records
from probmask.cli import main
from probmask.training.run import train
from training.small import small, snapshot


@pytest.fixture(autouse=True)
def threads():
    """The command tells PyTorch how many threads to use."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "run"
    train(small(epochs=1, dense_twin=False), out=out)
    return out


@pytest.fixture
def run(trained, tmp_path):
    """In the place that a sweep would give it."""
    directory = tmp_path / "runs" / "tiny"
    shutil.copytree(trained, directory)
    return directory


def bench(path, *arguments):
    return main(["bench", str(path), "--batch", "2", "--batch", "1", "--threads", "1", *arguments])


def test_the_record_of_a_run_gets_what_was_measured(run, capsys):
    before = json.loads((run / "record.json").read_text())
    assert bench(run, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["record"] == str(run / "record.json")
    after = json.loads((run / "record.json").read_text())
    latency = after.pop("latency")
    assert after == before
    assert [each["batch"] for each in latency["batches"]] == [2, 1]
    assert (latency["batch"], latency["threads"]) == (2, 1)
    assert latency["milliseconds"] == round(said["results"][0]["engine_ms"], 4)
    assert latency["pytorch_milliseconds"] == round(said["results"][0]["pytorch_ms"], 4)
    assert main(["compare", str(run), "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| method | sparsity | weights | MACs | bytes | ms | images | threads |" in printed
    assert f"| {latency['milliseconds']:.2f} | 2 | 1 |" in printed


def test_the_copy_that_a_sweep_commits_is_brought_up_to_date(run, tmp_path, capsys):
    copy = tmp_path / "records" / "tiny.json"
    copy.parent.mkdir()
    shutil.copy(run / "record.json", copy)
    assert bench(run) == 0
    assert f"written to {run / 'record.json'}" in capsys.readouterr().out
    assert find_records([copy])[0].record["latency"]["batch"] == 2


@pytest.mark.parametrize("case", ["a bare file", "no record", "another shape"])
def test_nothing_is_written_where_it_is_not_about_the_run(case, run, capsys):
    arguments = []
    if case == "no record":
        (run / "record.json").unlink()
    if case == "another shape":
        arguments = ["--input-shape", "1,16,16"]
    before = snapshot(run)
    assert bench(run / "model.safetensors" if case == "a bare file" else run, *arguments) == 0
    assert "written to" not in capsys.readouterr().out
    assert snapshot(run) == before
