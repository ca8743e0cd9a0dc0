"""Networks built by name: the listed ones, and functions of the user."""

import json
import sys

import pytest
import torch
from torch import nn

import probmask.models
from probmask.errors import InputError
from probmask.masking.macs import count_macs
from probmask.masking.sites import find_sites
from probmask.models import MODELS, build_model, describe_models, model_settings


@pytest.mark.parametrize(("classes", "channels", "size"), [(10, 1, 8), (3, 3, 32), (100, 2, 9)])
def test_smallconv_gives_one_logit_per_class_for_any_small_image(classes, channels, size):
    model = build_model(
        "smallconv", {"width": 4}, suggested={"classes": classes, "channels": channels}
    )
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


def test_every_model_has_a_summary_of_one_line():
    for name, network in MODELS.items():
        first, *rest = (network.build.__doc__ or "").split("\n")
        assert first.endswith("."), name
        assert len(first) <= 70, name
        assert not rest or rest[0] == "", name
        assert network.summary == first[:-1]


def test_every_model_can_be_imported_by_its_name():
    for name, network in MODELS.items():
        assert getattr(probmask.models, name) is network.build
        assert name in probmask.models.__all__
    assert all(getattr(probmask.models, name) is not None for name in probmask.models.__all__)


def test_settings_take_precedence_over_the_suggestions_of_the_data():
    model = build_model("smallconv", {"classes": 4}, suggested={"classes": 10, "channels": 1})
    assert model.classifier.out_features == 4


def test_an_unknown_model_raises_with_the_nearest_name():
    with pytest.raises(
        InputError, match="--model smalconv: no such model; did you mean 'smallconv'"
    ):
        build_model("smalconv", {})
    with pytest.raises(InputError, match=r"--model xyz: no such model; choose from .*smallconv"):
        build_model("xyz", {})


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("widht", r"did you mean 'width'\?"),
        ("kernel", r"choose from channels, classes, width\."),
    ],
)
def test_an_unknown_setting_raises_with_the_nearest_one(setting, hint):
    message = rf"^--model smallconv: unknown key model_args\.{setting}; {hint}$"
    with pytest.raises(InputError, match=message):
        build_model("smallconv", {setting: 8})


@pytest.mark.parametrize("name", MODELS)
def test_a_network_too_large_for_memory_is_an_input_error(name):
    with pytest.raises(InputError, match=f"--model {name}: cannot be built with") as caught:
        build_model(name, {"width": 12 * 10**14})  # a multiple of all numbers of heads
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"width": "x"}, {"width": -1}, {"width": 2.5}])
def test_an_invalid_setting_is_an_input_error(settings):
    with pytest.raises(InputError, match="--model smallconv") as caught:
        build_model("smallconv", settings)
    assert "\n" not in str(caught.value)


