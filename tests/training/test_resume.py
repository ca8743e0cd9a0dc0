"""Resuming: a run killed at any moment gives the result of an uninterrupted one."""

import errno
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from probmask.cli import main
from probmask.errors import CheckpointError, InputError, RestartWarning, VersionWarning
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.metrics import MetricsLog
from probmask.training.record import versions
from probmask.training.run_directory import RunDirectory
from probmask.training.trainer import train
from training.small import (
    Stopped,
    flags,
    kill_when,
    lines,
    small,
    snapshot,
    start,
    start_command,
    stop_after_checkpoint,
    try_lock,
    wait_until,
)

# 66 updates, enough to be killed in between.
LONG = {"epochs": 6, "batch_size": 128, "method__sparsity": 0.9}
# 20 updates; the mask is frozen at the end, or around the thirteenth update.
BRIEF = {"epochs": 4, "batch_size": 280, "method__sparsity": 0.9}
KINDS = {
    "tied": BRIEF,
    "tied, frozen": BRIEF | {"method__freeze_at": 0.6},
    "learned": BRIEF | {"method__name": "probmask"},
}


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """The long run, uninterrupted."""
    return train(small(**LONG), out=tmp_path_factory.mktemp("long")).directory


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    """The brief run, uninterrupted."""
    return train(small(**BRIEF), out=tmp_path_factory.mktemp("brief")).directory


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    """The settings of a brief run of each kind, and the uninterrupted run."""
    settings = KINDS[request.param]
    return settings, train(small(**settings), out=tmp_path_factory.mktemp("kind")).directory


def assert_same_run(directory, whole):
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (directory / name).read_bytes() == (whole / name).read_bytes(), name
    left = {path.name for path in directory.iterdir() if path.name != ".lock"}
    assert left == {"config.toml", "metrics.jsonl", "model.safetensors", "record.json"}


def killed(out, ready, *, delay=0.0, every=0.0):
    """Start the run and kill it; return the step of its checkpoint, or None."""
    settings = flags(**LONG, checkpoint_seconds=every)
    process = start_command("train", "--out", str(out), *settings)
    kill_when(process, lambda: ready(out), delay=delay)
    assert not (out / "record.json").exists()
    return step_of(out)


def step_of(out):
    checkpoint = out / "checkpoint.safetensors"
    return read_checkpoint(checkpoint)["step"] if checkpoint.exists() else None


def has_checkpoint(out):
    return (out / "checkpoint.safetensors").exists()


@pytest.mark.filterwarnings("default::probmask.errors.RestartWarning")
def test_killed_before_the_first_checkpoint(tmp_path, long):
    out = tmp_path / "run"
    step = killed(out, lambda out: lines(out / "metrics.jsonl") >= 2, every=3600)
    assert step is None
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert_same_run(out, long)


def test_killed_repeatedly_at_random_moments(tmp_path, long):
    out, chance = tmp_path / "run", random.Random(0)
    steps = [killed(out, has_checkpoint, delay=chance.uniform(0, 0.2))]
    for _ in range(2):
        before = (out / "checkpoint.safetensors").stat().st_mtime_ns
        process = start_command("train", "--resume", str(out))
        kill_when(
            process,
            lambda before=before: (out / "checkpoint.safetensors").stat().st_mtime_ns != before,
            delay=chance.uniform(0, 0.02),
        )
        steps.append(step_of(out))
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1] <= 66
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert_same_run(out, long)


def test_killed_after_the_mask_was_frozen(tmp_path, long):
    out = tmp_path / "run"
    step = killed(out, lambda out: lines(out / "metrics.jsonl") >= 5)
    assert step >= 54
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert_same_run(out, long)


