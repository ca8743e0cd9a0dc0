"""Ranks that are killed, are stopped, are cut off from the network or have other data.

`benchmarks/rank_faults.py` has more faults.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training.ranks import (
    command,
    command_in_namespace,
    command_with_a_changed_weight,
    command_with_errors_in,
    finish,
    free_port,
    start_ranks,
)
from training.small import flags, lines, start, wait_until

SETTINGS = {
    "epochs": 8,
    "batch_size": 128,
    "accelerator": "cpu",
    "checkpoint_seconds": 0,
    "method__sparsity": 0.9,
}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def rank_processes(parent):
    """Return the processes of the ranks that torchrun, the parent, has started, by rank."""
    found = {}
    for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{number}/environ").read_bytes())
        if rank:
            found[int(rank[1])] = int(number)
    return found


def test_torchrun_restarts_a_killed_rank_and_the_result_is_the_same(tmp_path):
    given = flags(**SETTINGS)
    straight, out = tmp_path / "straight", tmp_path / "run"
    two = ["--devices", "2"]  # auto is ddp
    finish(start_ranks(command, ["train", "--out", str(straight), *two, *given]))
    launch = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    arguments = ["probmask.cli", "train", "--out", str(out), "--quiet", *given]
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", *launch, "-m", *arguments],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        try:
            while lines(out / "metrics.jsonl") < 2:
                assert process.poll() is None, (tmp_path / "printed").read_text()
            os.kill(rank_processes(process.pid)[1], signal.SIGKILL)
            assert process.wait(200) == 0, (tmp_path / "printed").read_text()
        finally:
            process.terminate()  # torchrun then ends the ranks
            process.wait()
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name


def test_a_stopped_rank_is_named_after_the_timeout(tmp_path):
    out = tmp_path / "run"
    given = flags(**SETTINGS | {"epochs": 10_000, "devices": 2, "timeout_seconds": 15})
    ranks = start_ranks(
        command_with_errors_in, ["train", "--out", str(out), "--quiet", *given], tmp_path
    )
    wait_until(lambda: lines(out / "metrics.jsonl") >= 1, ranks[0])
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(120)
    ranks[1].kill()
    ranks[1].join()
    assert ranks[0].exitcode == 1
    printed = [
        line
        for line in (tmp_path / "stderr0").read_text().splitlines()
        if line.startswith("probmask: ")
    ]
    assert len(printed) == 1
    assert "rank 1 has not responded to rank 0 for 15 seconds" in printed[0]
    assert "--resume" in printed[0]


@pytest.fixture
def namespaces():
    """Two network namespaces that are connected; the interface of each is veth0."""
    names = [f"probmask-{os.getpid()}-{number}" for number in (1, 2)]
    commands = [["netns", "add", name] for name in names]
    pair = ["type", "veth", "peer", "name", "veth0", "netns", names[1]]
    commands.append(["link", "add", "veth0", "netns", names[0], *pair])
    for number, name in enumerate(names, 1):
        commands.append(["-n", name, "addr", "add", f"10.77.1.{number}/24", "dev", "veth0"])
        commands += [["-n", name, "link", "set", device, "up"] for device in ("veth0", "lo")]
    if shutil.which("ip") is None:
        pytest.skip("there is no command ip (package iproute2)")
    try:
        for command in commands:
            done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"ip {' '.join(command)}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_ranks_whose_network_is_cut_end_and_name_each_other(tmp_path, namespaces):
    out = tmp_path / "run"
    given = flags(**SETTINGS | {"epochs": 10_000, "devices": 2, "timeout_seconds": 5})
    arguments = ["train", "--out", str(out), "--quiet", *given]
    ranks = start_ranks(command_in_namespace, arguments, tmp_path, namespaces)
    wait_until(lambda: lines(out / "metrics.jsonl") >= 1, ranks[0])
    subprocess.run(["ip", "-n", namespaces[0], "link", "set", "veth0", "down"], check=True)
    for number, rank in enumerate(ranks):
        rank.join(60)
        assert rank.exitcode == 1
        printed = (tmp_path / f"stderr{number}").read_text()
        assert f"rank {1 - number} " in printed
        assert "--resume" in printed
    assert (out / "checkpoint.safetensors").exists()


def test_a_rank_with_other_data_is_named_before_anything_is_created(tmp_path):
    """Rank 1 holds out validation images."""
    given = ["train", "--out", str(tmp_path / "run"), *flags(**SETTINGS | {"devices": 2})]
    port = free_port()
    ranks = [
        start(command_with_errors_in, rank, 2, port, [*given, *extra], tmp_path)
        for rank, extra in enumerate(([], ["--set", "select_on=val"]))
    ]
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 2
    assert "rank 1 has different data than rank 0" in (tmp_path / "stderr0").read_text()
    assert not (tmp_path / "run").exists()


def test_ranks_whose_weights_differ_end_with_one_line(tmp_path):
    """A weight of rank 1 changes by 1e-6 after 50 updates; checksums are compared after 101."""
    out = tmp_path / "run"
    given = flags(**SETTINGS | {"epochs": 100, "devices": 2, "method__name": "magnitude"})
    arguments = ["train", "--out", str(out), "--quiet", *given]
    ranks = start_ranks(command_with_a_changed_weight, arguments, tmp_path)
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 1
    printed = (tmp_path / "stderr0").read_text()
    (line,) = re.findall("^probmask: .*$", printed, re.MULTILINE)
    assert re.search("after 101 updates, rank [01] differs from the other ranks in features", line)
    assert "Traceback" not in printed
    assert (out / "checkpoint.safetensors").exists()
