"""Sweeps that train: in parallel, killed and continued, failed and retried."""

import json
import os
import signal

import pytest

from probmask.analysis.records import find_records
from probmask.cli import main
from probmask.sweeps.grid import load_grid
from probmask.training.trainer import train
from sweeps.small_sweep import run_and_exit, trainings_in, wait_for_none, write_sweep
from training.small import kill_when, start, wait_until

# Every run is a process that imports PyTorch, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(900)


def checkpoints(out):
    return list(out.glob("runs/*/checkpoint.safetensors"))


@pytest.mark.slow
def test_a_killed_sweep_continues_with_the_same_result(tmp_path, capsys):
    out = tmp_path / "out"
    file = write_sweep(
        tmp_path / "s.toml",
        "[[grid]]\nsparsity = 0.8\n[[grid]]\nsparsity = 0.9\nepochs = 20",
        run="checkpoint_seconds = 0.0",
    )
    first, second = load_grid(file)
    command = ["sweep", str(file), "--out", str(out)]
    sweep = start(run_and_exit, command)
    wait_until(lambda: trainings_in(out) != [], sweep, seconds=400)
    assert main(command) == 2
    assert "another sweep is running in it" in capsys.readouterr().err
    checkpoint = out / "runs" / second.name / "checkpoint.safetensors"
    wait_until(checkpoint.exists, sweep, seconds=400)
    kill_when(sweep, checkpoint.exists)
    wait_for_none(out)
    assert checkpoint.exists()
    assert list(out.glob("failed/*")) == []

    before = (out / "runs" / first.name / "record.json").stat()
    assert main(command) == 0
    printed = capsys.readouterr().err
    assert f"{second.name}: resumed" in printed
    assert first.name not in printed
    after = (out / "runs" / first.name / "record.json").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert len(find_records([out / "records"])) == 2

    whole = train(second.config, out=tmp_path / "whole").directory
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / "runs" / second.name / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_an_interrupt_stops_the_processes_and_keeps_their_checkpoints(tmp_path):
    out = tmp_path / "out"
    file = write_sweep(tmp_path / "s.toml", "[grid]\nepochs = 3000", run="checkpoint_seconds = 0.0")
    sweep = start(run_and_exit, ["sweep", str(file), "--out", str(out)])
    wait_until(lambda: checkpoints(out) != [], sweep, seconds=400)
    assert len(trainings_in(out)) == 1
    os.kill(sweep.pid, signal.SIGINT)
    sweep.join(timeout=60)
    assert sweep.exitcode == 130
    assert trainings_in(out) == []
    assert len(checkpoints(out)) == 1
    assert list(out.glob("failed/*")) == []


FLAKY = """
import os, signal
from pathlib import Path
from probmask.models import smallconv

def build(**settings):
    if not Path(__file__).with_name("mended").exists():
        raise RuntimeError("no luck\\ntoday")
    return smallconv(**settings)

def die(**settings):
    if not Path(__file__).with_name("mended").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return smallconv(**settings)
"""


@pytest.mark.slow
def test_a_failed_run_is_listed_with_its_reason_and_retried_on_request(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "flaky_network.py").write_text(FLAKY)
    (tmp_path / "dill.py").write_text("print('imported by PyTorch')")
    monkeypatch.chdir(tmp_path)
    models = '["flaky_network:build", "flaky_network:die"]'
    file = write_sweep(tmp_path / "s.toml", f"[grid]\nmodel = {models}")
    out = tmp_path / "out"
    command = ["sweep", str(file), "--jobs", "2", "--out", str(out), "--trust"]

    assert main(command) == 1
    printed = capsys.readouterr()
    assert "RuntimeError: no luck today" in printed.out
    assert "killed by SIGKILL" in printed.out
    assert "2 of 2 runs failed" in printed.err
    assert "--retry trains them again" in printed.err
    log = next(out.glob("logs/*build*.log")).read_text()
    assert "Traceback" in log
    assert "imported by PyTorch" not in log  # the working directory is not on the import path

    (tmp_path / "mended").touch()
    assert main([*command, "--json"]) == 1  # not retried without --retry
    printed = capsys.readouterr()
    assert {row["state"] for row in json.loads(printed.out)["runs"]} == {"failed"}
    assert "started" not in printed.err

    assert main([*command, "--retry"]) == 0
    assert "2 finished, 0 failed" in capsys.readouterr().out
    assert list(out.glob("failed/*")) == []
