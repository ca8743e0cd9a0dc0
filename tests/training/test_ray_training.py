"""Training on the workers of a Ray cluster: the same run as on local ranks, also after a kill."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from probmask.training.ray_training import rank_variables, worker_resources
from probmask.training.ray_worker import Place
from training.ranks import command, free_port
from training.small import flags, lines, small, start

# A process imports PyTorch and Ray, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(900)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (probmask[ray])"
)
SETTINGS = {
    "epochs": 40,
    "batch_size": 128,
    "devices": 2,
    "strategy": "ddp",
    "accelerator": "cpu",
    "method__sparsity": 0.9,
    "checkpoint_seconds": 0.2,
}
HEAD = """
from probmask.training.ray_connection import connected
with connected("local", cores=2) as ray:
    print(ray.get_runtime_context().gcs_address, flush=True)
    input()
"""


def environment(token):
    return os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


@pytest.fixture(scope="module")
def cluster():
    """Start a cluster; return its address and a token that only its own processes have."""
    token = str(uuid.uuid4())
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(token),
        text=True,
    )
    assert head.stdout is not None
    yield head.stdout.readline().strip(), token
    with suppress(subprocess.TimeoutExpired):
        head.communicate("\n", timeout=60)
    head.kill()


def start_training(cluster, out, log, **settings):
    """Start the command on the cluster; its messages go to ``log``."""
    address, token = cluster
    arguments = ["train", "--ray", address, "--out", str(out), *flags(**SETTINGS | settings)]
    with log.open("w") as messages:
        return subprocess.Popen(
            [sys.executable, "-m", "probmask.cli", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env=environment(token),
        )


def workers(token):
    """Return the ids of the cluster's processes that train."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_bytes()
            if (
                title.startswith(b"ray::RayWorker")
                and token.encode() in (process / "environ").read_bytes()
            ):
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return sorted(found)


def new_workers(cluster, old, training, log):
    """Return the two workers that have taken the place of the old ones."""
    while len(found := [each for each in workers(cluster[1]) if each not in old]) < 2:
        assert training.poll() is None, log.read_text()
        time.sleep(0.01)
    return found


@pytest.mark.slow
@needs_ray
def test_lost_workers_change_nothing_in_the_result(cluster, tmp_path):
    """One is killed in training, one while the workers start again, and one is stopped."""
    port = free_port()
    plain, out, log = tmp_path / "plain", tmp_path / "ray", tmp_path / "log"
    training = start_training(cluster, out, log, timeout_seconds=10)
    arguments = ["train", "--out", str(plain), *flags(**SETTINGS | {"timeout_seconds": 10})]
    ranks = [start(command, rank, 2, port, arguments) for rank in range(2)]
    wait_for_lines(2, out, training, log)
    first = workers(cluster[1])
    os.kill(first[1], signal.SIGKILL)
    second = new_workers(cluster, first, training, log)
    os.kill(second[0], signal.SIGKILL)
    third = new_workers(cluster, [*first, *second], training, log)
    wait_for_lines(lines(out / "metrics.jsonl") + 2, out, training, log)
    os.kill(third[1], signal.SIGSTOP)
    assert training.wait(800) == 0, log.read_text()
    printed = [line for line in log.read_text().splitlines() if "warning" in line]
    assert len(printed) == 3, printed
    assert all("all workers start again from the last checkpoint" in line for line in printed)
    named = [set(re.findall(r"rank \d(?= on| has not)", line)) for line in printed]
    assert len(named[0]) == len(named[2]) == 1, printed
    for rank in ranks:
        rank.join(800)
    for name in ("model.safetensors", "metrics.jsonl", "config.toml"):
        assert (out / name).read_bytes() == (plain / name).read_bytes(), name
    assert (out / "record.json").exists()
    assert not (out / "checkpoint.safetensors").exists()


def wait_for_lines(count, out, training, log):
    while lines(out / "metrics.jsonl") < count:
        assert training.poll() is None, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("devices", 4, "but the cluster has 2 CPU; use fewer --devices"),
        ("exclude", '["*"]', "there is nothing to mask"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_no_directory(key, value, message, cluster, tmp_path):
    out, log = tmp_path / "run", tmp_path / "log"
    assert start_training(cluster, out, log, **{key: value}).wait(800) == 2
    assert message in log.read_text()
    assert lines(log) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "groups", "gpus"),
    [
        ("aabb", "0101", "0011", ["2,0", "2,0", "1,3", "1,3"]),
        ("aab", "000", "012", ["2", "0", "1"]),  # Fabric accepts no uneven nodes
    ],
)
def test_ranks_are_numbered_as_by_torchrun(nodes, local_ranks, groups, gpus):
    pairs = zip(nodes, "2013", strict=False)
    found = rank_variables([Place(node, "10.0.0.1", (gpu,), "/run") for node, gpu in pairs])
    assert [int(each["RANK"]) for each in found] == list(range(len(nodes)))
    assert "".join(each["LOCAL_RANK"] for each in found) == local_ranks
    assert "".join(each["GROUP_RANK"] for each in found) == groups
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == gpus
    sizes = {int(each["LOCAL_WORLD_SIZE"]) * int(each["GROUP_WORLD_SIZE"]) for each in found}
    assert sizes == {len(nodes)}


def test_a_worker_reserves_its_threads_and_a_gpu_if_there_are_enough():
    auto = small(threads=2, accelerator="auto", devices=2)
    assert worker_resources(small(threads=2), {"GPU": 4}) == {"CPU": 2}
    assert worker_resources(auto, {"GPU": 1}) == {"CPU": 2}
    assert worker_resources(auto, {"GPU": 2}) == {"CPU": 2, "GPU": 1}
