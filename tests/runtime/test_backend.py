"""The backend of `torch.compile`."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from probmask import models
from probmask.errors import InputError
from probmask.runtime.backend import probmask as backend
from runtime.comparing import assert_close
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


class Pieces(nn.Module):
    """A varying number of inputs, keyword inputs, nested outputs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, *images, scale=None, times=1):
        features = [self.conv(x).relu() * times + self.shift for x in images]
        scaled = features[0] if scale is None else features[0] * scale
        return {"scaled": scaled, "all": (features, len(images)), "first": images[0]}


def test_inputs_and_outputs_of_any_kind():
    torch.manual_seed(0)
    model = Pieces().eval()
    compiled = torch.compile(model, backend=backend)
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_close(compiled(x, y), model(x, y))
        assert_close(compiled(x, y, y), model(x, y, y))
        assert_close(compiled(x, scale=torch.tensor(2.0)), model(x, scale=torch.tensor(2.0)))
        for times in (2, 3, 4):  # from the second value on, TorchDynamo makes it an input
            assert_close(compiled(x, times=times), model(x, times=times))


def test_shapes_may_change():
    torch.manual_seed(0)
    model = masked(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), 0.5)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for shape in ((2, 9, 9), (3, 9, 9), (1, 9, 9), (3, 12, 9), (3, 12, 15), (5, 9, 9)):
            x = torch.randn(shape[0], 3, *shape[1:])
            assert_close(compiled(x), model(x))


def test_pytorch_runs_beyond_the_largest_number_of_shapes():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()).eval()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for width in range(4, 15):
            x = torch.randn(2, 1, 5, width)
            assert_close(compiled(x), model(x))


def test_a_network_in_training_mode_updates_its_batchnorm_statistics():
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="keeps nothing between calls"):
            first = compiled(x)
        assert_close(first, twin(x))
        for _ in range(2):
            assert_close(compiled(-x), twin(-x))
    assert_close(dict(model.state_dict()), dict(twin.state_dict()))
    assert model[1].num_batches_tracked == 3


def test_inputs_are_changed_as_in_pytorch():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3)).eval()
    compiled = torch.compile(model, backend=backend)
    ours = torch.randn(2, 3, 8, 8)
    theirs = ours.clone()
    with torch.no_grad():
        assert_close(compiled(ours), model(theirs))
    assert torch.equal(ours, theirs)


def test_gradients_come_from_pytorch():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend=backend)
    compiled(torch.randn(3, 4)).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("settings", "given", "kind"),
    [
        ({"options": {"threads": 2}}, "options={'threads': 2}", "options"),
        ({"mode": "max-autotune"}, "mode='max-autotune'", "mode"),
    ],
)
def test_options_raise_an_input_error(settings, given, kind):
    compiled = torch.compile(nn.Linear(4, 4), backend=backend, **settings)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(InputError) as caught:
            compiled(torch.randn(3, 4))
        assert str(caught.value) == (
            f"torch.compile(backend='probmask', {given}): the backend takes no {kind}; leave it "
            "out, or call probmask.runtime.compile, which takes threads, layers and choices."
        )


def test_the_entry_point_names_the_backend():
    """TorchDynamo finds backends by the entry points of installed packages."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    entry = project["entry-points"]["torch_dynamo_backends"]["probmask"]
    module, _, name = entry.partition(":")
    assert getattr(import_module(module), name) is backend