@pytest.mark.parametrize("stop", [2, 5, 12, 13, 14, 20])
def test_resuming_from_any_step_gives_the_same_result(tmp_path, kind, monkeypatch, stop):
    """Steps before, at and after freezing, at the end of an epoch, and the last step."""
    out = tmp_path / "run"
    settings, whole = kind
    stop_after_checkpoint(monkeypatch, stop)
    with pytest.raises(Stopped):
        train(small(**settings, checkpoint_seconds=0), out=out)
    monkeypatch.undo()
    assert step_of(out) == stop
    train(out=out, resume=True)
    assert_same_run(out, whole)


@pytest.mark.parametrize(
    "settings",
    [
        {"method__name": "probmask", "method__recipe": "paper"},
        {"method__scope": "layer", "method__forget_by": 1},
        {"method__name": "probmask", "method__draws": 2},
        {"method__name": "probmask", "method__compat": "official", "method__scope": "layer"},
        {"method__name": "probmask", "method__train_weights": False},
        {"method__name": "probmask", "method__select": "sample", "method__freeze_at": 1.0},
        {"precision": "bf16-mixed", "optimizer__nesterov": True, "optimizer__every": "epoch"},
        {"optimizer__name": "adamw", "optimizer__lr": 0.002, "optimizer__ham": True},
        {"method__name": "dense", "method__sparsity": 0},
    ],
)
def test_other_settings_resume_exactly(tmp_path, monkeypatch, settings):
    config = small(**{"epochs": 3, "method__sparsity": 0.9} | settings, checkpoint_seconds=0)
    straight = train(config, out=tmp_path / "straight").directory
    stop_after_checkpoint(monkeypatch, 7)
    with pytest.raises(Stopped):
        train(config, out=tmp_path / "run")
    monkeypatch.undo()
    train(out=tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", straight)


def test_killed_within_the_dense_twin(tmp_path):
    settings = {"epochs": 4, "dense_twin": True, "method__sparsity": 0.9}
    straight = train(small(**settings), out=tmp_path / "straight").directory
    out = tmp_path / "run"
    process = start_command("train", "--out", str(out), *flags(**settings, checkpoint_seconds=0))
    kill_when(process, lambda: lines(out / "dense" / "metrics.jsonl") >= 1)
    assert not (out / "dense" / "record.json").exists()
    assert main(["train", "--resume", str(out), "--json"]) == 0
    for name in ("model.safetensors", "metrics.jsonl"):
        for part in (".", "dense"):
            ours, theirs = (root / part / name for root in (out, straight))
            assert ours.read_bytes() == theirs.read_bytes()


def test_killed_between_the_record_and_the_end_leaves_no_checkpoint(tmp_path, brief, monkeypatch):
    out = tmp_path / "run"
    unlink = os.unlink

    def stop(path, *arguments, **options):
        if str(path).endswith("checkpoint.safetensors"):
            raise Stopped
        unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "unlink", stop)
    with pytest.raises(Stopped):
        train(small(**BRIEF, checkpoint_seconds=0), out=out)
    monkeypatch.undo()
    train(out=out, resume=True)
    assert_same_run(out, brief)


def test_killed_between_the_artifact_and_the_record(tmp_path, brief, monkeypatch):
    out = tmp_path / "run"

    def stop(*_):
        raise Stopped

    monkeypatch.setattr("probmask.training.run_directory.RunDirectory.write_record", stop)
    with pytest.raises(Stopped):
        train(small(**BRIEF), out=out)
    monkeypatch.undo()
    assert (out / "model.safetensors").exists()
    with pytest.warns(RestartWarning):  # the run was shorter than the time between checkpoints
        train(out=out, resume=True)
    assert_same_run(out, brief)


def test_killed_before_the_configuration_was_written_the_same_command_starts_again(tmp_path, brief):
    """An incomplete temporary file must not make the directory count as used."""
    out = tmp_path / "run"
    out.mkdir()
    (out / ".probmask-0123456789abcdef.tmp").write_bytes(b'data = "dig')
    train(small(**BRIEF), out=out)
    assert_same_run(out, brief)


