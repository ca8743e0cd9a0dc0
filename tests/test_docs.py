"""Tables in the docs equal the output of commands, examples run, every method has a page."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import probmask
from probmask.cli import main
from probmask.methods import METHODS
from probmask.sweeps.grid import load_grid
from training.small import flags

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"models": "models_and_data.md", "data": "models_and_data.md", "methods": "methods.md"}


@pytest.mark.parametrize("what", PAGES)
def test_tables_equal_the_output_of_list(what, capsys):
    assert main(["list", what, "--markdown"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("| name |")
    page = (DOCS / PAGES[what]).read_text(encoding="utf-8")
    assert f"`probmask list {what} --markdown`:\n\n{printed}\n" in page


def test_table_of_experiments_equals_the_output_of_reproduce(capsys):
    assert main(["reproduce", "--list", "--markdown"]) == 0
    printed = capsys.readouterr().out.strip()
    page = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert f"`probmask reproduce --list --markdown`:\n\n{printed}\n" in page


def test_example_of_a_sweep(tmp_path):
    page = (DOCS / "experiments.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "sweep.toml").write_text(example)
    runs = load_grid(tmp_path / "sweep.toml")
    assert len(runs) == 2 * 2 * 2 + 1
    assert {run.config.epochs for run in runs} == {20}


@pytest.mark.parametrize("command", ["sweep", "reproduce"])
def test_every_flag_of_a_sweep_is_documented(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert [flag for flag in sorted(flags) if flag not in page] == []


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_page_with_all_settings(name):
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    settings = {field.name for field in fields(METHODS[name])} - {"sparsity"}
    assert [option for option in settings if f"`{option}" not in page] == []
    assert METHODS[name].year is None or str(METHODS[name].year) in page
    assert f"methods/{name}.md" in (DOCS / "methods.md").read_text(encoding="utf-8")


TABLES = [
    (page, *found)
    for page in ("README.md", "docs/results/README.md", "docs/results/short_budget.md")
    for found in re.findall(
        r"<!-- probmask (compare .*?) -->\n\n(.*?)\n\n<!-- end -->",
        (DOCS.parent / page).read_text(encoding="utf-8"),
        re.DOTALL,
    )
]


def test_pages_with_tables_of_results():
    assert {page for page, *_ in TABLES} == {
        "README.md",
        "docs/results/README.md",
        "docs/results/short_budget.md",
    }


@pytest.mark.parametrize(("page", "command", "table"), TABLES)
def test_tables_of_results_equal_the_committed_records(page, command, table, monkeypatch, capsys):
    """Otherwise, run python benchmarks/refresh_tables.py."""
    monkeypatch.chdir(DOCS.parent)
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.strip() == table
    assert len(table.splitlines()) > 5


@pytest.fixture
def demo(tmp_path, monkeypatch, capsys):
    """A working directory with a finished run in it."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--out", "runs/demo", *flags(epochs=1)]) == 0
    capsys.readouterr()
    return tmp_path


def test_the_examples_of_the_artifact_page_run(demo):
    def build_model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))

    model = build_model()
    with torch.no_grad():
        model[0].weight.masked_fill_(torch.rand_like(model[0].weight) < 0.8, 0.0)
        model[3].weight.masked_fill_(torch.rand_like(model[3].weight) < 0.8, 0.0)
    zero = model[3].weight == 0
    names = {
        "torch": torch,
        "model": model,
        "build_model": build_model,
        "loader": [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(3)],
        "criterion": nn.CrossEntropyLoss(),
        "accuracy": lambda model, loader: 98.0,
    }
    page = (DOCS / "artifact.md").read_text(encoding="utf-8")
    source = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    exec(compile(source, "artifact.md", "exec"), names)
    tuned = probmask.load_into(build_model(), demo / "tuned.safetensors")
    assert torch.equal(tuned[3].weight == 0, zero)
    assert not torch.equal(tuned[3].weight, model[3].weight)
    assert names["weight"].shape == (3, 64)


def test_the_commands_of_the_artifact_page_run(demo, capsys):
    page = (DOCS / "artifact.md").read_text(encoding="utf-8")
    commands = [line for line in page.splitlines() if line.startswith("probmask ")]
    assert len(commands) == 6
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert {path.name for path in demo.iterdir()} == {
        "runs", "demo.onnx", "demo.safetensors", "demo.bin",
    }  # fmt: skip
