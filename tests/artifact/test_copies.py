"""A loaded network is a network like any other: copied, pickled, moved, trained."""

import copy
import io
import pickle

import pytest
import torch

from probmask.artifact import load, load_into, save
from probmask.models import build_model
from reference.networks import assert_same_state, build, make_batches, sgd, state_of, train

SETTINGS = {"width": 4}


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    model = build_model("smallconv", SETTINGS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.8, 0.0)
    save(model, tmp_path / "m", metadata={"model": "smallconv", "model_args": SETTINGS})
    return tmp_path / "m"


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_equal_and_independent(path, how):
    model = load(path)
    before = state_of(model)
    images = torch.randn(3, 1, 8, 8)
    twin = COPIES[how](model)
    path.unlink()  # nothing of a copy, nor of the model, depends on the file
    assert_same_state(state_of(twin), before)
    assert torch.equal(twin(images), model(images))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert_same_state(state_of(model), before)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["tied", "language"])
def test_ties_of_ones_own_classes_survive(tmp_path, name, how):
    save(build(name), tmp_path / "m")
    twin = COPIES[how](load_into(build(name, seed=1), tmp_path / "m"))
    assert len(list(twin.parameters())) == len(list(build(name).parameters()))
    train(twin, sgd(twin), make_batches(name, 2))
    assert list(twin.state_dict()) == list(build(name).state_dict())