def test_an_incomplete_temporary_file_is_removed(tmp_path, brief, monkeypatch):
    out = tmp_path / "run"
    stop_after_checkpoint(monkeypatch, 9)
    with pytest.raises(Stopped):
        train(small(**BRIEF, checkpoint_seconds=0), out=out)
    monkeypatch.undo()
    good = (out / "checkpoint.safetensors").read_bytes()
    (out / ".probmask-0123456789abcdef.tmp").write_bytes(good[: len(good) // 2])
    train(out=out, resume=True)
    assert_same_run(out, brief)


def full_disk(monkeypatch, after):
    """Let ``after`` calls of fsync succeed, then raise that the disk is full."""
    calls, plain = itertools.count(1), os.fsync

    def fsync(descriptor):
        if next(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(descriptor)

    monkeypatch.setattr("os.fsync", fsync)


@pytest.mark.parametrize(
    ("place", "named"),
    [("mkdir", "run"), ("fsync", "config.toml"), ("lock", ".lock")],
    ids=["directory", "configuration", "lock"],
)
def test_a_full_disk_at_the_start_exits_with_1_and_names_the_file(
    tmp_path, monkeypatch, capsys, place, named
):
    """Exit code 2 would blame the arguments."""
    target, plain_open = tmp_path / "run", os.open

    def full(path, *_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def open_all_but_the_lock(path, *arguments, **options):
        if str(path).endswith(".lock"):
            full(path)
        return plain_open(path, *arguments, **options)

    if place == "fsync":
        full_disk(monkeypatch, after=0)
    else:
        patched = {"mkdir": ("mkdir", full), "lock": ("open", open_all_but_the_lock)}
        monkeypatch.setattr(os, *patched[place])
    code = main(["train", "--quiet", "--out", str(target), *flags(**BRIEF)])
    monkeypatch.undo()
    error = capsys.readouterr().err
    assert code == 1, error
    assert error.count("\n") == 1
    assert "No space left on device" in error
    assert named in error
    assert ".tmp" not in error


@pytest.mark.parametrize("after", [20, 21])
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, brief, monkeypatch, capsys, after):
    """The disk is full when the file is synced, or when its directory is."""
    out = tmp_path / "run"
    full_disk(monkeypatch, after)
    code = main(["train", "--quiet", "--out", str(out), *flags(**BRIEF, checkpoint_seconds=0)])
    monkeypatch.undo()
    assert code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "No space left on device" in error
    assert "checkpoint.safetensors" in error
    assert not list(out.glob(".probmask-*"))
    assert 0 < step_of(out) < 20
    train(out=out, resume=True)
    assert_same_run(out, brief)


def test_a_full_disk_in_the_log_leaves_the_last_good_checkpoint(tmp_path, brief, monkeypatch):
    out = tmp_path / "run"

    def torn(self, step, values, histograms):
        if step > 10:
            self._file.write('{"step": 3')
            self._file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(self, step, values, histograms)

    plain = MetricsLog.write
    monkeypatch.setattr(MetricsLog, "write", torn)
    with pytest.raises(OSError, match="No space left"):
        train(small(**BRIEF, checkpoint_seconds=0), out=out)
    monkeypatch.undo()
    assert step_of(out) == 14
    train(out=out, resume=True)
    assert_same_run(out, brief)


def test_an_interrupt_prints_how_to_resume(tmp_path, brief, capsys, monkeypatch):
    out = tmp_path / "run"

    def interrupted(path, state):
        write_checkpoint(path, state)
        if state["step"] == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr("probmask.training.run.write_checkpoint", interrupted)
    assert main(["train", "--out", str(out), *flags(**BRIEF, checkpoint_seconds=0)]) == 130
    monkeypatch.undo()
    assert f"--resume {out} continues" in capsys.readouterr().err
    train(out=out, resume=True)
    assert_same_run(out, brief)


def test_a_finished_run_is_returned_unchanged_from_read_only_media(brief, capsys, monkeypatch):
    """Even if the data is gone."""
    before, plain_open = snapshot(brief), os.open

    def read_only(path, flags, *arguments, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return plain_open(path, flags, *arguments, **options)

    def cannot_unlink(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "unlink", cannot_unlink)
    monkeypatch.setattr("probmask.training.trainer.load_run_data", cannot_unlink)
    assert main(["train", "--resume", str(brief), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["run"]
    assert printed == train(small(**BRIEF), out=brief, resume=True).record
    assert printed["updates"] == 20
    assert snapshot(brief) == before


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"epochs": 7}, "epochs = 7 differs from the run's 4"),
        ({"seed": 1}, "seed = 1 differs from the run's 0"),
        ({"method__sparsity": 0.8}, "method = .*0.8.* differs from the run's .*0.9"),
        ({"optimizer__lr": 0.2}, "optimizer = .* differs"),
    ],
)
def test_resuming_with_other_settings_raises(brief, changed, expected):
    before = snapshot(brief)
    with pytest.raises(InputError, match=expected) as caught:
        train(small(**BRIEF | changed), out=brief, resume=True)
    assert "\n" not in str(caught.value)
    assert snapshot(brief) == before


def test_checkpoints_may_be_written_more_often(brief):
    train(small(**BRIEF, checkpoint_seconds=1), out=brief, resume=True)


def test_only_the_flags_given_with_resume_are_compared(brief, capsys):
    """`--resume DIR --seed 0` agrees with a run of seed 0, whatever the defaults are."""
    assert main(["train", "--resume", str(brief), "--seed", "0", "--json"]) == 0
    assert main(["train", "--resume", str(brief), "--seed", "5", "--json"]) == 2
    assert "seed = 5 differs from the run's 0" in capsys.readouterr().err


@pytest.mark.parametrize("make", ["nothing", "empty", "file"])
def test_resuming_a_directory_without_a_run_raises(tmp_path, make):
    out = tmp_path / "out"
    if make == "empty":
        out.mkdir()
    elif make == "file":
        out.write_text("a file")
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match=r"out: contains no run \(no config\.toml\)"):
        train(out=out, resume=True)
    assert snapshot(tmp_path) == before


def test_resume_without_a_directory_raises():
    with pytest.raises(InputError, match="which run"):
        train(resume=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after_checkpoint(monkeypatch, 12)
        with pytest.raises(Stopped):
            train(small(**BRIEF, checkpoint_seconds=0), out=out)
    return out


@pytest.fixture
def unfinished(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "copy"))


@pytest.mark.parametrize("damage", ["zeros", "halved", "emptied", "deleted", "longer"])
def test_a_damaged_log_is_restored_from_the_checkpoint(unfinished, brief, damage):
    """The log is not synced with the checkpoint: after a power failure it can have any content."""
    path = unfinished / "metrics.jsonl"
    content = path.read_bytes()
    damaged = {
        "zeros": bytes(len(content)),
        "halved": content[: len(content) // 2],
        "emptied": b"",
        "longer": content + content + b'{"epo',
    }
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(damaged[damage])
    record = train(out=unfinished, resume=True).record
    assert [line["epoch"] for line in record["history"]] == [1, 2, 3, 4]
    assert_same_run(unfinished, brief)


def test_a_diverging_run_keeps_the_last_finite_checkpoint_and_names_it(tmp_path, capsys):
    out = tmp_path / "run"
    diverging = flags(method__name="snip", optimizer__lr=1e30, checkpoint_seconds=0)
    assert main(["train", "--quiet", "--out", str(out), *diverging]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "lower optimizer.lr" in error
    assert f"The last finite checkpoint is {out / 'checkpoint.safetensors'}." in error
    state = read_checkpoint(out / "checkpoint.safetensors")
    tensors = [*state["model"].values(), state["sums"]]
    tensors += [each["momentum_buffer"] for each in state["optimizer"]["state"].values()]
    assert all(tensor.isfinite().all() for tensor in tensors)
    assert not (out / "record.json").exists()


def test_weights_that_only_the_last_update_makes_infinite_are_not_a_result(tmp_path):
    """The loss of every update is finite."""
    huge = {"optimizer__lr": 1e30, "optimizer__weight_decay": 1e30}
    config = small(epochs=1, batch_size=1442, method__name="snip", **huge)
    with pytest.raises(ArithmeticError, match=r"update 1: .* is not finite; lower optimizer\.lr"):
        train(config, out=tmp_path / "run")
    assert not (tmp_path / "run" / "record.json").exists()


@pytest.mark.filterwarnings("always::probmask.errors.VersionWarning")
def test_a_resume_under_other_versions_warns_and_is_recorded(unfinished, capsys):
    path = unfinished / "checkpoint.safetensors"
    state = read_checkpoint(path)
    assert state["versions"] == [versions()]
    old = {**versions(), "torch": "1.0"}
    write_checkpoint(path, {**state, "versions": [old]})
    assert main(["train", "--resume", str(unfinished), "--quiet"]) == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{path}: was written with torch 1.0 (now {torch.__version__}); the result may" in error
    record = json.loads((unfinished / "record.json").read_text())
    assert (record["versions"], record["earlier_versions"]) == (versions(), [old])


def test_the_versions_of_all_sessions_are_kept(unfinished, monkeypatch):
    """Those of a session that was killed too."""
    path = unfinished / "checkpoint.safetensors"
    old = [{"probmask": "0.1"}, {"probmask": "0.2"}]
    write_checkpoint(path, {**read_checkpoint(path), "versions": old})
    config = small(**BRIEF, checkpoint_seconds=0)
    stop_after_checkpoint(monkeypatch, 15)
    with pytest.raises(Stopped), pytest.warns(VersionWarning):
        train(config, out=unfinished, resume=True)
    monkeypatch.undo()
    assert read_checkpoint(path)["versions"] == [*old, versions()]
    assert train(config, out=unfinished, resume=True).record["earlier_versions"] == old


def test_a_finished_run_whose_configuration_was_edited_raises(brief, tmp_path):
    run = Path(shutil.copytree(brief, tmp_path / "run"))
    (run / "config.toml").write_text("")  # all defaults
    before = snapshot(run)
    with pytest.raises(
        InputError, match=r"finished with epochs = 4, but its config\.toml now says"
    ):
        train(out=run, resume=True)
    assert snapshot(run) == before


def test_without_a_checkpoint_the_training_begins_again_with_a_warning(unfinished, brief):
    (unfinished / "checkpoint.safetensors").unlink()
    with pytest.warns(RestartWarning, match="starts again from the first epoch"):
        train(out=unfinished, resume=True)
    assert_same_run(unfinished, brief)


def test_a_damaged_checkpoint_raises_and_nothing_changes(unfinished):
    path = unfinished / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = snapshot(unfinished)
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        train(out=unfinished, resume=True)
    assert snapshot(unfinished) == before


def test_a_checkpoint_of_another_run_raises(unfinished):
    path = unfinished / "checkpoint.safetensors"
    state = read_checkpoint(path)
    state["config"]["seed"] = 99
    write_checkpoint(path, state)
    with pytest.raises(CheckpointError, match="belongs to a run with another configuration"):
        train(out=unfinished, resume=True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s["model"].update(extra=torch.ones(1)), "model.extra is unknown"),
        (lambda s: s["model"].popitem(), "model.classifier.weight is missing"),
        (lambda s: s.update(step=21), "step is 21, expected a whole number from 0 to 20"),
        (lambda s: s.update(seconds=math.nan), "seconds is nan, expected a number from 0"),
        (lambda s: s.update(seconds="1"), "seconds is '1', expected a number"),
        (lambda s: s.update(sums=torch.ones(4)), r"sums is a tensor of shape \(4,\) and type"),
        (lambda s: s.update(unreadable=[1]), "unreadable is a list, expected a table"),
        (lambda s: s.update(versions={}), "versions is a table, expected a list"),
        (lambda s: s.update(log=s["log"] * 2), "log: does not have a line for each of the first 2"),
        (lambda s: s.update(log="{}\n{}\n"), "log: line 1 does not describe an epoch"),
        (lambda s: s["optimizer"]["state"].update({99: {}}), r"state\.99 belongs to no parameter"),
        (lambda s: s["optimizer"]["state"][0].clear(), r"state\.0\.momentum_buffer is missing"),
        (lambda s: s["sparsifier"].update(step=3), r"sparsifier\.step is 3, expected 12"),
        (
            lambda s: s["sparsifier"]["method"]["sites"][0]["values"].update(active=None),
            r"sites\.0\.values\.active is None, expected a tensor of shape \(8, 1, 3, 3\)",
        ),
        (
            lambda s: s["sparsifier"]["method"]["values"].update(_temperature="hot"),
            r"values\._temperature is 'hot', expected a number",
        ),
    ],
    ids=itertools.count(),
)
def test_a_field_of_the_wrong_type_shape_or_range_raises_with_its_name(
    unfinished, change, expected
):
    """As after a change of the code that builds the model, or by a stranger with a right digest."""
    path = unfinished / "checkpoint.safetensors"
    state = read_checkpoint(path)
    change(state)
    write_checkpoint(path, state)
    with pytest.raises(CheckpointError, match=expected) as caught:
        train(out=unfinished, resume=True)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_the_seconds_of_all_sessions_are_added_up(unfinished):
    before = read_checkpoint(unfinished / "checkpoint.safetensors")["seconds"]
    assert before > 0
    assert train(out=unfinished, resume=True).record["seconds"] > before


def test_the_killed_command_resumes_in_a_new_process(tmp_path, long):
    """The same with the command in a subprocess."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "probmask.cli", "train"]
    settings = flags(**LONG, checkpoint_seconds=0.01)
    process = subprocess.Popen([*command, "--out", str(out), *settings])
    try:
        wait_until(lambda: has_checkpoint(out), Alive(process))
    finally:
        process.kill()
        ended = process.wait()
    assert ended == -9
    assert 0 < step_of(out) < 66
    done = subprocess.run([*command, "--resume", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_run(out, long)


class Alive:
    """Adapts a `subprocess.Popen` to `wait_until`."""

    def __init__(self, process):
        self._process = process
        self.exitcode = None

    def is_alive(self):
        self.exitcode = self._process.poll()
        return self.exitcode is None


def test_a_lock_that_is_held_for_a_moment_does_not_stop_a_run(tmp_path):
    """`probmask watch` takes the lock for a moment to see whether a process is training."""
    lock = FileLock(tmp_path / ".lock", thread_local=False)
    lock.acquire()
    assert RunDirectory(tmp_path).busy
    threading.Timer(0.05, lock.release).start()
    with RunDirectory(tmp_path).locked():
        pass
    assert not RunDirectory(tmp_path).busy


HELD = "another process or thread is training in it"


def test_reading_the_run_or_another_thread_does_not_release_the_lock(tmp_path):
    """A lock of the whole process would be released by closing any file that reads it."""
    directory = RunDirectory(tmp_path)

    def try_to_lock():
        with pytest.raises(InputError, match=HELD), directory.locked():
            pass

    with directory.locked(), ThreadPoolExecutor(1) as other:
        assert directory.busy
        directory.lock.read_bytes()
        try_to_lock()
        other.submit(try_to_lock).result()
        process = start(try_lock, tmp_path)
        process.join()
        assert process.exitcode == 3
    process = start(try_lock, tmp_path)
    process.join()
    assert process.exitcode == 0


def test_two_processes_do_not_train_in_one_directory(tmp_path, capsys):
    """The second process raises; the first one continues."""
    out = tmp_path / "run"
    settings = flags(**LONG | {"epochs": 600}, checkpoint_seconds=0)
    process = start_command("train", "--out", str(out), *settings)
    wait_until(lambda: has_checkpoint(out), process)
    code = main(["train", "--resume", str(out)])
    process.kill()
    process.join()
    assert code == 2
    assert HELD in capsys.readouterr().err
