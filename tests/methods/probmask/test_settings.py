"""The constructors of both ProbMask methods: invalid settings and their messages."""

import dataclasses

import pytest

from probmask import InputError, ProbMask, TiedProbMask
from probmask.methods import METHODS

# Errors of both classes, with {} in place of the class name.
BOTH = [
    (
        {"sparsity": 98},
        "{}(sparsity=98): sparsity is the fraction pruned, in [0, 1); for 98 % pass 0.98.",
    ),
    (
        {"sparsity": 99.5},
        "{}(sparsity=99.5): sparsity is the fraction pruned, in [0, 1); for 99.5 % pass 0.995.",
    ),
    ({"sparsity": 1}, "{}(sparsity=1): sparsity is the fraction pruned, in [0, 1)."),
    ({"sparsity": -0.1}, "{}(sparsity=-0.1): sparsity is the fraction pruned, in [0, 1)."),
    (
        {"sparsity": "0.9"},
        "{}(sparsity='0.9'): sparsity is the fraction pruned, in [0, 1); '0.9' is not a number.",
    ),
    (
        {"sparsity": True},
        "{}(sparsity=True): sparsity is the fraction pruned, in [0, 1); True is not a number.",
    ),
    ({"sparsity": float("nan")}, "{}(sparsity=nan): sparsity is the fraction pruned, in [0, 1)."),
    ({"scope": "all"}, "{}(scope='all'): must be one of 'global', 'layer'."),
    ({"cost": "latency"}, "{}(cost='latency'): must be one of 'params', 'flops'."),
    (
        {"min_keep_per_layer": -1},
        "{}(min_keep_per_layer=-1): must be a number of weights, an integer of at least 0.",
    ),
    ({"clip_norm": -1.0}, "{}(clip_norm=-1.0): must be a positive number, at least 1e-09."),
    ({"temperature_end": 0.0}, "{}(temperature_end=0.0): must be a temperature, from 0.001 to 1."),
    (
        {"temperature_start": 0.1, "temperature_end": 0.5},
        "{}(temperature_start=0.1, temperature_end=0.5): the temperature must not rise.",
    ),
    ({"ramp_end": 60}, "{}(ramp_end=60): must be a fraction of the training, from 0 to 1."),
    (
        {"freeze_at": "late"},
        (
            "{}(freeze_at='late'): must be a fraction of the training, from 0 to 1; 'late' is not "
            "a number."
        ),
    ),
]

LEARNED = [
    ({"recipe": "old"}, "ProbMask(recipe='old'): must be one of 'adaptive', 'paper'."),
    ({"every": "batch"}, "ProbMask(every='batch'): must be one of None, 'step', 'epoch'."),
    ({"select": "best"}, "ProbMask(select='best'): must be one of None, 'top', 'sample'."),
    ({"compat": "paper"}, "ProbMask(compat='paper'): must be one of None, 'official'."),
    (
        {"draws": 1.5},
        (
            "ProbMask(draws=1.5): must be a number of masks sampled per update, an integer of at "
            "least 1."
        ),
    ),
    ({"prob_lr": 0}, "ProbMask(prob_lr=0): must be a positive number, at least 1e-09."),
    (
        {"train_weights": "no"},
        "ProbMask(train_weights='no'): must be one of True, False.",
    ),
    (
        {"ramp_begin": 0.7},
        (
            "ProbMask(ramp_begin=0.7, ramp_end=0.5 (of recipe 'adaptive')): the ramp must not end "
            "before it begins."
        ),
    ),
    (
        {"recipe": "paper", "min_keep_per_layer": 2},
        (
            "ProbMask(select='sample', min_keep_per_layer=2): a sample does not guarantee a "
            "number of weights; pass only one of the two."
        ),
    ),
    (
        {"compat": "official", "cost": "flops"},
        (
            "ProbMask(compat='official', cost='flops'): the released code budgets parameters only; "
            "pass only one of the two."
        ),
    ),
]

