"""Loading an artifact by the name of its network. A file alone never decides which code runs."""

import copy
import io
import pickle
import sys

import pytest
import torch
from torch import nn

from probmask.artifact import load, load_into, save
from probmask.errors import ArtifactError, InputError
from probmask.models import build_model
from reference.networks import assert_same_state, build, make_batches, sgd, state_of, train


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_a_built_in_network_is_built_by_name(path):
    torch.manual_seed(0)
    settings = {"width": 4, "classes": 3}
    model = build_model("smallconv", settings)
    model(torch.randn(8, 1, 8, 8))  # gives BatchNorm non-trivial statistics
    save(model, path, metadata={"model": "smallconv", "model_args": settings})
    loaded = load(path)
    assert not any(module.training for module in loaded.modules())
    images = torch.randn(5, 1, 8, 8)
    assert torch.equal(loaded(images), model.eval()(images))


def described(model, **settings):
    return {"model": model, "model_args": settings}


@pytest.fixture
def own(tmp_path, monkeypatch):
    text = "from torch import nn\ndef build(size=3): return nn.Linear(size, size)\n"
    (tmp_path / "own_loaded.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_loaded:build"
    sys.modules.pop("own_loaded", None)


def test_code_named_only_by_the_file_is_not_imported(path, own):
    save(nn.Linear(2, 2), path, metadata=described(own, size=2))
    with pytest.raises(ArtifactError, match=r"in Python: model='own_loaded:build'\)"):
        load(path)
    assert "own_loaded" not in sys.modules


def test_code_named_by_the_caller_is_imported(path, own):
    model = nn.Linear(2, 2)
    save(model, path, metadata=described(own, size=2))
    loaded = load(path, model=own)
    assert torch.equal(loaded.weight, model.weight)


def test_a_built_in_network_keeps_its_dtype_and_uses_no_random_numbers(path):
    model = build_model("smallconv", {"width": 4}).bfloat16()
    save(model, path, metadata=described("smallconv", width=4))
    before = torch.random.get_rng_state()
    loaded = load(path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad and p.device.type == "cpu" for p in loaded.parameters())


def write_builder(tmp_path, monkeypatch, name, text):
    (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n{text}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return f"{name}:build"


def test_settings_in_the_file_allocate_no_memory_in_user_code(path, own):
    save(nn.Linear(2, 2), path, metadata=described(own, size=10**6))
    with pytest.raises(ArtifactError, match="shapes differ"):  # it would take a terabyte
        load(path, model=own)


def test_plain_tensor_attributes_have_data(path, tmp_path, monkeypatch):
    text = (
        "class Scaled(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(2, 2)\n"
        "        self.scale = torch.tensor(3.0)\n"
        "build = Scaled\n"
    )
    own = write_builder(tmp_path, monkeypatch, "own_scaled", text)
    save(nn.Linear(2, 2), path, metadata=described(own))
    assert load(path, model=own).scale == 3


def test_user_code_that_computes_with_its_weights_is_not_built_on_meta(path, tmp_path, monkeypatch):
    text = (
        "def build():\n"
        "    model = nn.Linear(2, 2)\n"
        "    assert model.weight.sum().item() < 100\n"
        "    return model\n"
    )
    own = write_builder(tmp_path, monkeypatch, "own_computing", text)
    model = nn.Linear(2, 2)
    save(model, path, metadata=described(own))
    assert torch.equal(load(path, model=own).weight, model.weight)


def test_a_network_larger_than_max_bytes_raises(path):
    save(build_model("smallconv", {"width": 4}), path, metadata=described("smallconv", width=4))
    with pytest.raises(ArtifactError, match="if you trust it, pass max_bytes="):
        load(path, max_bytes=1000)


@pytest.mark.parametrize("metadata", [{}, {"model": 5}, {"model": None}, {"model": ["smallconv"]}])
def test_a_file_without_a_model_name_points_to_load_into(path, metadata):
    save(nn.Linear(2, 2), path, metadata=metadata)
    with pytest.raises(ArtifactError, match=r"does not name its network; .*load_into"):
        load(path)


@pytest.mark.parametrize(
    "settings",
    [3, [1], {"width": 8, "widht": 4}, {"width": "wide"}, {"width": -1}, {"width": 2.5}],
)
def test_invalid_settings_in_the_file_raise(path, settings):
    model = build_model("smallconv", {"width": 4})
    save(model, path, metadata={"model": "smallconv", "model_args": settings})
    with pytest.raises(InputError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_settings_of_a_huge_network_raise_before_it_is_built(path):
    """Building it would allocate memory before any shape is compared."""
    save(
        build_model("smallconv", {"width": 4}), path, metadata=described("smallconv", width=10**15)
    )
    with pytest.raises(InputError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_settings_that_do_not_fit_the_tensors_raise(path):
    save(build_model("smallconv", {"width": 4}), path, metadata=described("smallconv", width=5))
    with pytest.raises(ArtifactError, match="shapes differ"):
        load(path)


def test_a_missing_file_raises(path):
    with pytest.raises(ArtifactError, match="no such file"):
        load(path)


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
    saved = build_model("smallconv", {"width": 4})
    with torch.no_grad():
        for parameter in saved.parameters():
            if parameter.dim() > 1:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.8, 0.0)
    save(saved, path, metadata=described("smallconv", width=4))
    model = load(path)
    before = state_of(model)
    images = torch.randn(3, 1, 8, 8)
    twin = COPIES[how](model)
    path.unlink()  # neither the model nor a copy depends on the file
    assert_same_state(state_of(twin), before)
    assert torch.equal(twin(images), model(images))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert_same_state(state_of(model), before)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["tied", "language"])
def test_copies_of_user_defined_classes_keep_their_ties(path, name, how):
    save(build(name), path)
    twin = COPIES[how](load_into(build(name, seed=1), path))
    assert len(list(twin.parameters())) == len(list(build(name).parameters()))
    train(twin, sgd(twin), make_batches(name, 2))
    assert list(twin.state_dict()) == list(build(name).state_dict())


def test_swapped_arguments_of_load_into_raise(tmp_path):
    with pytest.raises(InputError, match=r"load_into\(str, …\): expected a model first"):
        load_into(str(tmp_path / "model.safetensors"), nn.Linear(2, 2))
