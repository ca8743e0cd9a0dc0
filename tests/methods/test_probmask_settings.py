"""The constructor: what is refused, and in which words."""

import dataclasses

import pytest

from probmask import Dense, InputError, ProbMask
from probmask.methods import METHODS

REFUSED = [
    (
        {"sparsity": 98},
        "ProbMask(sparsity=98): sparsity is the fraction removed, in [0, 1); for 98 % pass 0.98.",
    ),
    (
        {"sparsity": 99.5},
        (
            "ProbMask(sparsity=99.5): sparsity is the fraction removed, in [0, 1); "
            "for 99.5 % pass 0.995."
        ),
    ),
    ({"sparsity": 1}, "ProbMask(sparsity=1): sparsity is the fraction removed, in [0, 1)."),
    ({"sparsity": 1.0}, "ProbMask(sparsity=1.0): sparsity is the fraction removed, in [0, 1)."),
    ({"sparsity": -0.1}, "ProbMask(sparsity=-0.1): sparsity is the fraction removed, in [0, 1)."),
    (
        {"sparsity": "0.9"},
        (
            "ProbMask(sparsity='0.9'): sparsity is the fraction removed, in [0, 1); "
            "'0.9' is no number."
        ),
    ),
    (
        {"sparsity": True},
        (
            "ProbMask(sparsity=True): sparsity is the fraction removed, in [0, 1); "
            "True is no number."
        ),
    ),
    (
        {"sparsity": float("nan")},
        "ProbMask(sparsity=nan): sparsity is the fraction removed, in [0, 1).",
    ),
    ({"form": "old"}, "ProbMask(form='old'): one of None, 'tied', 'learned', 'paper'."),
    ({"scope": "all"}, "ProbMask(scope='all'): one of 'global', 'layer'."),
    ({"cost": "latency"}, "ProbMask(cost='latency'): one of 'params', 'flops'."),
    ({"every": "batch"}, "ProbMask(every='batch'): one of None, 'step', 'epoch'."),
    ({"select": "best"}, "ProbMask(select='best'): one of None, 'top', 'sample'."),
    ({"compat": "paper"}, "ProbMask(compat='paper'): one of None, 'official'."),
    ({"draws": 0}, "ProbMask(draws=0): masks sampled per update, a whole number, at least 1."),
    ({"draws": 1.5}, "ProbMask(draws=1.5): masks sampled per update, a whole number, at least 1."),
    (
        {"min_keep_per_layer": -1},
        "ProbMask(min_keep_per_layer=-1): weights, a whole number, at least 0.",
    ),
    ({"prob_lr": 0}, "ProbMask(prob_lr=0): a positive number, at least 1e-09."),
    ({"clip_norm": -1.0}, "ProbMask(clip_norm=-1.0): a positive number, at least 1e-09."),
    (
        {"temperature_end": 0.0},
        "ProbMask(temperature_end=0.0): a temperature, from 0.001 to 1.",
    ),
    (
        {"temperature_start": 2.0},
        "ProbMask(temperature_start=2.0): a temperature, from 0.001 to 1.",
    ),
    (
        {"temperature_start": 0.1, "temperature_end": 0.5},
        (
            "ProbMask(temperature_start=0.1, temperature_end=0.5): the temperature falls; "
            "end must not be above start."
        ),
    ),
    ({"ramp_end": 60}, "ProbMask(ramp_end=60): a part of the training, from 0 to 1."),
    ({"freeze_at": 1.5}, "ProbMask(freeze_at=1.5): a part of the training, from 0 to 1."),
    (
        {"freeze_at": "late"},
        "ProbMask(freeze_at='late'): a part of the training, from 0 to 1; 'late' is no number.",
    ),
    (
        {"ramp_begin": 0.7, "ramp_end": 0.6},
        (
            "ProbMask(ramp_begin=0.7, ramp_end=0.6): the budget falls from begin to end; "
            "begin must not come after end."
        ),
    ),
    ({"outside": 2}, "ProbMask(outside=2): a part of the gradient, from 0 to 1."),
    ({"forget_by": -0.1}, "ProbMask(forget_by=-0.1): a part of the training, from 0 to 1."),
    ({"choose_at": 1.1}, "ProbMask(choose_at=1.1): a part of the training, from 0 to 1."),
    (
        {"choose_at": 0.8, "freeze_at": 0.7},
        (
            "ProbMask(choose_at=0.8, freeze_at=0.7): what is frozen has been chosen; choose_at "
            "must not be above freeze_at."
        ),
    ),
    (  # above where the form starts
        {"temperature_end": 0.5},
        (
            "ProbMask(temperature_start=0.333333 (the tied form's), temperature_end=0.5): the "
            "temperature falls; end must not be above start."
        ),
    ),
    (  # after the form's end
        {"ramp_begin": 0.7},
        (
            "ProbMask(ramp_begin=0.7, ramp_end=0.5 (the tied form's)): the budget falls from "
            "begin to end; begin must not come after end."
        ),
    ),
    (
        {"select": "sample", "min_keep_per_layer": 2},
        (
            "ProbMask(select='sample', min_keep_per_layer=2): a sample promises no layer anything; "
            "drop one of the two."
        ),
    ),
    (
        {"form": "paper", "min_keep_per_layer": 2},
        (
            "ProbMask(select='sample', min_keep_per_layer=2): a sample promises no layer anything; "
            "drop one of the two."
        ),
    ),
    (  # not that it is above the learned form's freeze_at
        {"draws": 2, "choose_at": 1},
        (
            "ProbMask(draws=2, choose_at=1): choose_at is a setting of tied probabilities; drop "
            "one of the two."
        ),
    ),
    (
        {"form": "tied", "compat": "official"},
        (
            "ProbMask(form='tied', compat='official'): the released code learns its "
            "probabilities; drop one of the two."
        ),
    ),
    (
        {"form": "tied", "train_weights": False},
        (
            "ProbMask(form='tied', train_weights=False): probabilities that are tied to the "
            "weights are learned by training these; drop one of the two."
        ),
    ),
    (
        {"form": "tied", "draws": 2},
        (
            "ProbMask(form='tied', draws=2): draws is a setting of learned "
            "probabilities; drop one of the two."
        ),
    ),
    (
        {"form": "tied", "prob_lr": 0.01},
        (
            "ProbMask(form='tied', prob_lr=0.01): prob_lr is a setting of learned "
            "probabilities; drop one of the two."
        ),
    ),
    (
        {"form": "tied", "select": "sample"},
        (
            "ProbMask(form='tied', select='sample'): select is a setting of learned "
            "probabilities; drop one of the two."
        ),
    ),
    (
        {"form": "learned", "outside": 1},
        (
            "ProbMask(form='learned', outside=1): outside is a setting of tied "
            "probabilities; drop one of the two."
        ),
    ),
    (
        {"form": "paper", "forget_by": 0.5},
        (
            "ProbMask(form='paper', forget_by=0.5): forget_by is a setting of tied "
            "probabilities; drop one of the two."
        ),
    ),
    (  # which makes them learned
        {"draws": 2, "forget_by": 0},
        (
            "ProbMask(draws=2, forget_by=0): forget_by is a setting of tied "
            "probabilities; drop one of the two."
        ),
    ),
    (
        {"compat": "official", "cost": "flops"},
        (
            "ProbMask(compat='official', cost='flops'): the released code budgets parameters only; "
            "drop one of the two."
        ),
    ),
]


