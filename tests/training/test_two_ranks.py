"""Two ranks on one machine: different noise and images, the same network on both."""

import json
import signal
import subprocess
import sys

import pytest
import torch

from probmask.artifact import load_state
from probmask.training.checkpoint import read_checkpoint
from training.ranks import command, finish, some_updates, start_ranks
from training.small import METHOD_OF_FORM, SIZE, flags, lines, small, wait_until

SETTINGS = {
    "epochs": 6,
    "batch_size": 128,
    "devices": 2,
    "strategy": "ddp",
    "accelerator": "cpu",
    "method__sparsity": 0.9,
}
KEEP = SIZE - round(0.9 * SIZE)


@pytest.fixture(scope="module", params=["tied", "learned"])
def updates(tmp_path_factory, request):
    out = tmp_path_factory.mktemp("updates")
    config = small(**SETTINGS | {"epochs": 1, "method__name": METHOD_OF_FORM[request.param]})
    finish(start_ranks(some_updates, config, out))
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_every_rank_has_its_own_noise_and_its_own_images(updates):
    for kind in ("noise", "images"):
        for ours, theirs in zip(updates[0][kind], updates[1][kind], strict=True):
            ours, theirs = (x if isinstance(x, list) else [x] for x in (ours, theirs))
            assert not any(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_probabilities_and_weights_are_the_same_on_both_after_every_update(updates):
    assert len(updates[0]["states"]) == 11
    for ours, theirs in zip(updates[0]["states"], updates[1]["states"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    last = updates[0]["states"][-1]
    probs = [tensor for name, tensor in last.items() if name.endswith(".prob")]
    assert not probs or any(((prob > 0) & (prob < 1)).any() for prob in probs)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of the command, which launches the second rank itself."""
    out = tmp_path_factory.mktemp("straight") / "run"
    arguments = ["train", "--out", str(out), "--json", *flags(**SETTINGS)]
    done = subprocess.run(
        [sys.executable, "-m", "probmask.cli", *arguments],
        capture_output=True,
        timeout=120,
        text=True,
    )
    return out, done


def test_two_ranks_write_one_record_with_the_exact_budget(straight):
    out, done = straight
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    record = json.loads((out / "record.json").read_text())
    assert record["kept"] == KEEP
    assert record["hardware"]["devices"] == 2
    assert len(list(out.rglob("record.json"))) == 1
    assert lines(out / "metrics.jsonl") == 6
    state = load_state(out / "model.safetensors")
    kept = sum(int(state[layer["name"]].count_nonzero()) for layer in record["layers"])
    assert kept == KEEP


def test_only_the_first_rank_prints_the_result(straight):
    out, done = straight
    printed = json.loads(done.stdout)
    assert printed["run"] == json.loads((out / "record.json").read_text())


def test_the_table_is_printed_once(straight):
    out, _ = straight
    done = subprocess.run(
        [sys.executable, "-m", "probmask.cli", "train", "--resume", str(out)],
        capture_output=True,
        timeout=120,
        text=True,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stdout.count("test accuracy") == 1


def test_killed_and_resumed_on_two_ranks_the_result_is_the_same(tmp_path, straight):
    out = tmp_path / "run"
    settings = flags(**SETTINGS, checkpoint_seconds=0)
    ranks = start_ranks(command, ["train", "--out", str(out), *settings])
    wait_until(lambda: lines(out / "metrics.jsonl") >= 2, ranks[0])
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * 2
    assert 0 < read_checkpoint(out / "checkpoint.safetensors")["step"] < 66
    finish(start_ranks(command, ["train", "--resume", str(out), "--json"]))
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / name).read_bytes() == (straight[0] / name).read_bytes(), name


def test_wrong_input_prints_one_line_on_two_ranks(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("mine")
    arguments = ["train", "--out", str(tmp_path / "run"), *flags(**SETTINGS)]
    done = subprocess.run(
        [sys.executable, "-m", "probmask.cli", *arguments],
        capture_output=True,
        timeout=120,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("is already in use") == 1
    assert "Traceback" not in done.stderr
