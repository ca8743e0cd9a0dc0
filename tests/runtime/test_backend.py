import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from probmask import models
from probmask.runtime.backend import probmask as backend
from runtime.networks import masked


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_torch_compile_gives_what_the_model_gives_at_any_batch_size():
    torch.manual_seed(0)
    model = masked(models.smallconv(width=8), 0.9)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for batch in (2, 5, 17):
            x = torch.randn(batch, 1, 8, 8)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_gradients_come_from_pytorch():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad is not None


def test_torch_compile_finds_it_by_name():
    """The entry point is what an installed package tells TorchDynamo."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    entry = project["entry-points"]["torch_dynamo_backends"]["probmask"]
    module, _, name = entry.partition(":")
    assert getattr(import_module(module), name) is backend
