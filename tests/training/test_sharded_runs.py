"""Runs whose weights FSDP2 divides, and runs that change their number of ranks."""

import json
import re
import shutil

import pytest
import torch

from probmask.artifact import load_state
from probmask.training.checkpoint import read_checkpoint
from probmask.training.shard_files import read_rows
from training.ranks import (
    DIED,
    command,
    command_that_dies_restoring,
    finish,
    restored_state,
    run_until,
    start_ranks,
)
from training.small import SIZE, flags, small

SETTINGS = {
    "epochs": 4,
    "batch_size": 128,
    "devices": 2,
    "strategy": "fsdp",
    "accelerator": "cpu",
    "method__name": "probmask",
    "method__sparsity": 0.9,
    "checkpoint_seconds": 0,
    "optimizer__clip_norm": 1.0,
}
KEEP = SIZE - round(0.9 * SIZE)
STOPS = (7, 19, 31)  # of 44 updates


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    finish(start_ranks(command, ["train", "--out", str(out), *flags(**SETTINGS)]))
    return out


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that died three times and was resumed twice; its directories after every death."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    arguments = ["train", "--out", str(out), *flags(**SETTINGS)]
    directories = []
    for step in STOPS:
        run_until(arguments, step, ranks=2)
        arguments = ["train", "--resume", str(out)]
        directories.append(shutil.copytree(out, out.parent / str(step)))
    return directories


def test_a_sharded_run_writes_one_artifact_with_the_exact_budget(straight):
    record = json.loads((straight / "record.json").read_text())
    assert record["kept"] == KEEP
    assert record["hardware"]["devices"] == 2
    assert record["test"]["total"] == 355
    state = load_state(straight / "model.safetensors")
    assert sum(int(state[layer["name"]].count_nonzero()) for layer in record["layers"]) == KEEP


def test_a_sharded_run_that_died_three_times_ends_with_the_same_bits(straight, stopped, tmp_path):
    out = shutil.copytree(stopped[-1], tmp_path / "run")
    finish(start_ranks(command, ["train", "--resume", str(out)]))
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name


def test_a_rank_that_dies_while_it_restores_is_named(stopped, tmp_path):
    """The checkpoint is not blamed for the messages that fail."""
    out = shutil.copytree(stopped[0], tmp_path / "run")
    ranks = start_ranks(command_that_dies_restoring, ["train", "--resume", str(out)], tmp_path)
    for rank, code in zip(ranks, (1, DIED), strict=True):
        rank.join(120)
        assert rank.exitcode == code
    (line,) = re.findall("^probmask: .*$", (tmp_path / "stderr0").read_text(), re.MULTILINE)
    assert "rank 1 does not respond to rank 0" in line


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "ddp"), (4, "fsdp")])
def test_a_checkpoint_is_restored_on_any_number_of_ranks(stopped, tmp_path, ranks, strategy):
    """Weights, momenta, probabilities and masks are the same bits as before."""
    config = small(**SETTINGS | {"devices": ranks, "strategy": strategy})
    finish(start_ranks(restored_state, config, stopped[1], tmp_path, ranks=ranks))
    found = read_checkpoint(tmp_path / f"{ranks}.safetensors")
    path = stopped[1] / "checkpoint.safetensors"
    expected = read_rows(read_checkpoint(path), path)
    for key in ("model", "optimizer", "sparsifier", "step"):
        assert equal(found[key], expected[key]), key
    assert torch.allclose(found["sums"].sum(0), expected["sums"].sum(0), rtol=1e-12)


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


CHANGING = {
    "model": "conv4",  # without BatchNorm, whose statistics depend on the batch of a rank
    "epochs": 8,
    "batch_size": 128,
    "accelerator": "cpu",
    "checkpoint_seconds": 0,
    "method__sparsity": 0.5,
    "optimizer__lr": 0.05,
    "model_args__width": 16,
}


def test_the_loss_on_1_2_4_and_1_ranks_is_that_of_an_undisturbed_run(tmp_path):
    """Sums are rounded in another order, which training magnifies to percents."""
    still, out = tmp_path / "still", tmp_path / "changing"
    given = ["train", *flags(**CHANGING)]
    finish(start_ranks(command, [*given, "--out", str(still)], ranks=1))
    arguments = [*given, "--out", str(out)]
    for ranks, strategy, step in ((1, "auto", 20), (2, "fsdp", 42), (4, "ddp", 64)):
        run_until([*arguments, "--devices", str(ranks), "--strategy", strategy], step, ranks=ranks)
        arguments = ["train", "--resume", str(out)]
    finish(start_ranks(command, [*arguments, "--devices", "1", "--strategy", "auto"], ranks=1))
    curves = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (still, out)
    ]
    assert curves[0][-1] < 0.9 * curves[0][0]  # it learns
    assert curves[1] == pytest.approx(curves[0], rel=0.1)
    kept = [json.loads((run / "record.json").read_text())["kept"] for run in (still, out)]
    assert kept[0] == kept[1]
