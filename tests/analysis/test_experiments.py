"""Experiments: valid runs, results of the paper, and the command `probmask reproduce`."""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

import probmask
from probmask.analysis.experiments import (
    SCALES,
    experiments,
    find_experiment,
    paper_figure,
    slope_curve,
)
from probmask.analysis.identity import run_identity
from probmask.analysis.records import Run
from probmask.cli import main
from probmask.errors import InputError
from probmask.methods import METHODS
from probmask.models import MODELS
from probmask.sweeps.grid import expand
from probmask.training.config import load_config, make_method, to_table

DIRECTORY = Path(__file__).parents[2] / "experiments"
TRAINED = [name for name, each in experiments().items() if each.curve is None]


@dataclass(frozen=True)
class Sizes:
    """The number of runs of an experiment: methods × sparsities × seeds × networks × data sets."""

    laptop: int
    paper: int | None


SIZES = {
    "table1": Sizes(5 * 2 * 2, 4 * (3 * 6 + 1)),
    "table2": Sizes(7 * 2 * 2, 5 * 4 + 3 + 2 * 2 + 1 + 1),
    "lsb_gsb": Sizes(2 * 2 * 2, 2 * 6),
    "mobilenetv1": Sizes(3 * 2 * 2, 2 * 2 + 1),
    "supermask": Sizes(2 * 2, 2 * 4),
    "accuracy_sparsity": Sizes(5 * 4 * 2, 4 * 4 * 6),
    "accuracy_flops": Sizes(5 * 3 * 2, 3 * 4 + 3 + 2 * 2),
    "layers": Sizes(3 * 2 * 2, 2 * 3 * 2),
    "mlprune_scores": Sizes(1, 1),
    "probabilities": Sizes(2, 1),
    "short_budget": Sizes(3 * 5 + 2 * 15 + 2 * 2 * 4, None),
    "short_budget_adamw": Sizes(3 * (5 * 2 + 1), None),
    "long_budget": Sizes(2 * 15 + 2 * 5 + 7 + 2 * 2 + 4, None),
    "paper_claims": Sizes(9 * 5 + 4 + 2 * 4 + 4 + 2 + 2 + 2, None),
    "training_length": Sizes(2 * 3 * 6 * (2 * 10 + 1), None),
    "leaderboard": Sizes(18 * 5 * 3 + 3, None),
    "leaderboard_resnet20": Sizes(15 * 3 * 3, None),
    "ham": Sizes(2 * (4 * 3 * 3 + 3), None),
    "registry": Sizes(17, None),
    "pretrained_resnet20": Sizes(2 * 3 * (6 * 4 + 1), None),
    "sst2_minilm_tuning": Sizes(3 * (7 + 1), None),
    "sst2_minilm": Sizes(3 * (7 * 5 + 1), None),
    "vit_adamw": Sizes(3 * (4 * 3 + 1), None),
}
SHORT = ("short_budget", "short_budget_adamw")
STUDIES = (*SHORT, "long_budget", "sst2_minilm_tuning")  # select_on = "val"
PRETRAINED = ("pretrained_resnet20", "sst2_minilm_tuning", "sst2_minilm")
SCALED = [
    (name, scale)
    for name, sizes in SIZES.items()
    for scale in SCALES
    if getattr(sizes, scale) is not None
]


def runs_of(name, scale):
    return expand(find_experiment(name).sweep(scale), source=name)


def record_of(config, **more):
    """The parts of a record by which a paper's result is found."""
    method = make_method(config)
    return {
        "data": config.data,
        "model": config.model,
        "method": {"name": config.method["name"], **method.settings()},
        "sparsity": {"asked": method.sparsity},
        "seed": config.seed,
        "config": to_table(config),
        **more,
    }


def figure(config):
    return paper_figure(Run(Path("record.json"), json.loads(json.dumps(record_of(config)))))


def test_every_file_is_an_experiment():
    assert {path.stem for path in DIRECTORY.glob("*.toml")} == set(experiments())
    assert set(SIZES) == set(TRAINED)


@pytest.mark.parametrize(("name", "scale"), SCALED)
def test_runs_are_valid_and_distinct(name, scale):
    planned = runs_of(name, scale)
    assert len(planned) == getattr(SIZES[name], scale)
    assert len({run.name for run in planned}) == len(planned)
    for run in planned:
        assert run.config.model in MODELS
        assert run.config.select_on == ("val" if name in STUDIES else "none")
        make_method(run.config).phases(run.config.epochs)
        assert (run.config.init is not None) == (name in PRETRAINED)
    others = ("long_budget", "paper_claims", "training_length", "vit_adamw", *PRETRAINED)
    if scale == "laptop" and name not in others:
        assert {run.config.data for run in planned} == {"cifar10"}
        assert {run.config.epochs for run in planned} == {12 if name in SHORT else 30}


