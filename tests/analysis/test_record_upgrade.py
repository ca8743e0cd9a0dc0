"""Records of earlier formats are converted to the current one."""

import json
from collections import Counter
from pathlib import Path

import pytest

from analysis.synthetic_records import record, write
from probmask.analysis.experiments import find_experiment
from probmask.analysis.identity import digest, relevant_settings, run_identity
from probmask.analysis.record_upgrade import upgrade_method, upgrade_record
from probmask.analysis.records import find_records
from probmask.methods import METHODS
from probmask.sweeps.grid import expand
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


RELAXED = {"name": "probmask", "estimator": "relaxed"}  # up to format 4


def read(directory, made):
    (run,) = find_records([write(directory, made)])
    return run


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "probmask estimator=relaxed"),
        ({"scope": "layer"}, "probmask scope=layer estimator=relaxed"),
        ({"freeze_at": None}, "probmask freeze_at=1 estimator=relaxed"),
        ({"ramp_end": 0.6}, "probmask ramp_end=0.6 estimator=relaxed"),
        ({"train_weights": False}, "probmask train_weights=false estimator=relaxed"),
        ({"compat": "official"}, "probmask compat=official estimator=relaxed"),
        ({"draws": 2}, "probmask draws=2 estimator=relaxed"),
        ({"prob_lr": 0.006}, "probmask prob_lr=0.006 estimator=relaxed"),
        (
            {"select": "sample", "freeze_at": None},
            "probmask freeze_at=1 select=sample estimator=relaxed",
        ),
    ],
    ids=str,
)
def test_format_1_is_the_adaptive_recipe(settings, label, tmp_path):
    run = read(tmp_path, old_record(**settings))
    assert run.label == label
    assert run.record["format"] == RECORD_FORMAT


@pytest.mark.parametrize(
    ("settings", "today"),
    [
        ({}, {}),
        ({"freeze_at": None}, {"freeze_at": 1}),
        ({"train_weights": False}, {"train_weights": False}),
        ({"draws": 2, "every": "epoch"}, {"draws": 2, "every": "epoch"}),
        ({"compat": "official"}, {"compat": "official"}),
    ],
    ids=str,
)
def test_format_1_identity(settings, today, tmp_path):
    config = small(method={**RELAXED, "sparsity": 0.9, **today})
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


TIED = {"name": "probmask-tied"}
TO_THE_END = {"choose_at": 1.0, "freeze_at": 1.0}


@pytest.mark.parametrize(
    ("settings", "today"),
    [
        ({}, {**TIED, "temperature_end": 0.01, **TO_THE_END}),
        ({"recipe": "tied"}, {**TIED, "temperature_end": 0.01, **TO_THE_END}),
        ({"temperature_end": 0.005}, {**TIED, "temperature_end": 0.005, **TO_THE_END}),
        (
            {"freeze_at": 0.8},
            {**TIED, "temperature_end": 0.01, "choose_at": 0.8, "freeze_at": 0.8},
        ),
        ({"recipe": "paper"}, {"recipe": "paper"}),
        ({"recipe": "learned", "ramp_end": 0.6}, {**RELAXED, "ramp_end": 0.6}),
        ({"draws": 2}, {**RELAXED, "draws": 2}),
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
        (TIED, {**TIED, "temperature_start": 1 / 3, "ramp_end": 0.5, "every": "step"}),
        ({}, {"recipe": "adaptive", "freeze_at": 0.6, "draws": 1}),
        ({"prob_lr": 0.1}, {"recipe": "adaptive", "prob_lr": 0.1}),
        ({"recipe": "paper"}, {"recipe": "paper", "draws": 2, "select": "sample"}),
    ],
    ids=str,
)
def test_identity_does_not_depend_on_how_settings_are_given(settings, same):
    one, other = (
        small(method={"name": "probmask", "sparsity": 0.9, **given}) for given in (settings, same)
    )
    assert run_identity(one) == run_identity(other)


