"""Runs on image files: training, measurement, resuming, errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from multiprocessing import active_children

import numpy as np
import pytest

from data.image_folders import make_classes
from probmask.artifact import read
from probmask.cli import main
from probmask.data import load_data
from probmask.errors import AbsentClassWarning
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.trainer import warn_of_absent_classes
from training.small import lines

pytestmark = [
    # As in production, so that the command line shows it.
    pytest.mark.filterwarnings("default::probmask.errors.UnreadableImageWarning"),
    # Warnings of PyTorch on machines with one core, and of Python 3.12 about threads.
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

SMALL = {
    "model": "resnet14",
    "model_args.width": 4,
    "model_args.stem_stride": 2,
    "data_args.image_size": 16,
    "batch_size": 4,
    "epochs": 2,
    "method.sparsity": 0.5,
    "workers": 1,
    "threads": 1,
    "accelerator": "cpu",
    "tensorboard": "false",
}

# Long enough to be killed in the middle.
LONG = {"epochs": 4}


def arguments(directory, out, *more, data="folder", **settings):
    given = SMALL | {key.replace("__", "."): value for key, value in settings.items()}
    assignments = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    return [
        "train",
        "--data",
        data,
        "--data-dir",
        str(directory),
        "--out",
        str(out),
        "--quiet",  # so that stderr has only warnings and errors
        *assignments,
        *more,
    ]


def trained(directory, out, *more, **settings):
    assert main([*arguments(directory, out, *more, **settings), "--json"]) == 0
    return json.loads((out / "record.json").read_text())


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Forty training and seven test images in two classes."""
    root = tmp_path_factory.mktemp("photographs")
    make_classes(root / "train", {"a": 20, "b": 20}, noise=True)
    make_classes(root / "test", {"a": 3, "b": 4}, first=100, noise=True)
    return root