def test_the_place_of_the_pretrained_files_does_not_count(tmp_path, monkeypatch):
    """A run is identified by the digests in the file of the experiment."""
    sweep = find_experiment("sst2_minilm").sweep("laptop")
    identities = [run.identity for run in expand(sweep, source="here")]
    monkeypatch.chdir(tmp_path)
    places = [("init", "elsewhere/model"), ("data_args.tokenizer", "elsewhere/tokenizer.json")]
    assert [run.identity for run in expand(sweep, places, source="there")] == identities


def test_missing_pretrained_files_are_reported_before_anything_is_trained(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "sst2"
    data.mkdir()
    for part in ("train", "test"):
        (data / f"{part}.tsv").write_text("good\t1\nbad\t0\n" * 200)
    command = ["reproduce", "sst2_minilm", "--data-dir", str(data)]
    words = ["--set", "data_args={}"]
    assert main([*command, *words, "--dry-run", "--json"]) == 0
    (message,) = json.loads(capsys.readouterr().out)["missing_data"]
    assert message == f"--init {tmp_path / 'minilm'}: cannot be read: No such file or directory."
    assert main([*command, *words]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "minilm").write_text("another file")
    assert main([*command, *words]) == 2
    assert "but init_sha256 is 53aa51172d14" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_claims_share_runs_with_the_longest_trainings():
    """ProbMask with the paper's recipe, STR, RigL and both kinds of GMP, at 98 and 99.5 %."""
    claims, lengths = (
        {run.identity for run in runs_of(name, "laptop")}
        for name in ("paper_claims", "training_length")
    )
    assert len(claims & lengths) == 5 * 2


def test_laptop_runs_equal_the_command_line_of_the_committed_runs():
    """The committed runs were trained with this command line."""
    flags = {
        "data": "cifar10",
        "data_dir": "anywhere",
        "model": "resnet14",
        "model_args.stem_stride": 2,
        "data_args.train_images": 10000,
        "epochs": 30,
        "batch_size": 128,
        "select_on": "none",
        "threads": 1,
        "tensorboard": False,
    }

    def identity(method, sparsity, seed, **settings):
        method = {"name": method, "sparsity": sparsity, **settings}
        return run_identity(load_config(None, [*flags.items(), ("method", method), ("seed", seed)]))

    table = {
        identity(method, sparsity, seed)
        for method in ("probmask-tied", "gmp", "rigl", "pbw", "str")
        for sparsity in (0.95, 0.98)
        for seed in (0, 1)
    }
    assert {run.identity for run in runs_of("table1", "laptop")} == table
    assert {run.identity for run in runs_of("lsb_gsb", "laptop")} == {
        identity("probmask", sparsity, seed, scope=scope, estimator="relaxed")
        for scope in ("global", "layer")
        for sparsity in (0.95, 0.98)
        for seed in (0, 1)
    }
    assert {run.identity for run in runs_of("supermask", "laptop")} == {
        identity(method, 0.9, seed, **settings)
        for method, settings in (
            ("probmask", {"train_weights": False, "estimator": "relaxed"}),
            ("edge-popup", {}),
        )
        for seed in (0, 1)
    }


def test_paper_scale_has_the_settings_of_table_5():
    """Table 5 of the paper."""
    for run in runs_of("lsb_gsb", "paper"):
        config = run.config
        assert (config.epochs, config.batch_size, config.optimizer.lr) == (300, 256, 0.1)
        assert config.method["recipe"] == "paper"
        settings = make_method(config).resolved
        assert (300 * settings.ramp_begin, 300 * settings.ramp_end) == (48, 180)
    for run in runs_of("table2", "paper"):
        config = run.config
        assert (config.batch_size, config.optimizer.lr) == (256, 0.256)
        assert (config.optimizer.momentum, config.label_smoothing) == (0.875, 0.1)
        assert config.optimizer.warmup_epochs == 5
        phases = make_method(config).phases(config.epochs)
        pruned = config.method["name"] in ("pbw", "mlprune")
        assert [phase.epochs for phase in phases] == ([100, 40] if pruned else [100])
        if pruned:
            assert phases[1].rate_scale * config.optimizer.lr == pytest.approx(1e-3)
    (scores,) = runs_of("mlprune_scores", "paper")
    phases = make_method(scores.config).phases(scores.config.epochs)
    assert [phase.epochs for phase in phases] == [160, 40]


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("table1", set()),
        ("lsb_gsb", set()),
        ("supermask", set()),
        ("mobilenetv1", set()),
        # The paper has RigL with ERK in a figure only.
        ("table2", {("rigl", "erk")}),
    ],
)
def test_every_run_of_a_table_has_a_paper_result(name, without):
    missing = set()
    for run in runs_of(name, "paper"):
        if figure(run.config) is None:
            method = make_method(run.config)
            missing.add((method.name, getattr(method, "allocation", None)))
    assert missing == without


