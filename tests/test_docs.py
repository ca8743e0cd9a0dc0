"""Tables in the docs equal the output of commands, examples run, every method has a page."""

import inspect
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import probmask
import refresh_tables
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


def test_every_argument_of_attach_is_documented():
    page = (DOCS / "own_loop.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"## Arguments of `attach`\n\n(.*?)\n\n", page, re.DOTALL)
    names = " ".join(row.split("|")[1] for row in table.split("\n"))
    assert set(re.findall(r"`(\w+)`", names)) == set(inspect.signature(probmask.attach).parameters)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_page_with_all_settings(name):
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    settings = {field.name for field in fields(METHODS[name])} - {"sparsity"}
    assert [option for option in settings if f"`{option}" not in page] == []
    assert METHODS[name].year is None or str(METHODS[name].year) in page
    assert f"methods/{name}.md" in (DOCS / "methods.md").read_text(encoding="utf-8")


TABLES = [
    (str(page.relative_to(DOCS.parent)), *found)
    for page in refresh_tables.pages()
    for found in refresh_tables.tables(page)
]


def test_pages_with_tables_of_results():
    assert {page for page, *_ in TABLES} == {
        "README.md",
        "docs/methods.md",
        "docs/results/README.md",
        "docs/results/paper.md",
        "docs/results/short_budget.md",
    }
    comments = [
        page.read_text(encoding="utf-8").count("<!-- end -->") for page in refresh_tables.pages()
    ]
    assert len(TABLES) == sum(comments)


@pytest.mark.parametrize(("page", "command", "table"), TABLES)
def test_tables_of_results_equal_the_committed_records(page, command, table):
    """Otherwise, run python benchmarks/refresh_tables.py."""
    assert refresh_tables.printed(command) == table
    assert table.count("\n|") >= 3  # a heading, a line and a row


@pytest.fixture
def demo(tmp_path, monkeypatch, capsys):
    """A working directory with a finished run in it."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--out", "runs/demo", *flags(epochs=1)]) == 0
    capsys.readouterr()
    return tmp_path


def run_examples(page, names):
    """Run all Python blocks of a page in order, as one program."""
    text = (DOCS / page).read_text(encoding="utf-8")
    source = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    exec(compile(source, page, "exec"), names)


class SmallNetwork(nn.Module):
    """A network with the parts that the examples name."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, images):
        return self.head(self.body(self.stem(images)).mean((2, 3)))


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_the_examples_of_the_own_loop_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {
        "build_model": SmallNetwork,
        "loader": [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(5)],
        "criterion": nn.CrossEntropyLoss(),
        "epochs": 4,
    }
    run_examples("own_loop.md", names)
    assert "all: 13 of 672 kept, 98.07 % sparse" in capsys.readouterr().out
    assert names["summary"].kept == 672 - round(0.98 * 672)
    tuned = torch.load("tuned.pt", weights_only=True)
    assert tuned.keys() == SmallNetwork().state_dict().keys()
    weights = [tuned[name] for name in ("stem.0.weight", "body.0.weight", "head.weight")]
    assert sum(int(weight.count_nonzero()) for weight in weights) == 672 - round(0.9 * 672)


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
        "images": torch.randn(8, 1, 8, 8),
        "loader": [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(3)],
        "criterion": nn.CrossEntropyLoss(),
        "accuracy": lambda model, loader: 98.0,
    }
    run_examples("artifact.md", names)
    tuned = probmask.load_into(build_model(), demo / "tuned.safetensors")
    assert torch.equal(tuned[3].weight == 0, zero)
    assert not torch.equal(tuned[3].weight, model[3].weight)
    assert names["weight"].shape == (3, 64)


def test_the_commands_of_the_artifact_page_run(demo, capsys):
    page = (DOCS / "artifact.md").read_text(encoding="utf-8")
    commands = [line for line in page.splitlines() if line.startswith("probmask ")]
    assert len(commands) == 7
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    assert {path.name for path in demo.iterdir()} == {
        "runs", "demo", "demo.onnx", "demo.safetensors", "demo.bin",
    }  # fmt: skip
