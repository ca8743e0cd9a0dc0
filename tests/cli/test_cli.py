"""The command line: errors, exit codes, JSON and tables."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from probmask.artifact import load, read, save
from probmask.cli import main
from probmask.methods import METHODS
from probmask.training.config import load_config
from probmask.training.trainer import train
from training.small import SIZE, flags, small, snapshot


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run; tests must not change it."""
    config = small(epochs=2, method__sparsity=0.9, dense_twin=True)
    return train(config, out=tmp_path_factory.mktemp("cli") / "run")


@pytest.fixture
def model(run):
    return run.directory / "model.safetensors"


def probmask(*arguments):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "probmask.cli", *map(str, arguments)], capture_output=True, text=True
    )


def error(capsys, *arguments):
    """Return the one-line error of a command; its exit code must be 2."""
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("probmask: ")
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsity", "98"], "probmask: --sparsity 98: sparsity is the fraction pruned"),
        (["--sparsity", "1"], "the fraction pruned, in [0, 1)"),
        (["--sparsity", "nan"], "the fraction pruned, in [0, 1)"),
        (["--model", "smalconv"], "--model smalconv: no such model; did you mean 'smallconv'?"),
        (
            ["--model", "xyz"],
            "--model xyz: no such model; choose from bert, conv4, lenet300",
        ),
        (["--model", "nowhere:build"], "cannot be imported"),
        (["--method", "probmsk"], "--method probmsk: no such method; did you mean 'probmask'?"),
        (["--data", "digit"], "--data digit: no such data set; did you mean 'digits'?"),
        (["--epochs", "-1"], "--epochs -1: must be a number of epochs"),
        (["--epochs", "0"], "--epochs 0: must be a number of epochs"),
        (["--seed", "-1"], "--seed -1: must be a seed"),
        (["--batch-size", "1299"], "--batch-size 1299: digits has 1298 training images"),
        (["--devices", "2", "--batch-size", "63"], "--batch-size 63, --devices 2: every batch"),
        (["--precision", "fp4"], "--precision fp4: expected '32-true' or 'bf16-mixed'"),
        (
            ["--strategy", "dpd"],
            "--strategy dpd: not a supported strategy; did you mean 'ddp'?",
        ),
        (["--devices", "999", "--batch-size", "999"], "--devices 999: every device on a CPU is"),
        (["--set", "nonsense"], "--set nonsense: expected KEY=VALUE"),
        (["--set", "nonsense=1"], "--set nonsense=1: unknown key nonsense; choose from"),
        (["--set", "lr=2"], "--set lr=2: unknown key lr; did you mean 'optimizer.lr'?"),
        (["--set", "sparsity=0.9"], "unknown key sparsity; did you mean 'method.sparsity'?"),
        (["--set", "scpoe=layer"], "unknown key scpoe; did you mean 'method.scope'?"),
        (["--set", "pading=1"], "unknown key pading; did you mean 'data_args.padding'?"),
        (["--set", "widht=8"], "unknown key widht; did you mean 'model_args.width'?"),
        (["--set", "=1"], "unknown key"),
        (["--set", "optimizer.lrr=1"], "unknown key optimizer.lrr; did you mean 'lr'?"),
        (["--set", "optimizer.lr=-1"], "probmask: --set optimizer.lr=-1: must be"),
        (["--set", "optimizer.lr=fast"], "probmask: --set optimizer.lr=fast: expected a number"),
        (["--set", "optimizer.args={dampening='x'}"], "pass values like the defaults dampening=0."),
        (
            ["--set", "optimizer.name=adamw", "--set", "optimizer.args={betas=[0.9]}"],
            "--set optimizer.args={betas=[0.9]}: it cannot be built with these settings (IndexErr",
        ),
        (
            ["--set", "optimizer.args={momentum=0.5}"],
            "--set optimizer.args={momentum=0.5}: momentum is a setting of its own; pass it as",
        ),
        (["--set", "epochs.x=1"], "epochs"),
        (["--set", "model_args.widht=8"], "unknown key model_args.widht; did you mean 'width'?"),
        (["--set", "model_args.width=wide"], "--set model_args.width=wide: must be"),
        (
            ["--method", "probmask", "--set", "method.draws=0"],
            "probmask: --set method.draws=0: must be",
        ),
        (["--set", "accelerator=abacus"], "--set accelerator=abacus: not a supported accelerator"),
        (["--set", "threads=0"], "probmask: --set threads=0: must be a number of threads"),
        (["no-such-file.toml"], "no-such-file.toml: cannot be read: No such file or directory"),
    ],
)
def test_input_errors_are_one_line_and_create_nothing(
    tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    assert message in error(capsys, "train", "--out", "out", "--no-dense-twin", *arguments)
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3\n", "run.toml: unknown key epoch; did you mean 'epochs'?"),
        ("[method]\nsparcity = 0.9\n", "unknown key method.sparcity; did you mean 'sparsity'?"),
        ("[optimizer]\nlr = 'x'\n", "run.toml: optimizer.lr = 'x': expected a number"),
        ("lr = 2\n", "run.toml: unknown key lr; did you mean 'optimizer.lr'?"),
        ("data = 'digts'\n", "run.toml: data = digts: no such data set; did you mean 'digits'?"),
        ("data = 'x.npz'\n", "run.toml: data = x.npz: is a path; for your own data pass"),
        (
            "model = 'resnt20'\n",
            "run.toml: model = resnt20: no such model; did you mean 'resnet20'",
        ),
        ("method.name = 'gmpp'\n", "run.toml: method.name = gmpp: no such method; did you mean"),
        (
            "data_args.pading = 1\n",
            "run.toml: unknown key data_args.pading; did you mean 'padding'",
        ),
        ("data_args.padding = -1\n", "run.toml: data_args.padding = -1: must be"),
        ("model_args.widht = 1\n", "run.toml: unknown key model_args.widht; did you mean 'width'"),
        ("model_args.width = 0\n", "run.toml: model_args.width = 0: must be"),
        (
            "method.sparsity = 98\n",
            "run.toml: method.sparsity = 98: sparsity is the fraction",
        ),
        ("epochs = 0\n", "run.toml: epochs = 0: must be"),
        ("optimizer.lr = -1\n", "run.toml: optimizer.lr = -1: must be"),
        ("epochs = \n", "run.toml: not valid TOML"),
    ],
)
def test_configuration_errors_name_the_file_and_the_key(
    tmp_path, monkeypatch, capsys, text, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(text)
    before = snapshot(tmp_path)
    assert message in error(capsys, "train", "run.toml", "--out", "out")
    assert snapshot(tmp_path) == before


def test_errors_of_flags_do_not_name_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("data_args.padding = 2\nmethod.forget_by = 0.2\n")

    def message(*arguments):
        return error(capsys, "train", "run.toml", "--out", "out", *arguments)

    assert message("--data", "digts").startswith("probmask: --data digts: no such data set")
    assert message("--model", "smalconv").startswith("probmask: --model smalconv: no such model")
    assert message("--method", "gmpp").startswith("probmask: --method gmpp: no such method")
    assert message("--sparsity", "98").startswith("probmask: --sparsity 98: sparsity is")
    assert message("--set", "optimizer.lrr=1").startswith(
        "probmask: --set optimizer.lrr=1: unknown key"
    )
    assert message("--epochs", "0").startswith("probmask: --epochs 0: must be")
    # Errors of the file name the file.
    assert message("--data", "folder").startswith(
        "probmask: run.toml: unknown key data_args.padding; choose from "
    )


def test_a_directory_in_use_raises(run, capsys):
    before = snapshot(run.directory)
    message = error(capsys, "train", "--out", run.directory)
    assert "is already in use; choose another, or pass --resume" in message
    assert snapshot(run.directory) == before


def test_a_file_as_directory_raises(tmp_path, capsys):
    (tmp_path / "file").write_text("precious")
    error(capsys, "train", "--out", tmp_path / "file")
    assert "Not a directory" in error(capsys, "train", "--out", tmp_path / "file" / "out")
    assert snapshot(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("out", ["/proc/out", "x" * 300])
def test_an_unwritable_directory_raises(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    message = error(capsys, "train", "--out", out)
    assert "cannot be created or written" in message
    assert snapshot(tmp_path) == {}


def test_a_corrupt_checkpoint_raises(tmp_path, run, capsys):
    (tmp_path / "config.toml").write_bytes((run.directory / "dense" / "config.toml").read_bytes())
    (tmp_path / "checkpoint.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 torn ")
    before = snapshot(tmp_path)
    assert "the checkpoint is damaged" in error(capsys, "train", "--resume", tmp_path)
    after = snapshot(tmp_path)
    after.pop(".lock", None)
    assert after == before


def test_resume_of_a_directory_without_a_run(tmp_path, capsys):
    assert "contains no run" in error(capsys, "train", "--resume", tmp_path)
    assert "which run" in error(capsys, "train", "--resume")
    assert snapshot(tmp_path) == {}


def test_resume_of_a_finished_run_trains_nothing(run, capsys):
    before = snapshot(run.directory)
    assert main(["train", "--resume", str(run.directory)]) == 0
    assert "had already finished" in capsys.readouterr().err
    assert snapshot(run.directory) == before


def test_resume_with_two_directories_raises(run, tmp_path, capsys):
    error(capsys, "train", "--resume", run.directory, "--out", tmp_path / "other")
    assert snapshot(tmp_path) == {}


def test_resume_with_a_damaged_record_raises(run, tmp_path, capsys):
    (tmp_path / "config.toml").write_bytes((run.directory / "dense" / "config.toml").read_bytes())
    (tmp_path / "record.json").write_text('{"kept": ')
    assert "record.json" in error(capsys, "train", "--resume", tmp_path)


@pytest.mark.parametrize("command", ["evaluate", "inspect"])
def test_a_missing_or_damaged_artifact_raises(tmp_path, capsys, model, command):
    path = tmp_path / "model.safetensors"
    assert "no such file" in error(capsys, command, path)
    assert "no such file" in error(capsys, command, tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    message = error(capsys, command, run)
    assert f"it has no network yet; continue it with probmask train --resume {run}" in message
    good = model.read_bytes()
    for bad in (b"", b"garbage", good[:1000], good[:-1], b"\xff" + good[1:]):
        path.write_bytes(bad)
        assert "model.safetensors: " in error(capsys, command, path)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "damaged" in error(capsys, "evaluate", path)


@pytest.mark.parametrize("command", ["evaluate", "inspect"])
@pytest.mark.parametrize(
    "metadata",
    [
        {"model": "mine", "data": "cifar", "method": "probmask", "test": 93.2},
        {"model": ["x"], "data": ["digits"], "method": 3, "test": {"top1": 9}},
        {"macs_per_weight": 5},
        {"macs_per_weight": {"weight": "many"}},
    ],
)
def test_arbitrary_metadata(tmp_path, capsys, command, metadata):
    """`probmask.save` accepts any metadata; `inspect` and `evaluate` must not crash."""
    path = tmp_path / "model.safetensors"
    save(torch.nn.Linear(4, 4), path, metadata=metadata)
    code = main([command, str(path)])
    printed = capsys.readouterr()
    assert code == (0 if command == "inspect" else 2)
    assert printed.err.count("\n") == (0 if command == "inspect" else 1)


def test_input_errors_of_the_real_command(tmp_path):
    done = probmask("train", "--sparsity", "98", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "probmask: --sparsity 98: sparsity is the fraction pruned, in [0, 1); for 98 % pass 0.98.\n"
    )
    assert snapshot(tmp_path) == {}


def output(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_train_json(tmp_path, capfd):
    out = tmp_path / "run"
    text = output(capfd, "train", "--json", "--out", out, *flags(epochs=1, dense_twin=True))
    printed = json.loads(text)
    assert printed["directory"] == str(out)
    assert printed["run"] == json.loads((out / "record.json").read_text())
    assert printed["dense"] == json.loads((out / "dense" / "record.json").read_text())


def test_train_prints_layers_and_accuracies(run, capsys):
    text = output(capsys, "train", "--resume", run.directory)
    for layer in run.record["layers"]:
        row = next(line for line in text.splitlines() if line.strip().startswith(layer["name"]))
        assert f" {layer['kept']:,} " in row
        assert f" {layer['size']:,} " in row
    for record in (run.record, run.dense):
        test = record["test"]
        assert f"{test['accuracy']:.2f} % ({test['correct']}/355)" in text
    assert "90.01 %" in text
    assert str(run.directory) in text
    assert "\x1b" not in text


def test_paths_are_printed_verbatim(tmp_path, capsys):
    """Rich would interpret brackets as markup and wrap long lines."""
    out = tmp_path / "[bold]a[" / "b]" / ("long" * 40)
    text = output(capsys, "train", "--out", out, *flags(epochs=1))
    assert f"in {out}: " in text
    assert str(out) in output(capsys, "inspect", out / "model.safetensors")


def test_diverged_training_exits_with_1(tmp_path, capsys):
    code = main(["train", "--out", str(tmp_path / "run"), *flags(optimizer__lr=1e30)])
    printed = capsys.readouterr()
    assert code == 1
    assert printed.out == ""
    assert printed.err.count("\n") == 1


def test_flags_override_the_file_and_set_overrides_flags(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text("epochs = 9\nseed = 7\nbatch_size = 700\n[method]\nsparsity = 0.5\n")
    arguments = ["--epochs", "8", "--batch-size", "600", "--sparsity", "0.6", "--no-dense-twin"]
    last = ["--set", "epochs=1", "--set", "model_args.width=8", "--set", "tensorboard=false"]
    output(capsys, "train", path, "--out", tmp_path / "run", *arguments, *last)
    config = load_config(tmp_path / "run" / "config.toml")
    assert (config.epochs, config.seed, config.batch_size) == (1, 7, 600)
    assert config.method == {"name": "probmask-tied", "sparsity": 0.6}
    assert not config.dense_twin


def test_evaluate_repeats_the_recorded_accuracy(run, model, capsys):
    printed = json.loads(output(capsys, "evaluate", model, "--json"))
    assert printed == {
        "data": "digits",
        **run.record["test"],
        "data_args": run.record["data_args"],
        "recorded": run.record["test"],
    }
    correct, accuracy = run.record["test"]["correct"], run.record["test"]["accuracy"]
    assert output(capsys, "evaluate", model, "--data", "digits") == (
        f"digits: {accuracy:.2f} % ({correct} of 355 correct), as recorded\n"
    )


def test_evaluate_prints_a_differing_recorded_accuracy(run, model, tmp_path, capsys):
    """Another machine can round differently and classify an image differently."""
    network, metadata = load(model), dict(read(model).metadata)
    metadata["test"] = {"correct": 3, "total": 355, "accuracy": 100 * 3 / 355}
    path = tmp_path / "model.safetensors"
    save(network, path, metadata=metadata)
    correct, accuracy = run.record["test"]["correct"], run.record["test"]["accuracy"]
    assert output(capsys, "evaluate", path) == (
        f"digits: {accuracy:.2f} % ({correct} of 355 correct); "
        "recorded: 0.85 % (3 of 355 correct)\n"
    )


def test_evaluate_uses_the_settings_of_training_unless_set(tmp_path, capsys):
    run = train(small(epochs=1, data_args__test_images=40), out=tmp_path / "run")
    correct = run.record["test"]["correct"]
    assert output(capsys, "evaluate", run.directory) == (
        f"digits: {correct / 0.4:.2f} % ({correct} of 40 correct), as recorded\n"
        "with test_images = 40 (as in training)\n"
    )
    few = output(capsys, "evaluate", run.directory, "--set", "data_args.test_images=7")
    assert " of 7 correct)\nwith test_images = 7 (in training: 40)\n" in few
    padded = output(capsys, "evaluate", run.directory, "--set", "data_args.padding=0")
    assert "as recorded\n" in padded  # test images are not padded
    every = ["evaluate", run.directory, "--set", "data_args.test_images=none"]
    assert " of 355 correct)\nwith test_images = none (in training: 40)" in output(capsys, *every)
    printed = json.loads(output(capsys, *every, "--json"))
    assert (printed["total"], printed["recorded"]) == (355, None)
    assert "test_images" not in printed["data_args"]


def test_evaluate_finds_the_data_of_a_relative_path_from_elsewhere(tmp_path, monkeypatch, capsys):
    images, labels = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 2
    arrays = {"train_images": images, "train_labels": labels}
    np.savez(tmp_path / "own.npz", **arrays, test_images=images, test_labels=labels)
    monkeypatch.chdir(tmp_path)
    data = ["--data", "npz", "--data-dir", "own.npz", "--out", "run"]
    output(capsys, "train", *data, *flags(epochs=1, batch_size=4))
    monkeypatch.chdir("/")
    assert "npz: 50.00 % (10 of 20 correct), as recorded" in output(
        capsys, "evaluate", tmp_path / "run"
    )
    (tmp_path / "own.npz").rename(tmp_path / "moved.npz")
    assert f"{tmp_path / 'own.npz'}" in error(capsys, "evaluate", tmp_path / "run")
    moved = ["--data-dir", tmp_path / "moved.npz"]
    assert "(10 of 20 correct)" in output(capsys, "evaluate", tmp_path / "run", *moved)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("test_images=3", "expected a key of data_args, as in data_args.test_images=100"),
        ("data_args.test_images", "expected a key of data_args"),
        ("seed=3", "expected a key of data_args"),
        ("data_args.test_imags=3", "did you mean 'test_images'?"),
        ("data_args.test_images=0", "probmask: --set data_args.test_images=0: must be"),
    ],
)
def test_evaluate_with_wrong_settings_raises(model, capsys, assignment, message):
    assert message in error(capsys, "evaluate", model, "--set", assignment)


def test_evaluate_with_unknown_data_raises(model, capsys):
    assert "--data digit: no such data set" in error(capsys, "evaluate", model, "--data", "digit")


def test_inspect_agrees_with_the_record(run, model, capsys):
    printed = json.loads(output(capsys, "inspect", model, "--json"))
    assert printed["file_bytes"] == run.record["bytes"] == model.stat().st_size
    assert sum(layer["size"] for layer in printed["layers"]) == SIZE
    for row, layer in zip(printed["layers"], run.record["layers"], strict=True):
        for key in ("name", "shape", "kept", "size", "sparsity"):
            assert row[key] == layer[key]
        assert row["macs"] == layer["kept"] * layer["macs_per_weight"]
        assert row["bytes"] > 0
    assert sum(row["macs"] for row in printed["layers"]) == run.record["macs"]["sparse"]
    assert printed["metadata"]["test"] == run.record["test"]


def test_inspect_shows_every_layer(run, model, capsys):
    text = output(capsys, "inspect", model)
    for layer in run.record["layers"]:
        assert layer["name"] in text
    assert f" {run.record['kept']:,} " in text
    assert "% of the" in text
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "smallconv (channels = 1, classes = 10, width = 8)" in lines["model"]
    assert "digits (" in lines["data"]
    assert lines["method"].split() == ["method", "probmask-tied"]
    assert "90.00 % requested, 90.01 % reached" in lines["sparsity"]
    assert lines["seed"].split() == ["seed", "0"]
    test = run.record["test"]
    assert f"{test['accuracy']:.2f} % ({test['correct']} of 355 correct)" in lines["test accuracy"]
    assert f"torch {torch.__version__}" in lines["made with"]


def test_inspect_shows_non_default_settings(tmp_path, capsys):
    path = tmp_path / "model.safetensors"
    method = {**METHODS["probmask"](sparsity=0.9, draws=2).full_settings(), "name": "probmask"}
    save(torch.nn.Linear(4, 4), path, metadata={"method": method, "sparsity": 0.9})
    lines = [line.split() for line in output(capsys, "inspect", path).splitlines()]
    assert ["method", "probmask", "(draws", "=", "2)"] in lines
    assert ["sparsity", "0.9"] in lines


@pytest.mark.parametrize("name", ["[/red]", "\x1b[2J", "a\nb"])
def test_inspect_escapes_text(tmp_path, capsys, name):
    path = tmp_path / "model.safetensors"
    network = torch.nn.Module()
    network.register_buffer(name, torch.ones(2, 2))
    metadata = {
        "model": "\x1b[2J\ud800",
        "sparsity": {"asked": 10**400, "reached": 10**307},
        "test": {"accuracy": 10**400, "correct": 1, "total": 2},
        "macs_per_weight": {name: 10**4299},
    }
    save(network, path, metadata=metadata)
    text = output(capsys, "inspect", path)
    assert f" {repr(name)[1:-1]} " in f" {text}".replace("\n", " ")
    assert "\x1b" not in text
    assert "\\x1b[2J\\ud800" in text
    assert json.loads(output(capsys, "inspect", path, "--json"))["layers"][0]["name"] == name


def test_inspect_fits_80_columns_and_adds_up(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich assume a terminal
    text = re.sub(r"\x1b\[[0-9;]*m", "", output(capsys, "inspect", model))
    lines = [line.rstrip() for line in text.splitlines() if str(model) not in line]
    assert 60 < max(map(len, lines)) <= 80
    for heading in ("kept", "sparsity", "stored as", "bytes"):
        assert heading in text
    rest = sum(tensor.stored_bytes for tensor in read(model).tensors if len(tensor.shape) < 2)
    assert f", {rest} B for other tensors, " in text


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("methods", ["dense", "probmask", "probmask-tied"]),
        ("models", ["smallconv"]),
        ("data", ["digits"]),
    ],
)
def test_list(capsys, what, names):
    printed = json.loads(output(capsys, "list", what, "--json"))
    assert {row["name"] for row in printed} >= set(names)
    assert all(row["summary"] for row in printed)
    text = output(capsys, "list", what)
    for row in printed:
        assert f"{row['name']} " in text
        assert row["summary"] in text


def test_sparsity_is_ignored_for_dense(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = [*flags(epochs=1), "--method", "dense", "--sparsity", "0.95", "--out", out]
    assert main(["train", *map(str, arguments)]) == 0
    message = "probmask: --method dense prunes nothing; --sparsity 0.95 is ignored."
    assert message in capsys.readouterr().err
    record = json.loads((out / "record.json").read_text())
    assert record["sparsity"] == {"asked": 0.0, "reached": 0.0}
    wrong = ["train", "--method", "dense", "--sparsity", "95", "--out", tmp_path / "other"]
    assert "for 95 % pass 0.95" in error(capsys, *wrong)


@pytest.mark.parametrize(
    "command", [[], ["train"], ["watch"], ["evaluate"], ["inspect"], ["export"], ["list"]]
)
def test_help(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(" ".join(["usage: probmask", *command]))
    assert "--json" in text or not command


def test_help_of_train_lists_its_flags(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    design = "data data-dir model method sparsity epochs seed out devices strategy precision resume"
    for flag in [*design.split(), "set"]:
        assert f"--{flag}" in text


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("probmask ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trian"],
            "probmask: trian: no such command; did you mean 'train'? See 'probmask --help'.",
        ),
        (["list", "x"], "probmask: x: no such choice; choose from data, methods, models; see"),
        (["train", "--epohcs", "3"], "--epohcs: 'probmask train' has no such argument; did you "),
        (["train", "--epohcs=3"], "did you mean '--epochs'? See 'probmask train --help'."),
        (["inspect", "a", "b"], "b: 'probmask inspect' has no such argument; see"),
        (["train", "--epochs", "x"], "argument --epochs: invalid int value: 'x'; see"),
        (["inspect"], "the following arguments are required: ARTIFACT; see"),
        (["compare", "run", "--format", "cvs"], "--format cvs: no such choice; did you mean 'csv'"),
    ],
)
def test_parser_errors_are_one_line_with_a_suggestion(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_without_a_command_an_overview_is_printed(capsys):
    text = output(capsys)
    for command in ("train", "bench", "report"):
        assert re.search(rf"^    {command} +\w+", text, re.MULTILINE)
    assert "examples:\n  probmask train " in text


@pytest.mark.filterwarnings("default::probmask.errors.UnmaskedWeightsWarning")
def test_train_names_the_matrices_that_are_not_masked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "scaled_network.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Scaled(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = nn.Parameter(torch.ones(8, 8))\n"
        "        self.linear = nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        return self.linear((x * self.scale).flatten(1))\n"
    )
    options = ["--model", "scaled_network:Scaled", "--epochs", "1", "--out", "run", "--json"]
    try:
        assert main(["train", *options, "--set", "dense_twin=false"]) == 0
    finally:
        sys.modules.pop("scaled_network", None)
    printed = capsys.readouterr().err
    assert printed.count("warning: attach(model): 64 weights will not be masked: scale (64).") == 1
