"""Sweeps on Ray: the same files as local training, and clear errors without a cluster."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from probmask.analysis.records import find_records
from probmask.cli import main
from probmask.sweeps.grid import load_grid
from probmask.sweeps.ray_cluster import required_resources
from probmask.training.trainer import train
from sweeps.small_sweep import write_sweep
from training.small import small

# A process imports PyTorch and Ray, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(900)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (probmask[ray])"
)


def test_without_ray_the_command_prints_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    file = write_sweep(tmp_path / "s.toml", "[grid]\nseed = [0]")
    assert main(["sweep", str(file), "--ray", "local", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'probmask[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_closed_port_as_ray_address_raises_at_once(scheme, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    file = write_sweep(tmp_path / "s.toml", "[grid]\nseed = [0]")
    began = time.monotonic()
    assert main(["sweep", str(file), "--ray", address, "--out", str(tmp_path / "out")]) == 2
    assert time.monotonic() - began < 30  # Ray itself waits for minutes
    printed = capsys.readouterr().err
    assert f"--ray {address}: cannot be reached: " in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_ray_reserves_gpus_for_runs_that_can_use_them():
    cpu, auto = small(threads=2), small(threads=2, accelerator="auto")
    assert required_resources(cpu, {"GPU": 4}) == {"num_cpus": 2}
    assert required_resources(auto, {"CPU": 8}) == {"num_cpus": 2}
    assert required_resources(auto, {"GPU": 4}) == {"num_cpus": 2, "num_gpus": 1}


# A network that stores the addresses on which the processes of Ray listen.
SPY = """
import json, socket, struct
from pathlib import Path

def listening():
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A":
                sockets[f"socket:[{inode}]"] = local.rpartition(":")[0]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "ray" in (process / "cmdline").read_text() and "SPIED" in (
                process / "environ").read_text():
                links = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
                yield from (sockets[link] for link in links if link in sockets)
        except OSError:
            pass

def build(**settings):
    Path("listening.json").write_text(json.dumps(list(listening())))
    raise RuntimeError("seen enough")
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.slow
@needs_ray
def test_a_local_ray_writes_the_same_files_and_listens_on_this_machine_only(tmp_path):
    out = tmp_path / "out"
    grid = '[[grid]]\nsparsity = 0.9\n[[grid]]\nmodel = "spying_network:build"'
    file = write_sweep(tmp_path / "s.toml", grid)
    (tmp_path / "spying_network.py").write_text(SPY)
    (tmp_path / "dill.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    command = [sys.executable, "-m", "probmask.cli", "sweep", str(file), "--jobs", "2", "--trust"]
    done = subprocess.run(
        [*command, "--ray", "local", "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path / "home"), "SPIED": "1"},
        cwd=tmp_path,
        timeout=800,
    )
    assert done.returncode == 1, done.stderr
    good, bad = load_grid(file)
    assert f"{bad.name}: failed: RuntimeError: seen enough" in done.stderr
    assert (out / "failed" / f"{bad.name}.json").exists()
    addresses = json.loads((tmp_path / "listening.json").read_text())
    assert len(addresses) > 2
    assert set(addresses) <= LOOPBACK
    assert not (tmp_path / "executed").exists()
    (run,) = find_records([out / "records"])
    assert run.identity == good.identity
    whole = train(good.config, out=tmp_path / "whole").directory
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / "runs" / good.name / name).read_bytes() == (whole / name).read_bytes()


def test_an_address_at_which_another_program_listens_raises_at_once(tmp_path, capsys):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nsparsity = 0.9")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answering = threading.Thread(target=_answer_as_http, args=(server,))
        answering.start()
        code = main(["sweep", str(file), "--ray", f"127.0.0.1:{port}"])
        answering.join()
    assert code == 2
    assert "cannot be reached: the program at this address is not Ray" in capsys.readouterr().err
    assert main(["sweep", str(file), "--ray", "127.0.0.1:99999"]) == 2
    assert "cannot be reached: a port is at most 65535" in capsys.readouterr().err


def _answer_as_http(server):
    peer, _ = server.accept()
    with peer:
        peer.recv(100)
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@needs_ray
def test_a_ray_address_without_a_cluster_raises(tmp_path):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nsparsity = 0.9")
    command = [sys.executable, "-m", "probmask.cli", "sweep", str(file), "--ray", "no address"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "--ray no address: cannot be reached" in done.stderr
    assert not (tmp_path / "out").exists()