# What a data set suggests.
SUGGESTED = {"classes": 10, "channels": 1, "image_size": [16, 18]}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user on the import path, under a name that no other test uses."""
    text = (
        "from torch import nn\n"
        "def plain(): return nn.Linear(2, 3)\n"
        "def sized(classes, *, channels=1, width=2): return nn.Linear(channels * width, classes)\n"
        "def anything(**settings): return nn.Linear(settings['channels'], settings['classes'])\n"
        "def passed_on(**settings):\n"
        "    from probmask.models import resnet20\n"
        "    return resnet20(width=2, **settings)\n"
        "def image(*, image_size, **others): return nn.Linear(*image_size)\n"
        "def wrong(): return 'no model'\n"
        "def broken(): raise ValueError('an error of its own')\n"
        "number = 3\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.line = nn.Linear(1, classes)\n"
    )
    (tmp_path / "own_networks.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_networks"
    sys.modules.pop("own_networks", None)


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("plain", {}, (3, 2)),
        ("sized", {}, (10, 1 * 2)),
        ("sized", {"width": 5, "classes": 7}, (7, 5)),
        ("anything", {}, (10, 1)),
        ("image", {}, (18, 16)),
    ],
)
def test_a_function_of_the_user_receives_the_settings_that_it_names(own, name, settings, shape):
    model = build_model(f"{own}:{name}", settings, suggested=SUGGESTED)
    assert isinstance(model, nn.Linear)
    assert tuple(model.weight.shape) == shape


def test_a_function_with_any_keyword_can_pass_its_settings_on_to_a_listed_network(own):
    """A network that works for any image size does not take `image_size`."""
    model = build_model(f"{own}:passed_on", {}, suggested=SUGGESTED)
    assert model(torch.randn(2, 1, 16, 18)).shape == (2, 10)


@pytest.mark.parametrize("name", MODELS)
def test_the_settings_are_enough_to_build_the_network_again(name):
    chosen = {"width": 4, **{"vit": {"patch": 1}, "bert": {"heads": 2}}.get(name, {})}
    settings = model_settings(name, chosen, suggested=SUGGESTED)
    sizes = {"image_size": [16, 18]} if name in ("conv4", "lenet300", "lenet5", "vit") else {}
    if name not in ("text_encoder", "bert"):
        sizes["channels"] = 1
    assert settings == {"classes": 10, **chosen, **sizes}
    built, again = (build_model(name, settings) for _ in range(2))
    again.load_state_dict(built.state_dict())


def test_a_class_can_be_named_instead_of_a_function(own):
    model = build_model(f"{own}:Net", {}, suggested={"classes": 4, "channels": 1})
    assert model.line.out_features == 4


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("own_networks:nothing", {}, "cannot be imported: .*nothing"),
        ("no_such_module:build", {}, "cannot be imported: No module named 'no_such_module'"),
        ("own_networks:", {}, "cannot be imported|not a function"),
        (":build", {}, "cannot be imported"),
        ("own_networks:number", {}, "is not a function that returns a model"),
        ("own_networks:wrong", {}, "returned str; it must return a torch.nn.Module"),
        (
            "own_networks:plain",
            {"width": 3},
            "model_args.width; this network has no settings",
        ),
        ("own_networks:sized", {}, "missing a required argument: 'classes'; its signature is"),
    ],
)
def test_an_error_about_a_function_of_the_user_is_one_line(own, name, settings, message):
    with pytest.raises(InputError, match=message) as caught:
        build_model(name, settings)
    assert str(caught.value).startswith(f"--model {name}: ")
    assert "\n" not in str(caught.value)


def test_an_error_inside_a_function_of_the_user_passes_through(own):
    with pytest.raises(ValueError, match="an error of its own") as caught:
        build_model(f"{own}:broken", {})
    assert not isinstance(caught.value, InputError)


def test_every_network_is_described_once_per_number_of_classes():
    listed = [(row["name"], row["classes"]) for row in describe_models()]
    assert listed == [(name, n) for name, network in MODELS.items() for n in network.classes]
    assert ("resnet32", 100) in listed


def test_a_description_has_the_sizes_and_the_cost():
    rows = {(row["name"], row["classes"]): row for row in describe_models()}
    assert rows["resnet50", 1000] == {
        "name": "resnet50",
        "summary": "ResNet50 for ImageNet: sixteen bottleneck blocks in four stages",
        "image_shape": [3, 224, 224],
        "classes": 1000,
        "layers": 54,
        "weights": 25_502_912,
        "parameters": 25_502_912 + 2 * 26_560,
        "macs": 4_089_184_256,
        "pooling_macs": 100_352,
    }


def test_the_descriptions_agree_with_real_networks():
    for row in describe_models():
        if row["weights"] > 300_000:
            continue
        model = build_model(row["name"], {"classes": row["classes"]})
        sites = find_sites(model)
        macs = count_macs(model, sites, torch.zeros(2, *row["image_shape"]))
        assert row["weights"] == sum(site.size for site in sites)
        assert row["parameters"] == sum(p.numel() for p in model.parameters())
        assert (row["macs"], row["pooling_macs"]) == (macs.dense, macs.pooling)


def test_the_descriptions_can_be_written_as_json():
    rows = describe_models()
    assert json.loads(json.dumps(rows)) == rows