TIED = [
    ({"every": None}, "TiedProbMask(every=None): must be one of 'step', 'epoch'."),
    ({"outside": 2}, "TiedProbMask(outside=2): must be a fraction of the gradient, from 0 to 1."),
    (
        {"forget_by": -0.1},
        "TiedProbMask(forget_by=-0.1): must be a fraction of the training, from 0 to 1.",
    ),
    (
        {"choose_at": 0.8, "freeze_at": 0.7},
        (
            "TiedProbMask(choose_at=0.8, freeze_at=0.7): the weights are selected before the "
            "masks are frozen; choose_at must not exceed freeze_at."
        ),
    ),
    (
        {"ramp_begin": 0.7},
        "TiedProbMask(ramp_begin=0.7, ramp_end=0.5): the values must not decrease.",
    ),
]


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        *((kind, *case) for kind in (ProbMask, TiedProbMask) for case in BOTH),
        *((ProbMask, *case) for case in LEARNED),
        *((TiedProbMask, *case) for case in TIED),
    ],
)
def test_invalid_settings_raise_with_value_and_rule(kind, settings, text):
    with pytest.raises(InputError) as caught:
        kind(**({"sparsity": 0.9} | settings))
    assert str(caught.value) == text.format(kind.__name__)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((TiedProbMask, name) for name in ("recipe", "draws", "prob_lr", "select", "compat")),
        *((TiedProbMask, name) for name in ("train_weights", "reinitialize")),
        *((ProbMask, name) for name in ("outside", "forget_by", "choose_at", "temprature")),
    ],
)
def test_each_class_takes_only_its_own_settings(kind, name):
    with pytest.raises(TypeError, match=rf"{kind.__name__}\({name}=…\): no such setting; "):
        kind(sparsity=0.9, **{name: 1})


def test_a_misspelt_setting_suggests_the_closest_one():
    message = r"TiedProbMask\(sparsty=…\): no such setting; did you mean 'sparsity'\?"
    with pytest.raises(TypeError, match=message):
        TiedProbMask(sparsty=0.9)


def test_settings_are_keywords_and_rebuild_the_method():
    with pytest.raises(TypeError):
        ProbMask(0.9)
    for method in (
        ProbMask(sparsity=0.9, draws=2, scope="layer"),
        TiedProbMask(sparsity=0.9, outside=0.1),
    ):
        assert type(method)(**method.settings()) == method
        assert set(method.settings()) == {field.name for field in dataclasses.fields(method)}
        with pytest.raises(dataclasses.FrozenInstanceError):
            method.sparsity = 0.5


RECIPES = {
    "adaptive": {
        "draws": 1,
        "temperature_start": 1.0,
        "temperature_end": 0.03,
        "ramp_begin": 0.05,
        "ramp_end": 0.5,
        "every": "step",
        "freeze_at": 0.6,
        "select": "top",
        "estimator": "straight-through",
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
        "estimator": "relaxed",
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_given_settings_take_precedence_over_the_recipe(recipe):
    given = {"temperature_start": 0.2, "temperature_end": 0.1, "every": "step", "freeze_at": 0.0}
    assert dataclasses.asdict(ProbMask(sparsity=0.9, recipe=recipe).resolved) == RECIPES[recipe]
    resolved = ProbMask(sparsity=0.9, recipe=recipe, **given).resolved
    assert dataclasses.asdict(resolved) == RECIPES[recipe] | given


def test_the_registry_has_each_method_by_its_name():
    assert list(METHODS)[:2] == ["probmask-tied", "probmask"]
    for name, kind in METHODS.items():
        assert kind.name == name
        assert kind.summary
        assert "\n" not in kind.summary


@pytest.mark.parametrize("kind", [ProbMask, TiedProbMask])
def test_edges_that_are_allowed(kind):
    for settings in (
        {"sparsity": 0},
        {"sparsity": 0.9999},
        {"ramp_begin": 0.0, "ramp_end": 0.0},
        {"ramp_begin": 1.0, "ramp_end": 1.0},
        {"freeze_at": 0.0},
        {"freeze_at": 1},
        {"clip_norm": 3},
    ):
        kind(**({"sparsity": 0.5} | settings))
