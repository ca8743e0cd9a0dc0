"""What is imported: the user's own network, and nothing that a file or the directory suggests."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from probmask.artifact import save
from probmask.cli import main
from probmask.errors import InputError
from probmask.training.config import load_config
from probmask.training.run_directory import RunDirectory
from probmask.training.trainer import train
from probmask.training.trusted_runs import is_trusted_run
from training.small import small

# Modules that PyTorch and its dependencies try to import although they need not be installed.
OPTIONAL = ["dill", "tqdm", "pandas", "psutil", "tensorflow", "torchvision", "triton", "opt_einsum"]
TRAP = "import os, pathlib\npathlib.Path(__file__).with_name('executed').touch()\n"
OWN = """
def build(classes, channels):
    import own_parts  # from the same directory
    return own_parts.Net(classes, channels)
"""
PARTS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes, channels):
        super().__init__(nn.Flatten(), nn.Linear(64 * channels, 16), nn.Linear(16, classes))

    def forward(self, images):
        import own_scale
        return own_scale.FACTOR * super().forward(images)
"""


def test_a_command_imports_the_users_network_and_nothing_else_from_the_directory(tmp_path):
    """`--model` is given once; the optional packages of PyTorch are not taken from here."""
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text(TRAP)
    (tmp_path / "own_network.py").write_text(OWN)
    (tmp_path / "own_parts.py").write_text(PARTS)
    (tmp_path / "own_scale.py").write_text("FACTOR = 2.0\n")
    settings = ["--epochs", "1", "--batch-size", "512", "--no-dense-twin", "--set", "threads=1"]
    command = [sys.executable, "-m", "probmask.cli", "train", "--model", "own_network:build"]
    done = subprocess.run(
        [*command, *settings, "--quiet", "--out", "run"], cwd=tmp_path, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    commands = [
        ["evaluate", "run", "--json"],
        ["inspect", "run"],
        ["export", "run", "dense.safetensors"],
        ["compare", "run"],
        ["report", "run"],
        ["watch", "run"],
        ["train", "--resume", "run"],
        ["list", "models"],
    ]
    script = (
        "import sys; sys.path.pop(0); from probmask.cli import main\n"
        f"codes = [main(each) for each in {commands!r}]\n"
        "sys.exit(codes != [0] * len(codes))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert f'"correct": {record["test"]["correct"]}' in done.stdout.partition("}\n")[0]
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A directory with a network whose import leaves a file; its name is the directory's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "other_network.py").write_text(f"{TRAP}from torch import nn\nbuild = nn.Linear\n")
    yield "other_network:build"
    sys.modules.pop("other_network", None)


@pytest.fixture
def run_from_elsewhere(tmp_path, own):
    """A run that was not created here."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'model = "{own}"\n')
    sizes = {"in_features": 4, "out_features": 4}
    metadata = {"model": own, "model_args": sizes, "data": "digits", "image_shape": [4]}
    save(torch.nn.Linear(4, 4), run / "model.safetensors", metadata=metadata)
    (tmp_path / "sweep.toml").write_text(f'[run]\nmodel = "{own}"\n[grid]\nseed = [0]\n')
    return run


@pytest.mark.parametrize(
    "command",
    [
        "evaluate run",
        "bench run",
        "export run model.onnx",
        "train --resume run",
        "train run/config.toml --out new",
        "sweep sweep.toml --out new",
    ],
)
def test_a_file_does_not_decide_what_is_imported(
    tmp_path, own, run_from_elsewhere, capsys, command
):
    assert main(command.split()) == 2
    message = capsys.readouterr().err
    location = tmp_path / "other_network.py"
    assert f"names the model '{own}', which would be imported from {location}. " in message
    flag = "--set model=…" if command.startswith("sweep") else "--model"
    assert f"if you trust it, pass --trust or {flag}" in message
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flag", [["--trust"], ["--model", "other_network:build"]], ids=" ".join)
def test_the_user_decides_what_is_imported(tmp_path, run_from_elsewhere, capsys, flag):
    assert main(["evaluate", "run", *flag]) == 2
    assert "--data digits: the network cannot process" in capsys.readouterr().err
    assert (tmp_path / "executed").exists()


def test_resuming_in_python_imports_nothing_unless_the_configuration_is_given(
    tmp_path, run_from_elsewhere
):
    with pytest.raises(InputError, match=r"in Python: config=probmask.load_config\(.*config.toml"):
        train(out=run_from_elsewhere, resume=True)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(InputError, match="missing a required argument: 'in_features'"):
        train(load_config(run_from_elsewhere / "config.toml"), out=run_from_elsewhere, resume=True)
    assert (tmp_path / "executed").exists()


def trusts(run, model):
    return is_trusted_run(run, run / "config.toml", [model])


def test_only_the_run_itself_is_trusted(tmp_path, own, monkeypatch):
    """A copied or changed run, or a network from another place, is not trusted."""
    run = tmp_path / "run"
    RunDirectory(run).create(small(model=own))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert trusts(run, own)
    assert not (tmp_path / "executed").exists()
    (tmp_path / "link").symlink_to(run)
    assert trusts(tmp_path / "link", own)
    assert not trusts(run, "other_network:other")
    shutil.copytree(run, tmp_path / "copy")
    assert not trusts(tmp_path / "copy", own)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("seed = 0", "seed = 1"))
    assert not trusts(run, own)
    (run / "config.toml").write_text(config)
    assert trusts(run, own)
    monkeypatch.setenv("PYTHONPATH", "")
    (elsewhere / "other_network.py").write_text("build = None\n")
    assert trusts(run, own)  # the network is still the one of the run
    monkeypatch.syspath_prepend(elsewhere)
    assert not trusts(run, own)


def test_a_note_that_others_can_write_or_that_is_damaged_is_ignored(tmp_path, own, monkeypatch):
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    run = tmp_path / "run"
    RunDirectory(run).create(small(model=own))
    (note,) = state.rglob("*.json")
    note.chmod(0o666)
    assert not trusts(run, own)
    note.chmod(0o600)
    assert trusts(run, own)
    for damaged in ("", "[]", "{}", '{"location": 3}', "\0"):
        note.write_text(damaged)
        assert not trusts(run, own)


def test_a_run_in_the_directory_of_a_sweep_does_not_replace_its_network(tmp_path, own, capsys):
    """The grid decides, not a prepared directory with the name of one of its runs."""
    from probmask.sweeps.training_process import Request, execute
    from probmask.training.config import to_table

    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(f'model = "{own}"\n')
    messages = []
    execute(Request(str(run), True, to_table(small())), messages.append)
    assert messages[-1]["kind"] == "failed"
    assert "model = smallconv differs from the run's" in messages[-1]["reason"]
    assert not (tmp_path / "executed").exists()
