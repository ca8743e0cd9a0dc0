"""Optimizers by name and by class: defaults, errors, records, resuming, and what is imported."""

import shutil
import sys

import pytest
import torch

from probmask.cli import main
from probmask.errors import CheckpointError, InputError
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.config import load_config, own_code
from probmask.training.optimizer import OptimizerConfig, build_optimizer
from probmask.training.run_directory import RunDirectory
from probmask.training.trainer import train
from training.small import Stopped, flags, small, stop_after_checkpoint

# Its state differs from that of PyTorch's: a text, a number per group, and keys that appear later.
OWN = """
from pathlib import Path

import torch

Path(__file__).with_name("executed").touch()


class Decaying(torch.optim.Optimizer):
    def __init__(self, params, lr, power=1.0):
        super().__init__(params, {"lr": lr, "power": power, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["note"] = "seen"
                if group["steps"] > 2:
                    mean = state.setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad)
                    p.sub_(mean, alpha=group["lr"] / group["steps"] ** group["power"])


class Unstorable(Decaying):
    def step(self, closure=None):
        super().step()
        self.state["set"] = {1, 2}
"""
BRIEF = {"epochs": 2, "batch_size": 280, "method__sparsity": 0.9, "optimizer__lr": 0.01}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A directory with an optimizer whose import leaves a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "own_optimizer.py").write_text(OWN)
    yield "own_optimizer:Decaying"
    sys.modules.pop("own_optimizer", None)


def test_adamw_has_its_own_defaults_and_the_record_has_them_explicitly():
    adamw = load_config(None, [("data", "imagenet"), ("optimizer.name", "adamw")])
    assert (adamw.optimizer.lr, adamw.optimizer.weight_decay) == (1e-3, 0.01)
    assert adamw.optimizer.momentum == 0.9
    betas = load_config(None, [("optimizer", {"name": "adamw", "args": {"betas": [0.8, 0.98]}})])
    assert betas.optimizer.momentum == 0.8
    sgd = load_config(None, [("data", "imagenet")])
    assert (sgd.optimizer.lr, sgd.optimizer.momentum) == (0.256, 0.875)
    made = build_optimizer(OptimizerConfig(name="adamw"), [torch.nn.Parameter(torch.ones(2))])
    assert isinstance(made, torch.optim.AdamW)
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (1e-3, 0.01)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "torch.optim:Nope"}, "torch.optim:Nope: cannot be imported: .*no attribute"),
        ({"name": "no_such_module:Nope"}, "cannot be imported: No module named"),
        ({"name": "torch.nn:Linear"}, "is not a subclass of torch.optim.Optimizer"),
        ({"name": "torch.optim:RMSprop", "args": {"x": 1}}, "'x'; further arguments are alpha,"),
        ({"name": "torch.optim:RMSprop", "args": {"alpha": -5}}, "be built .*Invalid alpha"),
        (
            {"name": "torch.optim:Adam", "args": {"betas": [0.9]}},
            r"built .*IndexError.*=\(0.9, 0.9",
        ),
        ({"name": "torch.optim:LBFGS"}, "trial step failed .*closure"),
        ({"name": "own_optimizer:Unstorable"}, "trial step failed .*cannot store a set"),
        ({"name": "adamw", "args": {"beta": 1}}, "'beta'; further arguments are betas,"),
        ({"name": "adamw", "args": {"betas": [0.9]}}, r"IndexError.*defaults betas=\(0.9, 0.999\)"),
        ({"name": "adamw", "args": {"betas": [0.9, 0.98, 0.99]}}, "trial step failed .*too many"),
        ({"name": "sgd", "args": {"dampening": "x"}}, "step failed .*the defaults dampening=0.$"),
    ],
)
def test_an_optimizer_that_cannot_work_fails_before_training(own, settings, expected):
    with pytest.raises(InputError, match=expected):
        build_optimizer(OptimizerConfig(lr=0.01, **settings), torch.nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    ("name", "args"),
    [("own_optimizer:Decaying", {"power": 0.5}), ("torch.optim:Adafactor", {"d": 2.0})],
)
def test_a_run_with_any_optimizer_resumes_bit_for_bit(tmp_path, own, monkeypatch, name, args):
    config = small(**BRIEF, checkpoint_seconds=0, optimizer__name=name, optimizer__args=args)
    whole = train(config, out=tmp_path / "whole")
    table = whole.record["config"]["optimizer"]
    assert (table["name"], table["args"], table["lr"]) == (name, args, 0.01)
    assert "weight_decay" not in table
    with monkeypatch.context() as patch:
        stop_after_checkpoint(patch, 6)
        with pytest.raises(Stopped):
            train(config, out=tmp_path / "run")
    train(out=tmp_path / "run", resume=True)
    for file in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_file_does_not_decide_which_optimizer_is_imported(tmp_path, own, capsys):
    table = f'[optimizer]\nname = "{own}"\nlr = 0.01\n'
    (tmp_path / "run.toml").write_text(table)
    (tmp_path / "sweep.toml").write_text(f"[run]\n{table.replace('[', '[run.')}[grid]\nseed=[0]\n")
    RunDirectory(tmp_path / "mine").create(load_config(tmp_path / "run.toml"))
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    for command in (
        "train run.toml --out new",
        "train --resume copy",
        "sweep sweep.toml --out new",
    ):
        assert main(command.split()) == 2
        message = capsys.readouterr().err
        assert f"names the optimizer '{own}', which would be imported from" in message
        assert "pass --trust or --set optimizer.name=…" in message
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "new").exists()
    run = RunDirectory(tmp_path / "mine")
    run.check_trusted(run.read_config())  # the user created this one
    arguments = flags(**BRIEF | {"epochs": 1}, optimizer__name=own)
    assert main(["train", "--out", "new", "--quiet", *arguments]) == 0
    assert (tmp_path / "executed").exists()


def test_what_the_user_names_in_the_command_and_pytorch_need_no_trust(own):
    config = load_config(None, [("optimizer.name", "torch.optim:Adam"), ("optimizer.lr", 0.01)])
    assert own_code(config) == {}
    config = load_config(None, [("optimizer", {"name": own, "lr": 0.01})])
    assert own_code(config) == {"optimizer.name": own}
    assert own_code(config, given=["model", "optimizer.lr"]) == {"optimizer.name": own}
    assert own_code(config, given=["optimizer"]) == {}


def test_a_checkpoint_from_before_these_settings_is_resumed(tmp_path, monkeypatch):
    """Its configuration lacks them, which means their defaults; another value is refused."""
    config = small(epochs=1, batch_size=280, method__sparsity=0.9, checkpoint_seconds=0)
    with monkeypatch.context() as patch:
        stop_after_checkpoint(patch, 2)
        with pytest.raises(Stopped):
            train(config, out=tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    state = read_checkpoint(path)
    del state["config"]["init_skip"], state["config"]["optimizer"]["args"]
    write_checkpoint(path, {**state, "config": {**state["config"], "label_smoothing": 0.5}})
    with pytest.raises(CheckpointError, match="another configuration"):
        train(out=tmp_path, resume=True)
    write_checkpoint(path, state)
    assert train(out=tmp_path, resume=True).record["epochs"] == 1