@pytest.mark.parametrize(("settings", "text"), REFUSED)
def test_refused_with_the_value_and_the_rule(settings, text):
    with pytest.raises(InputError) as caught:
        ProbMask(**({"sparsity": 0.9} | settings))
    assert str(caught.value) == text


@pytest.mark.parametrize("name", ["train_weights", "reinitialize"])
def test_a_switch_is_on_or_off(name):
    """From a config file may come "no", which is true."""
    with pytest.raises(InputError, match=rf"ProbMask\({name}='no'\)"):
        ProbMask(sparsity=0.9, **{name: "no"})


def test_an_unknown_setting_and_positional_arguments_are_errors():
    with pytest.raises(TypeError, match="temprature"):
        ProbMask(sparsity=0.9, temprature=1)
    with pytest.raises(TypeError):
        ProbMask(0.9)
    with pytest.raises(TypeError, match="sparsity"):
        ProbMask()


def test_settings_make_the_same_method_again():
    method = ProbMask(sparsity=0.9, draws=2, scope="layer")
    assert ProbMask(**method.settings()) == method
    assert set(method.settings()) == {field.name for field in dataclasses.fields(ProbMask)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.draws = 3


# Recipes


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({}, "tied"),
        ({"draws": 1, "select": "top"}, "tied"),  # what the tied form has anyway
        ({"scope": "layer", "cost": "flops", "min_keep_per_layer": 1}, "tied"),
        ({"outside": 0.1, "forget_by": 0, "choose_at": 0.5}, "tied"),
        ({"reinitialize": True, "clip_norm": 3, "freeze_at": 0.6}, "tied"),
        ({"train_weights": False}, "learned"),
        ({"compat": "official"}, "learned"),
        ({"prob_lr": 6e-3}, "learned"),
        ({"draws": 2}, "learned"),
        ({"select": "sample"}, "learned"),
        ({"form": "learned", "draws": 1}, "learned"),
        ({"form": "paper"}, "paper"),
        ({"form": "paper", "train_weights": False}, "paper"),
    ],
    ids=str,
)
def test_the_recipe_is_the_one_that_goes_with_the_other_settings(settings, form):
    assert ProbMask(sparsity=0.9, **settings).recipe_name == form