# All settings of a tied record of format 3, and of a learned one.
FORMAT_3 = {
    **dict.fromkeys((*OLD, "outside", "forget_by", "choose_at")),
    **GIVEN,
    "recipe": "tied",
    "draws": 1,
    "temperature_start": 1 / 3,
    "temperature_end": 1 / 3,
    "ramp_begin": 0.0,
    "ramp_end": 0.5,
    "every": "step",
    "freeze_at": 0.95,
    "select": "top",
}
LEARNED_3 = {
    **FORMAT_3,
    "recipe": "learned",
    "temperature_start": 1.0,
    "temperature_end": 0.03,
    "ramp_begin": 0.05,
    "freeze_at": 0.6,
}
PAPER_3 = {
    "recipe": "paper",
    "draws": 2,
    "ramp_begin": 0.16,
    "ramp_end": 0.6,
    "every": "epoch",
    "freeze_at": 1.0,
}


@pytest.mark.parametrize(
    ("settings", "today"),
    [
        (FORMAT_3, TIED),
        ({**FORMAT_3, "forget_by": 0.0}, {**TIED, "forget_by": 0}),
        ({**FORMAT_3, "outside": 1.0, "scope": "layer"}, {**TIED, "outside": 1, "scope": "layer"}),
        (LEARNED_3, RELAXED),
        ({**LEARNED_3, "train_weights": False}, {**RELAXED, "train_weights": False}),
        ({**LEARNED_3, "compat": "official"}, {**RELAXED, "compat": "official"}),
        (
            {**LEARNED_3, **PAPER_3, "select": "top"},
            {"recipe": "paper", "select": "top"},
        ),
    ],
    ids=str,
)
def test_format_3_identity(settings, today, tmp_path):
    config = small(method={"name": "probmask", "sparsity": 0.9, **today})
    made = made_by(settings, format=3, config=json.loads(json.dumps(to_table(config))))
    run = read(tmp_path, made)
    assert run.identity == run_identity(config)
    assert run.record["method"] == {**run.record["method"], **upgrade_method(settings)}


def test_tied_settings_of_format_3():
    """Settings of learned probabilities are dropped, as is None, which meant the default."""
    assert upgrade_method(FORMAT_3) == {
        "name": "probmask-tied",
        "sparsity": 0.9,
        "scope": "global",
        "cost": "params",
        "min_keep_per_layer": 0,
        "temperature_start": 1 / 3,
        "temperature_end": 1 / 3,
        "ramp_begin": 0.0,
        "ramp_end": 0.5,
        "every": "step",
        "freeze_at": 0.95,
    }


@pytest.mark.parametrize(
    "method",
    [
        {**RELAXED, "recipe": "adaptive", "draws": 1},
        {**RELAXED, "recipe": "paper", "draws": 2},
        {"name": "probmask", "sparsity": 0.9},
        {"name": "probmask-tied", "outside": 1.0},
        {"name": "gmp", "recipe": "tied"},
        {"recipe": ["odd"]},
    ],
    ids=str,
)
def test_current_methods_are_unchanged(method):
    assert upgrade_method(method) == method


RESULTS = Path(__file__).parents[2] / "docs" / "results"
OLDER = ("records", "recipes", "registry", "resnet20", "short_budget")  # of earlier formats too
COMMITTED = find_records([RESULTS / name for name in OLDER])


def test_committed_records_of_the_family():
    """The numbers of records that their content names, whatever their format."""
    count = Counter(
        (run.method, run.record["method"].get("recipe"))
        for run in COMMITTED
        if run.method.startswith("probmask")
    )
    assert count == {
        ("probmask-tied", None): 69,
        ("probmask", "adaptive"): 17,
        ("probmask", "paper"): 7,
    }


@pytest.mark.parametrize(
    "run",
    [run for run in COMMITTED if run.method.startswith("probmask")],
    ids=lambda run: run.path.name,
)
def test_committed_records_have_the_identity_of_a_run_today(run):
    """The upgraded settings are valid today, and training with them gives the same identity."""
    method = METHODS[run.method](
        **{key: value for key, value in run.record["method"].items() if key != "name"}
    )
    settings = {"name": run.method, **method.full_settings()}
    assert digest(relevant_settings(run.config, settings)) == run.identity


@pytest.mark.parametrize(
    ("name", "finished"),
    [("table1", 20), ("lsb_gsb", 8), ("supermask", 4), ("short_budget", 61), ("registry", 17)],
)
def test_committed_records_finish_the_experiments(name, finished):
    identities = {run.identity for run in COMMITTED}
    planned = expand(find_experiment(name).sweep("laptop"), source=name)
    assert sum(run.identity in identities for run in planned) == finished == len(planned)


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
