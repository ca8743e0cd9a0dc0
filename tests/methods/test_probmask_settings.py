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
    ({"sparsity": "0.9"}, "ProbMask(sparsity='0.9'): sparsity is the fraction removed, in [0, 1)."),
    ({"sparsity": True}, "ProbMask(sparsity=True): sparsity is the fraction removed, in [0, 1)."),
    (
        {"sparsity": float("nan")},
        "ProbMask(sparsity=nan): sparsity is the fraction removed, in [0, 1).",
    ),
    ({"scope": "all"}, "ProbMask(scope='all'): one of 'global', 'layer'."),
    ({"cost": "latency"}, "ProbMask(cost='latency'): one of 'params', 'flops'."),
    ({"every": "batch"}, "ProbMask(every='batch'): one of 'step', 'epoch'."),
    ({"select": "best"}, "ProbMask(select='best'): one of 'top', 'sample'."),
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
    ({"freeze_at": "late"}, "ProbMask(freeze_at='late'): a part of the training, from 0 to 1."),
    (
        {"ramp_begin": 0.7, "ramp_end": 0.6},
        (
            "ProbMask(ramp_begin=0.7, ramp_end=0.6): the budget falls from begin to end; "
            "begin must not come after end."
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


@pytest.mark.parametrize("name", ["temperature_start", "temperature_end", "ramp_begin", "ramp_end"])
def test_what_must_be_a_number_cannot_be_none(name):
    with pytest.raises(InputError, match=rf"ProbMask\({name}=None\)"):
        ProbMask(sparsity=0.9, **{name: None})


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
        {"freeze_at": None},
        {"clip_norm": 3},
    ):
        ProbMask(**({"sparsity": 0.5} | settings))
