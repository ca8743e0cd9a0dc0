"""Networks by name, and the user's own."""

import sys

import pytest
import torch
from torch import nn

import probmask.models
from probmask.errors import InputError
from probmask.models import MODELS, build_model, model_settings


@pytest.mark.parametrize(("classes", "channels", "size"), [(10, 1, 8), (3, 3, 32), (100, 2, 9)])
def test_smallconv_gives_one_logit_per_class_for_any_small_image(classes, channels, size):
    model = build_model(
        "smallconv", {"width": 4}, suggested={"classes": classes, "channels": channels}
    )
    assert model(torch.randn(2, channels, size, size)).shape == (2, classes)


def test_every_model_says_in_one_line_what_it_is():
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


def test_settings_win_over_what_the_data_suggests():
    model = build_model("smallconv", {"classes": 4}, suggested={"classes": 10, "channels": 1})
    assert model.classifier.out_features == 4


def test_an_unknown_model_gets_the_nearest_name():
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
def test_an_unknown_setting_gets_the_nearest_one_there_is(setting, hint):
    said = rf"^--model smallconv: unknown key model_args\.{setting}; {hint}$"
    with pytest.raises(InputError, match=said):
        build_model("smallconv", {setting: 8})


@pytest.mark.parametrize("name", MODELS)
def test_a_network_that_no_memory_holds_is_an_input_error(name):
    with pytest.raises(InputError, match=f"--model {name}: cannot be built with") as caught:
        build_model(name, {"width": 10**15})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"width": "x"}, {"width": -1}, {"width": 2.5}])
def test_a_setting_that_a_model_cannot_be_built_with_is_an_input_error(settings):
    with pytest.raises(InputError, match="--model smallconv") as caught:
        build_model("smallconv", settings)
    assert "\n" not in str(caught.value)


# What the data says of itself.
SUGGESTED = {"classes": 10, "channels": 1, "image_size": [8, 9]}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own, on the path under a name that no other test uses."""
    text = (
        "from torch import nn\n"
        "def plain(): return nn.Linear(2, 3)\n"
        "def sized(classes, *, channels=1, width=2): return nn.Linear(channels * width, classes)\n"
        "def anything(**settings): return nn.Linear(settings['channels'], settings['classes'])\n"
        "def handed_on(**settings):\n"
        "    from probmask.models import resnet20\n"
        "    return resnet20(width=2, **settings)\n"
        "def image(*, image_size, **others): return nn.Linear(*image_size)\n"
        "def wrong(): return 'no model'\n"
        "def broken(): raise ValueError('a fault of its own')\n"
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
        ("image", {}, (9, 8)),
    ],
)
def test_a_function_of_the_users_own_gets_what_it_takes(own, name, settings, shape):
    model = build_model(f"{own}:{name}", settings, suggested=SUGGESTED)
    assert isinstance(model, nn.Linear)
    assert tuple(model.weight.shape) == shape


def test_settings_that_are_handed_on_to_one_of_our_networks_fit_it(own):
    """Networks that work for any image do not take its size: they must not be given it."""
    model = build_model(f"{own}:handed_on", {}, suggested=SUGGESTED)
    assert model(torch.randn(2, 1, 8, 9)).shape == (2, 10)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_network_gets_is_enough_to_build_it_again(name):
    settings = model_settings(name, {"width": 2}, suggested=SUGGESTED)
    sizes = {"image_size": [8, 9]} if name == "conv4" else {}
    assert settings == {"classes": 10, "channels": 1, "width": 2, **sizes}
    built, again = (build_model(name, settings) for _ in range(2))
    again.load_state_dict(built.state_dict())


def test_a_class_will_do(own):
    model = build_model(f"{own}:Net", {}, suggested={"classes": 4, "channels": 1})
    assert model.line.out_features == 4


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("own_networks:nothing", {}, "cannot be imported: .*nothing"),
        ("no_such_module:build", {}, "cannot be imported: No module named 'no_such_module'"),
        ("own_networks:", {}, "cannot be imported|not a function"),
        (":build", {}, "cannot be imported"),
        ("own_networks:number", {}, "is not a function that builds a model"),
        ("own_networks:wrong", {}, "returned str; expected a function that returns"),
        ("own_networks:plain", {"width": 3}, "unknown key model_args.width; it takes none"),
        ("own_networks:sized", {}, "missing a required argument: 'classes'; it takes"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(own, name, settings, said):
    with pytest.raises(InputError, match=said) as caught:
        build_model(name, settings)
    assert str(caught.value).startswith(f"--model {name}: ")
    assert "\n" not in str(caught.value)


def test_what_fails_inside_it_keeps_its_traceback(own):
    with pytest.raises(ValueError, match="a fault of its own") as caught:
        build_model(f"{own}:broken", {})
    assert not isinstance(caught.value, InputError)
