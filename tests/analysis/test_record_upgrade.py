"""Records of earlier formats are converted to the current one."""

import json

import pytest

from analysis.synthetic_records import record, write
from probmask.analysis.identity import run_identity
from probmask.analysis.record_upgrade import upgrade_record
from probmask.analysis.records import find_records
from probmask.training.config import to_table
from probmask.training.record_format import RECORD_FORMAT
from training.small import small

# All settings of ProbMask in format 1, with their defaults.
OLD = {
    "name": "probmask",
    "sparsity": 0.9,
    "scope": "global",
    "cost": "params",
    "draws": 1,
    "train_weights": True,
    "reinitialize": None,
    "prob_lr": None,
    "temperature_start": 1.0,
    "temperature_end": 0.03,
    "ramp_begin": 0.05,
    "ramp_end": 0.5,
    "every": "step",
    "freeze_at": 0.6,
    "select": "top",
    "min_keep_per_layer": 0,
    "clip_norm": None,
    "compat": None,
}
# Settings of ProbMask in format 2 that were not None.
GIVEN = {"name": "probmask", "sparsity": 0.9, "scope": "global", "cost": "params"} | {
    "train_weights": True,
    "min_keep_per_layer": 0,
}


def made_by(method, **changes):
    """A synthetic record of a method with these settings."""
    return {**record(), "method": method, **changes}


def old_record(**settings):
    return made_by({**OLD, **settings}, format=1)


def record_of_format_2(**settings):
    """A record in which None stands for the values of the recipe."""
    return made_by({**dict.fromkeys((*OLD, "recipe")), **GIVEN, **settings}, format=2)


def read(directory, made):
    (run,) = find_records([write(directory, made)])
    return run


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "probmask recipe=learned"),
        ({"scope": "layer"}, "probmask recipe=learned scope=layer"),
        ({"freeze_at": None}, "probmask recipe=learned freeze_at=1"),
        ({"ramp_end": 0.6}, "probmask recipe=learned ramp_end=0.6"),
        ({"train_weights": False}, "probmask recipe=learned train_weights=false"),
        ({"compat": "official"}, "probmask recipe=learned compat=official"),
        ({"draws": 2}, "probmask recipe=learned draws=2"),
        ({"prob_lr": 0.006}, "probmask recipe=learned prob_lr=0.006"),
        (
            {"select": "sample", "freeze_at": None},
            "probmask recipe=learned freeze_at=1 select=sample",
        ),
    ],
    ids=str,
)
def test_format_1_default_is_the_learned_recipe(settings, label, tmp_path):
    run = read(tmp_path, old_record(**settings))
    assert run.label == label
    assert run.record["format"] == RECORD_FORMAT


@pytest.mark.parametrize(
    ("settings", "today"),
    [
        ({}, {"recipe": "learned"}),
        ({"freeze_at": None}, {"recipe": "learned", "freeze_at": 1}),
        ({"train_weights": False}, {"train_weights": False}),
        ({"draws": 2, "every": "epoch"}, {"draws": 2, "every": "epoch"}),
        ({"compat": "official"}, {"compat": "official"}),
    ],
    ids=str,
)
def test_format_1_identity(settings, today, tmp_path):
    config = small(method={"name": "probmask", "sparsity": 0.9, **today})
    made = {**old_record(**settings), "config": json.loads(json.dumps(to_table(config)))}
    assert read(tmp_path, made).identity == run_identity(config)


@pytest.mark.parametrize(
    "made",
    [
        record("gmp", format=1),
        made_by({"name": "mine", "freeze_at": None}, format=1),
        made_by({"name": "probmask", "freeze_at": None}, format=RECORD_FORMAT),
    ],
    ids=["another method", "unknown method", "current format"],
)
def test_other_records_are_unchanged(made):
    assert upgrade_record(made) == made


TO_THE_END = {"choose_at": 1.0, "freeze_at": 1.0}


@pytest.mark.parametrize(
    ("settings", "today"),
    [
        ({}, {"temperature_end": 0.01, **TO_THE_END}),
        ({"recipe": "tied"}, {"temperature_end": 0.01, **TO_THE_END}),
        ({"temperature_end": 0.005}, {"temperature_end": 0.005, **TO_THE_END}),
        ({"freeze_at": 0.8}, {"temperature_end": 0.01, "choose_at": 0.8, "freeze_at": 0.8}),
        ({"recipe": "paper"}, {"recipe": "paper"}),
        ({"recipe": "learned", "ramp_end": 0.6}, {"recipe": "learned", "ramp_end": 0.6}),
        ({"draws": 2}, {"recipe": "learned", "draws": 2}),
    ],
    ids=str,
)
def test_format_2_identity(settings, today, tmp_path):
    config = small(method={"name": "probmask", "sparsity": 0.9, **today})
    made = record_of_format_2(**settings)
    made["config"] = json.loads(json.dumps(to_table(config)))
    assert read(tmp_path, made).identity == run_identity(config)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({}, {"recipe": "tied"}),
        ({"recipe": "tied"}, {"temperature_start": 1 / 3, "ramp_end": 0.5, "every": "step"}),
        ({"recipe": "learned"}, {"recipe": "learned", "freeze_at": 0.6, "draws": 1}),
        ({"prob_lr": 0.1}, {"recipe": "learned", "prob_lr": 0.1}),
    ],
    ids=str,
)
def test_identity_does_not_depend_on_how_settings_are_given(settings, same):
    one, other = (
        small(method={"name": "probmask", "sparsity": 0.9, **given}) for given in (settings, same)
    )
    assert run_identity(one) == run_identity(other)


def test_configuration_and_results_are_unchanged(tmp_path):
    made = old_record()
    run = read(tmp_path, made)
    changed = {key for key in made if run.record[key] != made[key]}
    assert changed == {"format", "method"}
    kept = ("name", "sparsity", "scope", "min_keep_per_layer")
    assert {key: run.record["method"][key] for key in kept} == {key: OLD[key] for key in kept}


@pytest.mark.parametrize("name", ["feather", "st3"])
def test_format_1_did_not_clip_gradients(name, tmp_path):
    settings = {"name": name, "sparsity": 0.9, "ramp_begin": 0.1}
    old = read(tmp_path / "old", made_by(settings, format=1))
    new = read(tmp_path / "new", made_by({**settings, "clip_norm": 3.0}))
    assert old.label == f"{name} ramp_begin=0.1 clip_norm=none"
    assert new.label == f"{name} ramp_begin=0.1"
    assert old.identity != new.identity