@pytest.mark.parametrize(
    ("key", "accuracy"),
    [
        (("cifar10", "vgg19", "probmask", 0.999), 89.79),
        (("cifar100", "resnet32", "mlprune", 0.98), 37.86),
        (("cifar10", "resnet32", "pbw", 0.995), 73.03),
        (("imagenet", "resnet50", "str", 0.99), 50.35),
        (("imagenet", "mobilenetv1", "probmask", 0.941), 60.10),
        (("cifar10", "vgg19", "probmask", 0.97), None),
        (("cifar10", "resnet20", "probmask", 0.98), None),
        (("digits", "smallconv", "probmask", 0.98), None),
    ],
)
def test_paper_figure(key, accuracy):
    data, model, method, sparsity = key
    given = [("data", data), ("model", model), ("method.name", method)]
    assert figure(load_config(None, [*given, ("method.sparsity", sparsity)])) == accuracy


def test_paper_figure_needs_the_same_network_data_and_settings():
    def at_99(*more):
        keys = [("data", "cifar10"), ("model", "resnet32"), ("method.sparsity", 0.99)]
        return figure(load_config(None, [*keys, ("method.name", "probmask"), *more]))

    assert at_99() == 91.79
    assert at_99(("epochs", 3), ("optimizer.lr", 0.5)) == 91.79
    assert at_99(("method.scope", "layer")) == 90.89
    assert at_99(("method.train_weights", False)) is None
    assert at_99(("method.name", "probmask-tied")) is None  # not the paper's method
    assert at_99(("model_args.width", 16)) is None
    assert at_99(("data_args.train_images", 10000)) is None
    dense = [("data", "cifar100"), ("model", "vgg19"), ("method.name", "dense")]
    assert figure(load_config(None, dense)) == 72.56


@pytest.mark.parametrize("name", list(experiments()))
def test_paper_results_name_existing_methods_and_models(name):
    for row in find_experiment(name).paper_results:
        assert row["model"] in MODELS
        settings = row.get("settings", {})
        METHODS[row["method"]](sparsity=0.5 if row["method"] != "dense" else 0, **settings)
        assert all(0 < accuracy < 100 for accuracy in row["accuracy"].values())


# The computed figure


def test_slope_formula():
    rows = slope_curve({"prob": [0.5, 0.99], "noise": 0.04, "temperature": [1, 0.03], "points": 5})
    assert len(rows) == 10
    for row in rows:
        s, x = row["prob"], 1 / row["temperature"]
        r = math.log(s / (1 - s)) + 0.04
        m = 1 / (1 + math.exp(-r * x))
        # 1 - m by its own formula: subtracting would lose all digits at low temperatures.
        expected = m * (1 / (1 + math.exp(r * x))) * x / (s * (1 - s))
        assert row["slope"] == pytest.approx(expected, rel=1e-4)


def test_slope_rises_for_undecided_and_falls_for_decided_probabilities():
    rows = slope_curve(find_experiment("temperature").curve)
    for prob, direction in ((0.5, 1), (0.99, -1)):
        slopes = [row["slope"] for row in rows if row["prob"] == prob]
        steps = [direction * (b - a) for a, b in itertools.pairwise(slopes)]
        assert all(step > 0 for step in steps)


# The command


def test_list(capsys):
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    for name in experiments():
        assert name in printed
    assert "20 runs, about 2.0 h on one core" in printed
    assert main(["reproduce", "--list", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in described] == list(experiments())
    assert described[0]["scales"]["laptop"] == {"runs": 20, "hours": 2.0, "on": "one core"}


def test_curve_is_printed_and_written(capsys, tmp_path):
    assert main(["reproduce", "temperature", "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "S at s = 0.99" in printed
    lines = (tmp_path / "new" / "temperature.csv").read_text().splitlines()
    assert lines[0] == "prob,temperature,slope"
    assert len(lines) == 1 + 2 * 98
    assert main(["reproduce", "temperature", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 2 * 98


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "pass the name of an experiment"),
        (["reproduce", "tabel1"], "no such experiment; did you mean 'table1'?"),
        (["reproduce", "table1", "--scale", "labtop"], "no such scale; did you mean 'laptop'?"),
        (["reproduce", "table1", "--dry-run", "--set", "epoch=3"], "unknown key epoch"),
        (
            ["reproduce", "table1", "--dry-run", "--jobs", "0"],
            "the number of parallel runs",
        ),
        (["reproduce", "table1", "--dry-run", "--records", "nowhere"], "nowhere: no such file"),
        (["reproduce", "table1", "--data-dir", "nowhere", "--out", "{out}"], "nowhere"),
    ],
)
def test_input_errors_are_one_line(arguments, message, capsys, tmp_path):
    given = [argument.replace("{out}", str(tmp_path)) for argument in arguments]
    assert main(given) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(tmp_path.rglob("*.toml")) == []


def test_missing_files_raise(monkeypatch):
    from probmask.analysis import experiments as module

    monkeypatch.setattr(module, "_DIRECTORIES", (Path("nowhere"),))
    with pytest.raises(InputError, match="reinstall probmask"):
        module.experiments.__wrapped__()


def test_wheel_contains_the_files():
    """A wheel contains them in the package, the first of `_DIRECTORIES`."""
    import tomllib

    from probmask.analysis import experiments as module

    project = tomllib.loads((DIRECTORY.parent / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["experiments"] == "probmask/experiments"
    assert module._DIRECTORIES[0] == Path(probmask.__file__).parent / "experiments"
