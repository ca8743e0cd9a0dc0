"""The worked example of CONTRIBUTING.md, run as it is printed."""

import re
from pathlib import Path

import torch
from torch import nn

import probmask

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_method_of_the_guide_works():
    (source,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {"__name__": "guide"}
    exec(compile(source, str(GUIDE), "exec"), names)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    sparsifier = probmask.attach(
        model, names["LargestFirst"](sparsity=0.9), optimizer=optimizer, total_steps=20
    )
    for _ in range(20):
        loss = model(torch.randn(8, 20)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    summary = sparsifier.finalize()
    kept = sum(int(layer.weight.count_nonzero()) for layer in (model[0], model[2]))
    assert kept == summary.kept == 750 - 675
