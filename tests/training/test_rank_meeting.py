"""Ranks of several nodes agree on the run that they continue, or end with one message."""

import shutil

import pytest

from training.ranks import command, command_on_node, finish, free_port, run_until, start_ranks
from training.small import flags, start

SETTINGS = {
    "epochs": 4,
    "batch_size": 128,
    "devices": 2,
    "accelerator": "cpu",
    "checkpoint_seconds": 0,
    "method__sparsity": 0.9,
}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    out = tmp_path_factory.mktemp("unfinished") / "run"
    run_until(["train", "--out", str(out), *flags(**SETTINGS)], 7, ranks=2)
    return out


def train_on_nodes(directory, arguments, restarts=(0, 0)):
    """Run one command per node; return the exit codes and the lines that probmask has printed."""
    port = free_port()
    nodes = [
        start(command_on_node, rank, 2, port, ["train", *given, "--quiet"], directory, count)
        for rank, (given, count) in enumerate(zip(arguments, restarts, strict=True))
    ]
    for node in nodes:
        node.join(120)
    printed = [
        [line for line in (directory / f"stderr{rank}").read_text().splitlines() if line]
        for rank in range(2)
    ]
    return [node.exitcode for node in nodes], printed


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_directory_that_the_nodes_do_not_share_is_one_message(unfinished, tmp_path, restarts):
    ours, theirs = shutil.copytree(unfinished, tmp_path / "ours"), tmp_path / "theirs"
    if restarts:
        arguments = [["--out", str(out), *flags(**SETTINGS)] for out in (ours, theirs)]
    else:
        arguments = [["--resume", str(out)] for out in (ours, theirs)]
    codes, printed = train_on_nodes(tmp_path, arguments, [restarts] * 2)
    assert codes == [2, 2]
    for lines in printed:
        assert len(lines) == 1
        assert f"--resume {ours}: rank 0 on " in lines[0]
        assert f"finds no run in {theirs}; a run resumes from a directory on a file" in lines[0]
    assert not theirs.exists()


def test_nodes_with_different_numbers_of_restarts_continue_the_run(unfinished, tmp_path):
    """With ``--rdzv-backend=c10d`` every node counts its own restarts."""
    straight, out = tmp_path / "straight", shutil.copytree(unfinished, tmp_path / "run")
    finish(start_ranks(command, ["train", "--out", str(straight), *flags(**SETTINGS)]))
    arguments = ["--out", str(out), *flags(**SETTINGS)]
    codes, printed = train_on_nodes(tmp_path, [arguments, arguments], [0, 1])
    assert codes == [0, 0], printed
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name
