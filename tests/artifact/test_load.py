"""Loading an artifact by the name of its network: a file alone never decides which code runs."""

import sys

import pytest
import torch
from torch import nn

from probmask.artifact import load, save
from probmask.errors import ArtifactError, InputError
from probmask.models import build_model


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_a_network_of_the_package_is_built_by_its_name(path):
    torch.manual_seed(0)
    settings = {"width": 4, "classes": 3}
    model = build_model("smallconv", settings)
    model(torch.randn(8, 1, 8, 8))  # so that BatchNorm has something to remember
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


def test_code_that_only_the_file_names_is_not_run(path, own):
    save(nn.Linear(2, 2), path, metadata=described(own, size=2))
    with pytest.raises(ArtifactError, match=r"pass model='own_loaded:build' \(--model 'own_loaded"):
        load(path)
    assert "own_loaded" not in sys.modules


def test_code_that_the_caller_names_is(path, own):
    model = nn.Linear(2, 2)
    save(model, path, metadata=described(own, size=2))
    loaded = load(path, model=own)
    assert torch.equal(loaded.weight, model.weight)


def test_a_network_of_ours_keeps_its_dtype_and_leaves_random_numbers_alone(path):
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


def test_settings_of_the_file_ask_for_no_memory_in_code_of_the_user_either(path, own):
    save(nn.Linear(2, 2), path, metadata=described(own, size=10**6))
    with pytest.raises(ArtifactError, match="shapes differ"):  # a terabyte would not be had
        load(path, model=own)


def test_tensors_that_are_no_parameters_are_built_for_real(path, tmp_path, monkeypatch):
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


def test_code_that_needs_its_weights_at_once_is_built_for_real(path, tmp_path, monkeypatch):
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


def test_a_network_larger_than_allowed_is_refused(path):
    save(build_model("smallconv", {"width": 4}), path, metadata=described("smallconv", width=4))
    with pytest.raises(ArtifactError, match="if you trust the file, pass max_bytes="):
        load(path, max_bytes=1000)


@pytest.mark.parametrize("metadata", [{}, {"model": 5}, {"model": None}, {"model": ["smallconv"]}])
def test_a_file_that_does_not_say_what_it_is_gets_a_way_out(path, metadata):
    save(nn.Linear(2, 2), path, metadata=metadata)
    with pytest.raises(ArtifactError, match=r"does not say which model it is; .*load_into"):
        load(path)


@pytest.mark.parametrize(
    "settings",
    [3, [1], {"width": 8, "widht": 4}, {"width": "wide"}, {"width": -1}, {"width": 2.5}],
)
def test_settings_that_make_no_sense_are_an_input_error(path, settings):
    model = build_model("smallconv", {"width": 4})
    save(model, path, metadata={"model": "smallconv", "model_args": settings})
    with pytest.raises(InputError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_settings_of_a_network_larger_than_the_file_are_refused_unbuilt(path):
    """Memory for it would be asked for before anything is compared."""
    save(
        build_model("smallconv", {"width": 4}), path, metadata=described("smallconv", width=10**15)
    )
    with pytest.raises(InputError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_another_network_than_the_file_holds_is_refused(path):
    save(build_model("smallconv", {"width": 4}), path, metadata=described("smallconv", width=5))
    with pytest.raises(ArtifactError, match="shapes differ"):
        load(path)


def test_no_file_is_an_artifact_error(path):
    with pytest.raises(ArtifactError, match="no such file"):
        load(path)