@pytest.fixture(scope="module")
def straight(photographs, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("straight") / "run"
    assert main([*arguments(photographs, out, **LONG, workers=0), "--json"]) == 0
    return out


@pytest.fixture
def own(photographs, tmp_path):
    """A copy of the images, which a test may damage."""
    shutil.copytree(photographs, tmp_path / "own")
    return tmp_path / "own"


def assert_same_run(out, straight):
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (out / name).read_bytes() == (straight / name).read_bytes(), name
    assert (out / "record.json").exists()
    assert not (out / "checkpoint.safetensors").exists()


def one_line(capsys):
    error = capsys.readouterr().err
    assert error.startswith("probmask: ")
    assert error.count("\n") == 1, error
    return error


# --- records


def test_a_tenth_of_the_training_images_is_held_out_for_selection(straight):
    record = json.loads((straight / "record.json").read_text())
    assert record["data"] == "folder"
    assert record["data_args"] == {
        "image_size": 16,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "unreadable": "skip",
    }
    assert record["model_args"] == {"classes": 2, "channels": 3, "width": 4, "stem_stride": 2}
    assert record["train_images"] == 36
    assert record["updates"] == 4 * 9
    assert record["selection"]["on"] == "val"
    assert record["selection"]["total"] == 4
    assert record["test"]["total"] == 7
    assert record["unreadable"] == []
    assert record["config"]["select_on"] == "val"
    assert record["size"] - record["kept"] == round(0.5 * record["size"])


def test_workers_have_no_influence_on_the_result(photographs, straight, tmp_path):
    trained(photographs, tmp_path / "run", **LONG, workers=2)
    assert_same_run(tmp_path / "run", straight)


def test_without_selection_all_images_train(photographs, tmp_path):
    record = trained(photographs, tmp_path / "run", "--select-on", "none")
    assert record["train_images"] == 40
    assert record["updates"] == 2 * 10
    assert record["selection"] is None
    assert record["test"]["total"] == 7


def test_selection_on_the_test_images_is_recorded(photographs, tmp_path):
    record = trained(photographs, tmp_path / "run", "--select-on", "test")
    assert record["train_images"] == 40
    assert record["selection"] == {"on": "test", **record["test"]}


def test_a_validation_folder_is_used_for_selection(own, tmp_path):
    make_classes(own / "val", {"a": 2, "b": 3}, first=200, noise=True)
    record = trained(own, tmp_path / "run")
    assert record["train_images"] == 40
    assert record["selection"]["total"] == 5
    assert record["test"]["total"] == 7


def test_validation_images_outside_the_training_images_do_not_change_training(
    photographs, tmp_path
):
    few = {"data_args__train_images": 20}
    alone = trained(photographs, tmp_path / "alone", "--select-on", "none", **few)
    record = trained(photographs, tmp_path / "run", **few, data_args__validation_images=10)
    assert record["train_images"] == alone["train_images"] == 20
    assert record["selection"]["total"] == 10
    assert record["data_args"]["validation_images"] == 10
    assert record["test"] == alone["test"]


def test_the_number_of_validation_images_is_ignored_without_selection(photographs, tmp_path):
    asked = {"data_args__train_images": 38, "data_args__validation_images": 10}
    record = trained(photographs, tmp_path / "run", "--select-on", "none", **asked, epochs=1)
    assert (record["train_images"], record["selection"]) == (38, None)
    assert "validation_images" not in record["data_args"]


def test_imagenet_is_tested_on_its_validation_images(own, tmp_path):
    (own / "test").rename(own / "val")
    record = trained(own, tmp_path / "run", data="imagenet", optimizer__warmup_epochs=1)
    assert record["data"] == "imagenet"
    assert record["train_images"] == 36
    assert (record["selection"]["total"], record["test"]["total"]) == (4, 7)


# --- unreadable files


def test_every_unreadable_file_is_warned_about_once_and_recorded(own, tmp_path, capsys):
    broken = [own / "train/a/001.jpg", own / "train/b/002.jpg", own / "test/a/001.jpg"]
    for path in broken:
        path.write_bytes(path.read_bytes()[:100])
    record = trained(own, tmp_path / "run", "--select-on", "none", "--dense-twin")
    assert record["unreadable"] == sorted(map(str, broken))
    assert record["train_images"] == 40
    assert record["updates"] == 2 * 10
    assert record["test"]["total"] == 6
    warned = capsys.readouterr().err.splitlines()
    assert len(warned) == 3
    for path in broken:
        assert sum(line.startswith(f"probmask: warning: {path}: skipped") for line in warned) == 1
    dense = json.loads((tmp_path / "run" / "dense" / "record.json").read_text())
    assert dense["unreadable"] == record["unreadable"]


def test_unreadable_files_raise_before_anything_is_written(own, tmp_path, capsys):
    (own / "train/a/001.jpg").write_bytes(b"")
    (own / "test/b/002.jpg").write_bytes(b"no image")
    out = tmp_path / "run"
    assert main(arguments(own, out, data_args__unreadable="refuse")) == 2
    error = one_line(capsys)
    assert "train/a/001.jpg (UnidentifiedImageError" in error
    assert "test/b/002.jpg (UnidentifiedImageError" in error
    assert not out.exists()


def at_step(monkeypatch, step, action):
    """Call ``action`` after the checkpoint of a step."""

    def write(path, state):
        write_checkpoint(path, state)
        if state["step"] == step:
            action()

    monkeypatch.setattr("probmask.training.run.write_checkpoint", write)


def test_a_run_whose_files_vanish_resumes_once_they_are_back(own, tmp_path, capsys, monkeypatch):
    settings = {"data_args__unreadable": "refuse", "checkpoint_seconds": 0, "workers": 0}
    trained(own, tmp_path / "whole", **settings)
    away = [own / "train" / "a", tmp_path / "away"]
    at_step(monkeypatch, 9, lambda: shutil.move(*away))
    out = tmp_path / "run"
    capsys.readouterr()
    assert main(arguments(own, out, **settings)) == 1
    monkeypatch.undo()
    error = one_line(capsys)
    assert "train/a/0" in error
    assert "can no longer be read (FileNotFoundError" in error
    assert "--resume" in error
    assert not (out / "record.json").exists()
    shutil.move(*reversed(away))
    assert main(["train", "--resume", str(out), "--json"]) == 0
    assert_same_run(out, tmp_path / "whole")


# --- interrupted runs


def step_of(out):
    return read_checkpoint(out / "checkpoint.safetensors")["step"]


def test_a_killed_run_resumes_while_its_workers_still_exist(photographs, straight, tmp_path):
    """The worker processes of the killed run exist for some seconds longer."""
    out = tmp_path / "run"
    command = arguments(photographs, out, **LONG, workers=2, checkpoint_seconds=0)
    process = subprocess.Popen([sys.executable, "-m", "probmask.cli", *command])
    try:
        while lines(out / "metrics.jsonl") < 1:
            assert process.poll() is None
            time.sleep(0.002)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 8 <= step_of(out) < 36
    assert main(["train", "--resume", str(out), "--set", "workers=0", "--json"]) == 0
    assert_same_run(out, straight)


class Stopped(BaseException):
    """Ends a run as abruptly as is possible within one process."""


@pytest.mark.parametrize(("workers", "step"), [(2, 13), (1, 9), (1, 36)])
def test_a_run_resumes_with_any_number_of_workers(
    photographs, straight, tmp_path, monkeypatch, workers, step
):
    """From the middle of an epoch, the end of one, and the end of the last one."""

    def stop():
        raise Stopped

    out = tmp_path / "run"
    at_step(monkeypatch, step, stop)
    with pytest.raises(Stopped):
        main(arguments(photographs, out, **LONG, workers=0, checkpoint_seconds=0))
    monkeypatch.undo()
    assert step_of(out) == step
    assert main(["train", "--resume", str(out), "--set", f"workers={workers}", "--json"]) == 0
    assert_same_run(out, straight)


def test_a_killed_worker_ends_the_run_with_one_line(
    photographs, straight, tmp_path, capsys, monkeypatch
):
    before = active_children()

    def kill():
        for reader in set(active_children()) - set(before):
            os.kill(reader.pid, signal.SIGKILL)

    at_step(monkeypatch, 3, kill)
    out = tmp_path / "run"
    assert main(arguments(photographs, out, **LONG, checkpoint_seconds=0)) == 1
    monkeypatch.undo()
    assert "a worker process that reads images ended" in one_line(capsys)
    assert 3 <= step_of(out) < 9
    assert main(["train", "--resume", str(out), "--set", "workers=0", "--json"]) == 0
    assert_same_run(out, straight)


def test_resuming_with_other_images_raises(own, tmp_path, capsys, monkeypatch):
    def stop():
        raise Stopped

    out = tmp_path / "run"
    at_step(monkeypatch, 5, stop)
    with pytest.raises(Stopped):
        main(arguments(own, out, workers=0, checkpoint_seconds=0))
    monkeypatch.undo()
    make_classes(own / "train", {"a": 30, "b": 20}, noise=True)
    assert main(["train", "--resume", str(out), "--json"]) == 2
    assert "was written while training on different data" in one_line(capsys)
    assert step_of(out) == 5


def test_resuming_with_other_data_settings_raises(straight, capsys):
    assert main(["train", "--resume", str(straight), "--set", "data_args.image_size=24"]) == 2
    assert "data_args" in one_line(capsys)


# --- evaluate


def test_evaluate_repeats_the_recorded_accuracy(photographs, straight, capsys):
    """The artifact stores the data set and its settings; the run next to it, the data directory."""
    artifact = str(straight / "model.safetensors")
    assert read(artifact).metadata["data_args"]["image_size"] == 16
    assert main(["evaluate", artifact, "--data-dir", str(photographs), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    test = json.loads((straight / "record.json").read_text())["test"]
    assert {"data": "folder", **test}.items() <= printed.items()
    assert printed["recorded"] == test
    assert main(["evaluate", str(straight), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == printed


def test_an_artifact_without_its_run_needs_a_data_directory(straight, tmp_path, capsys):
    artifact = tmp_path / "model.safetensors"
    artifact.write_bytes((straight / "model.safetensors").read_bytes())
    assert main(["evaluate", str(artifact)]) == 2
    message = one_line(capsys)
    assert "--data folder: needs the directory of the images; pass --data-dir DIR" in message


def test_data_with_other_classes_raises(straight, photographs, tmp_path, capsys):
    renamed = tmp_path / "renamed"
    shutil.copytree(photographs, renamed)
    for part in renamed.iterdir():
        (part / "b").rename(part / "0")
    assert main(["evaluate", str(straight), "--data-dir", str(renamed)]) == 2
    assert "has a class '0' where the network was trained on 'a'" in one_line(capsys)
    assert main(["evaluate", str(straight), "--data", "digits"]) == 2
    assert "the network cannot process its 1×8×8 images" in one_line(capsys)


def test_a_network_with_too_few_outputs_raises(photographs, tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*arguments(photographs, out), "--set", "model_args.classes=1"]) == 2
    assert "returns (1,) for one image, but folder has 2 classes" in one_line(capsys)
    assert not out.exists()


# --- errors


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 37}, "--set batch_size=37: folder has 36 training images"),
        ({"data_args__image_size": 0}, "--set data_args.image_size=0: "),
        ({"data_args__image_sizes": 16}, "unknown key data_args.image_sizes"),
        ({"data_args__padding": 2}, "unknown key data_args.padding"),
        ({"data_args__unreadable": "ask"}, "--set data_args.unreadable=ask: expected 'skip' or"),
        ({"data_args__train_images": 41}, "data_args.train_images=41: folder has only 40"),
        ({"data_args__mean": "[0.5]"}, "--set data_args.mean=[0.5], data_args.std ="),
        ({"workers": -1}, "--set workers=-1: must be"),
        ({"select_on": "train"}, "--set select_on=train: expected 'val' or 'test' or 'none'"),
        ({"model_args__width": 0}, "--set model_args.width=0: must be"),
    ],
)
def test_wrong_settings_print_one_line(photographs, tmp_path, capsys, settings, expected):
    assert main(arguments(photographs, tmp_path / "run", **settings)) == 2
    assert expected in one_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("counts", [{}, {"a": 5}, {"a": 5, "b": 0}, {"a": 1, "b": 1}])
