"""`probmask bench` writes the latency to the record of a run."""

import errno
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from probmask.analysis.records import find_records
from probmask.cli import main
from probmask.training.trainer import train
from training.small import small, snapshot


@pytest.fixture(autouse=True)
def threads():
    """Restore the number of threads, which the command sets."""
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
    """A copy in the directory structure of a sweep."""
    directory = tmp_path / "runs" / "tiny"
    shutil.copytree(trained, directory)
    return directory


def bench(path, *arguments):
    return main(["bench", str(path), "--batch", "2", "--batch", "1", "--threads", "1", *arguments])


def test_bench_writes_the_latency_to_the_record(run, capsys):
    before = json.loads((run / "record.json").read_text())
    assert bench(run, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["record"] == str(run / "record.json")
    after = json.loads((run / "record.json").read_text())
    latency = after.pop("latency")
    assert after == before
    assert [each["batch"] for each in latency["batches"]] == [2, 1]
    assert (latency["batch"], latency["threads"]) == (2, 1)
    assert latency["milliseconds"] == round(printed["results"][0]["engine_ms"], 4)
    assert latency["pytorch_milliseconds"] == round(printed["results"][0]["pytorch_ms"], 4)
    assert main(["compare", str(run), "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| method | sparsity | weights | MACs | bytes | ms | images | threads |" in printed
    assert f"| {latency['milliseconds']:.2f} | 2 | 1 |" in printed


def test_bench_updates_the_copy_of_a_sweep(run, tmp_path, capsys):
    copy = tmp_path / "records" / "tiny.json"
    copy.parent.mkdir()
    shutil.copy(run / "record.json", copy)
    assert bench(run) == 0
    assert f"written to {run / 'record.json'}" in capsys.readouterr().out
    assert find_records([copy])[0].record["latency"]["batch"] == 2


@pytest.fixture
def read_only(run, monkeypatch):
    """The run on read-only media; root may write to a directory without write permission."""
    open_file, open_descriptor = io.open, os.open

    def check(path, writes):
        if writes and Path(os.fsdecode(path)).is_relative_to(run):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def guarded_file(path, mode="r", *others, **named):
        if not isinstance(path, int):
            check(path, set(mode) & set("wxa+"))
        return open_file(path, mode, *others, **named)

    def guarded_descriptor(path, flags, *others, **named):
        check(path, flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        return open_descriptor(path, flags, *others, **named)

    monkeypatch.setattr(io, "open", guarded_file)
    monkeypatch.setattr(os, "open", guarded_descriptor)
    return run


def test_commands_work_on_a_read_only_run(read_only, tmp_path, capsys):
    before = snapshot(read_only)
    assert bench(read_only) == 0
    printed = capsys.readouterr()
    assert "PyTorch ms" in printed.out
    assert "written to" not in printed.out
    reason = f"{read_only / 'record.json'}: cannot be written (Read-only file system)"
    assert f"the measurements are printed but not recorded: {reason}" in printed.err
    page = str(tmp_path / "page.html")
    for command in (["report", "--out", page], ["inspect"], ["evaluate"], ["compare"], ["watch"]):
        assert main([*command, str(read_only)]) == 0
    assert snapshot(read_only) == before


@pytest.mark.parametrize("case", ["a bare file", "no record", "another shape"])
def test_bench_writes_nothing_without_a_matching_run(case, run, capsys):
    arguments = []
    if case == "no record":
        (run / "record.json").unlink()
    if case == "another shape":
        arguments = ["--input-shape", "1,16,16"]
    before = snapshot(run)
    assert bench(run / "model.safetensors" if case == "a bare file" else run, *arguments) == 0
    assert "written to" not in capsys.readouterr().out
    assert snapshot(run) == before
