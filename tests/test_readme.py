"""The example of the README runs, and linked files exist."""

import re
from pathlib import Path

import torch
from torch import nn

import probmask

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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
        assert (ROOT / target).exists(), target
    for script in re.findall(r"python (benchmarks/\S+\.py)", README):
        assert (ROOT / script).exists(), script


def test_ci_runs_the_test_command_of_the_readme():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
    assert "make test" in README