RECIPES = {
    "tied": {
        "draws": 1,
        "temperature_start": 1 / 3,
        "temperature_end": 1 / 3,
        "ramp_begin": 0.0,
        "ramp_end": 0.5,
        "every": "step",
        "freeze_at": 0.95,
        "select": "top",
    },
    "learned": {
        "draws": 1,
        "temperature_start": 1.0,
        "temperature_end": 0.03,
        "ramp_begin": 0.05,
        "ramp_end": 0.5,
        "every": "step",
        "freeze_at": 0.6,
        "select": "top",
    },
    "paper": {
        "draws": 2,
        "temperature_start": 1.0,
        "temperature_end": 0.03,
        "ramp_begin": 0.16,
        "ramp_end": 0.6,
        "every": "epoch",
        "freeze_at": 1.0,
        "select": "sample",
    },
}


@pytest.mark.parametrize("form", RECIPES)
def test_a_recipe_has_its_settings(form):
    resolved = ProbMask(sparsity=0.9, form=form).resolved
    assert dataclasses.asdict(resolved) == RECIPES[form]


@pytest.mark.parametrize("form", RECIPES)
def test_what_is_said_goes_before_the_recipe(form):
    given = {"temperature_start": 0.2, "temperature_end": 0.1, "every": "step", "freeze_at": 0.0}
    resolved = ProbMask(sparsity=0.9, form=form, **given).resolved
    assert dataclasses.asdict(resolved) == RECIPES[form] | given


def test_dense_removes_nothing():
    assert Dense().sparsity == 0
    with pytest.raises(InputError, match=r"Dense\(sparsity=0\.5\): dense training removes nothing"):
        Dense(sparsity=0.5)
    with pytest.raises(InputError, match=r"Dense\(sparsity=50\).*for 50 % pass 0\.5"):
        Dense(sparsity=50)


def test_the_registry_knows_each_method_by_its_name():
    for name, kind in METHODS.items():
        assert kind.name == name
        assert kind.summary
        assert "\n" not in kind.summary


def test_edges_that_are_allowed():
    for settings in (
        {"sparsity": 0},
        {"sparsity": 0.9999},
        {"ramp_begin": 0.0, "ramp_end": 0.0},
        {"ramp_begin": 1.0, "ramp_end": 1.0},
        {"freeze_at": 0.0},
        {"freeze_at": 1},
        {"clip_norm": 3},
    ):
        ProbMask(**({"sparsity": 0.5} | settings))
