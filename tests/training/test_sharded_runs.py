"""Runs whose weights FSDP2 divides, and runs that change their number of ranks."""

import json
import re
import resource
import shutil
import sys

import pytest
import torch

import probmask
from probmask.artifact import load_state
from probmask.errors import CheckpointError
from probmask.training.checkpoint import read_checkpoint
from probmask.training.shard_files import read_rows
from training.ranks import (
    DIED,
    command,
    command_that_dies_restoring,
    command_with_errors_in,
    finish,
    restored_state,
    run_until,
    start_ranks,
)
from training.small import SIZE, flags, lines, small, wait_until

SETTINGS = {
    "epochs": 4,
    "batch_size": 256,
    "devices": 2,
    "strategy": "fsdp",
    "accelerator": "cpu",
    "method__name": "probmask",
    "method__sparsity": 0.9,
    "checkpoint_seconds": 0,
    "optimizer__clip_norm": 1.0,
}
ONE_RANK = {"devices": 1, "strategy": "auto"}
KEEP = SIZE - round(0.9 * SIZE)
STOPS = (4, 9, 15)  # of 20 updates


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
        run_until(arguments, step, ranks=2, complete=step != STOPS[0])
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


def test_the_ranks_write_their_own_rows_and_an_incomplete_checkpoint_is_not_used(stopped):
    """The first death was after the rows of a checkpoint were written, and before the rest.

    The others were right after a checkpoint, before the earlier one was deleted.
    """
    for directory, step in zip(stopped, (STOPS[0] - 1, *STOPS[1:]), strict=True):
        assert read_checkpoint(directory / "checkpoint.safetensors")["step"] == step
        written = [sorted(each.iterdir()) for each in directory.glob("checkpoint-*")]
        assert len(written) == 2
        assert all(len(files) == 2 for files in written)
        sizes = [file.stat().st_size for file in written[0]]
        assert max(sizes) < 1.1 * min(sizes)


def test_damaged_rows_are_one_error(stopped, tmp_path):
    out = shutil.copytree(stopped[1], tmp_path / "run")
    paths = list(
        out.glob("checkpoint-*/*2-*.safetensors")
    )  # of this checkpoint and the earlier one
    for path in paths:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="do not match their digest"):
        probmask.train(out=out, resume=True, config=small(**SETTINGS | ONE_RANK))
    for path in paths:
        path.unlink()
    with pytest.raises(CheckpointError, match="do not match their digest"):
        probmask.train(out=out, resume=True, config=small(**SETTINGS | ONE_RANK))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the files of another process")
def test_a_rank_that_cannot_write_its_rows_ends_the_run_and_loses_nothing(straight, tmp_path):
    """The system refuses the file of rank 1, as a full disk does."""
    out = tmp_path / "run"
    given = ["train", "--out", str(out), "--quiet", *flags(**SETTINGS)]
    ranks = start_ranks(command_with_errors_in, given, tmp_path)
    wait_until(lambda: lines(out / "metrics.jsonl") >= 1, ranks[0])
    unlimited = resource.RLIM_INFINITY
    resource.prlimit(ranks[1].pid, resource.RLIMIT_FSIZE, (1000, unlimited))
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode == 1
    (line,) = re.findall("^probmask: .*$", (tmp_path / "stderr0").read_text(), re.MULTILINE)
    assert "File too large (rank 1)" in line
    assert len(list(out.glob("checkpoint-*"))) == 1
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
    # Without BatchNorm, whose statistics depend on the batch of a rank. With fp64 weights, since
    # training magnifies differences: in fp32, rounding alone grows to 1e-3 within eight epochs.
    "model": "training.small:conv4_in_double",
    "epochs": 4,
    "batch_size": 256,
    "accelerator": "cpu",
    "checkpoint_seconds": 0,
    "method__sparsity": 0.5,
    "optimizer__lr": 0.05,
    "model_args__width": 16,
}


@pytest.mark.parametrize(
    ("method", "strategies"),
    # With DDP, probmask-tied bounds gradients by the RMS over a rank's part of the batch.
    [("probmask-tied", ("fsdp", "fsdp")), ("gmp", ("fsdp", "ddp"))],
)
def test_the_loss_on_1_2_4_and_1_ranks_is_that_of_an_undisturbed_run(tmp_path, method, strategies):
    """Sums are rounded in another order: by 1e-16, which grows to 1e-12."""
    still, out = tmp_path / "still", tmp_path / "changing"
    given = ["train", *flags(**CHANGING, method__name=method)]
    finish(start_ranks(command, [*given, "--out", str(still)], ranks=1))
    arguments = [*given, "--out", str(out)]
    for ranks, strategy, step in zip((1, 2, 4), ("auto", *strategies), (5, 11, 16), strict=True):
        run_until([*arguments, "--devices", str(ranks), "--strategy", strategy], step, ranks=ranks)
        arguments = ["train", "--resume", str(out)]
    finish(start_ranks(command, [*arguments, "--devices", "1", "--strategy", "auto"], ranks=1))
    curves = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (still, out)
    ]
    assert curves[0][-1] < 0.95 * curves[0][0]  # it learns
    assert curves[1] == pytest.approx(curves[0], rel=1e-10)
    masks = [load_state(run / "model.safetensors") for run in (still, out)]
    for name, tensor in masks[0].items():
        assert torch.equal(tensor != 0, masks[1][name] != 0), name
