"""The README: its example runs, its commands and files exist, its figures are measured ones."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import probmask
from probmask.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def numbers(line):
    """The decimal fractions of a line, as they are written."""
    return re.findall(r"\d+\.\d+", line)


def row(page, start):
    """The first row of a table of the page that starts like this."""
    return next(line for line in page.splitlines() if line.startswith(f"| {start}"))


def sections(page):
    """The names by which links point to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def result(name):
    return (ROOT / "docs" / "results" / name).read_text(encoding="utf-8")


def test_example(tmp_path, monkeypatch):
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    loader = [(torch.randn(8, 3, 6, 6), torch.randint(4, (8,))) for _ in range(5)]
    model.eval()(loader[0][0])  # initializes the lazy layer
    model.train()

    def build():
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)

    names = {"build": build, "epochs": 4, "loader": loader, "criterion": nn.CrossEntropyLoss()}
    exec(compile(source, "README.md", "exec"), names)
    size = model[0].weight.numel() + model[4].weight.numel()
    kept = int(model[0].weight.count_nonzero() + model[4].weight.count_nonzero())
    assert kept == size - round(0.98 * size)
    info = probmask.read(tmp_path / "model.safetensors")
    assert sum(t.nnz for t in info.tensors if t.name in ("0.weight", "4.weight")) == kept


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)h][^)]*)\)", README):
        page, _, section = target.partition("#")
        assert (ROOT / page).exists(), target
        assert not section or section in sections(ROOT / page), target
    for script in re.findall(r"python (benchmarks/\S+\.py)", README):
        assert (ROOT / script).exists(), script


def test_ci_runs_the_test_command_of_the_readme():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
    assert "make test" in README


COMMANDS = [line.split("#")[0].split() for line in README.splitlines() if line[:9] == "probmask "]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_and_their_flags_exist(words, capsys):
    with pytest.raises(SystemExit):
        main([words[1], "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert {word for word in words if word.startswith("--")} <= known


def test_figures_of_the_first_table_are_those_of_the_results(capsys):
    accuracy, size, speed = (row(README, start) for start in ("test acc", "file size", "time per"))
    leaderboard = result("README.md")
    assert numbers(accuracy) == ["72.55", "65.87", "0.38", "65.39", "0.41"]
    assert row(leaderboard, "dense |").startswith("| dense | 72.55 ")
    assert "| 65.87 ± 0.38 " in row(leaderboard, "probmask-tied | – |")
    assert "| 65.39 ± 0.41 " in row(leaderboard, "feather | – |")
    assert main(["compare", str(ROOT / "docs/results/records"), "--json"]) == 0
    (setting,) = json.loads(capsys.readouterr().out)["settings"]
    found = {(cell["method"], cell["sparsity"]): cell["bytes"] for cell in setting["cells"]}
    dense, tied = found["dense", 0], found["probmask-tied", 0.98]
    assert f"| {dense:,.0f} bytes | {tied:,.0f} bytes ({dense / tied:.1f} times smaller) |" in size
    assert numbers(speed) == ["6.51", "0.38", "17.3"]
    assert set(numbers(speed)) <= set(numbers(row(result("inference_speed.md"), "resnet32, 1 |")))


def test_figures_of_other_engines_are_those_of_the_results():
    page = result("inference_speed.md")
    for batch in (1, 64):
        ours = numbers(row(README, f"{batch} |"))
        measured = re.findall(rf"^\| resnet32, {batch} \|.*", page, re.MULTILINE)
        assert len(ours) == 6
        assert set(ours) <= {number for line in measured for number in numbers(line)}