def test_wrong_directories_print_one_line(tmp_path, capsys, counts):
    (tmp_path / "images").mkdir()
    make_classes(tmp_path / "images", counts)
    assert main(arguments(tmp_path / "images", tmp_path / "run")) == 2
    assert "images" in one_line(capsys)
    assert main(arguments(tmp_path / "gone", tmp_path / "run")) == 2
    assert "gone: is not a directory" in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_directory_whose_name_is_not_text_prints_one_line(tmp_path, capsys):
    images = tmp_path / os.fsdecode(b"\xff")
    make_classes(images, {"a": 20, "b": 20})
    assert main(arguments(images, tmp_path / "run")) == 2
    assert "the text is not valid Unicode." in one_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("default::probmask.errors.AbsentClassWarning")
def test_a_class_without_training_images_is_warned_about_in_one_line(tmp_path, capsys):
    labels = np.tile(np.arange(1, 5), 20)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=pixels, labels=labels, num_classes=5)
    settings = {"batch_size": 32, "epochs": 1, "threads": 1, "tensorboard": "false"}
    settings |= {"model_args.width": 4, "method.sparsity": 0.5}
    assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    given = ["--data", "npz", "--data-dir", str(tmp_path / "own.npz"), "--quiet", *assignments]
    assert main(["train", *given, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err == (
        "probmask: warning: --data npz: 1 of 5 classes has no training images and cannot be "
        "learned: 0 (classes are counted from 0).\n"
    )


def test_absent_classes_are_named_and_further_ones_counted(photographs):
    data = load_data("folder", photographs, {"image_size": 16})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_absent_classes(data)
    data.class_names = (*data.class_names, *(f"extra{n}" for n in range(7)))
    known, data.classes = data.classes, len(data.class_names)
    expected = (
        rf"7 of {known + 7} classes have no training images and cannot be learned: "
        rf"{known} \(extra0\), .* \(extra4\) and 2 more"
    )
    with pytest.warns(AbsentClassWarning, match=expected):
        warn_of_absent_classes(data)
