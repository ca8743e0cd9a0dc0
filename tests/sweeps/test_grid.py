"""Grids: every combination once, with each key in its table."""

import tomllib

import pytest

from probmask.cli import main
from probmask.errors import InputError
from probmask.sweeps.grid import expand, load_grid


def planned(text, *overrides):
    return expand(tomllib.loads(text), overrides, source="sweep.toml")


def keys(text, *names):
    """Return, for every run, the values of some settings of its method or configuration."""
    return [
        tuple(run.config.method.get(name, getattr(run.config, name, None)) for name in names)
        for run in planned(text)
    ]


def test_combinations_follow_the_order_of_the_file():
    grid = """
    [grid]
    method = ["probmask", "gmp"]
    sparsity = [0.9, 0.98]
    seed = [0, 1]
    """
    assert keys(grid, "name", "sparsity", "seed") == [
        (method, sparsity, seed)
        for method in ("probmask", "gmp")
        for sparsity in (0.9, 0.98)
        for seed in (0, 1)
    ]


def test_settings_of_all_runs_are_in_the_table_run():
    (run,) = planned('[run]\ndata = "cifar10"\nepochs = 7\noptimizer.lr = 0.3\n[grid]\nseed = 4')
    assert (run.config.data, run.config.epochs, run.config.seed) == ("cifar10", 7, 4)
    assert (run.config.optimizer.lr, run.config.optimizer.momentum) == (0.3, 0.9)
    assert run.config.model == "resnet20"  # the default of the data set, as in a single run


def test_a_file_without_a_grid_is_one_run():
    (run,) = planned("[run]\nepochs = 2")
    assert run.config.epochs == 2
    assert not run.config.dense_twin  # the default of a single run on digits


def test_methods_take_settings_and_any_dotted_key_is_an_axis():
    grid = """
    [grid]
    method = ["probmask", { name = "probmask", scope = "layer" }]
    optimizer.lr = [0.1, 0.2]
    """
    runs = planned(grid)
    found = [(run.config.method.get("scope"), run.config.optimizer.lr) for run in runs]
    assert found == [(None, 0.1), (None, 0.2), ("layer", 0.1), ("layer", 0.2)]


def test_a_method_of_the_grid_replaces_that_of_run_but_keeps_the_sparsity():
    grid = """
    [run.method]
    name = "probmask"
    sparsity = 0.7
    freeze_at = "none"
    [[grid]]
    method.scope = ["global", "layer"]
    [[grid]]
    method = "gmp"
    """
    assert keys(grid, "name", "sparsity", "freeze_at", "scope") == [
        ("probmask", 0.7, "none", "global"),
        ("probmask", 0.7, "none", "layer"),
        ("gmp", 0.7, None, None),
    ]


def test_equal_runs_of_several_grids_are_listed_once():
    grid = """
    [[grid]]
    method = ["probmask", "gmp"]
    sparsity = 0.9
    [[grid]]
    method = ["gmp", "dense"]
    sparsity = [0.9, 0.98]
    """
    assert keys(grid, "name", "sparsity") == [
        ("probmask", 0.9),
        ("gmp", 0.9),
        ("gmp", 0.98),
        ("dense", None),  # listed once, because it has no sparsity
    ]


def test_overrides_apply_to_every_run():
    runs = planned("[grid]\nseed = [0, 1]", ("epochs", 3), ("sparsity", 0.5), ("seed", 9))
    assert [(run.config.epochs, run.config.method["sparsity"]) for run in runs] == [(3, 0.5)]


def test_names_describe_the_run_and_are_valid_paths():
    grid = """
    [run]
    model = "my.package:build"
    [grid]
    method = { name = "probmask", scope = "layer", min_keep_per_layer = 5 }
    sparsity = 0.95
    seed = 2
    """
    (run,) = planned(grid)
    assert run.name == (
        "digits-my.package-build-probmask-scope=layer-min-keep-per-la"
        f"-0.95-seed2-{run.identity[:8]}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[gird]\nseed = [0]", "unknown table [gird]; did you mean 'grid'?"),
        ("", "sweep.toml: describes no run; put common settings in [run]"),
        ("[run]\n[[grid]]\n[[grid]]", "sweep.toml: describes no run"),
        ("run = 3", "run = 3: must be a table"),
        ("grid = 3", "grid must be a table of lists"),
        ("grid = []", "grid must be a table of lists"),
        ("[grid]\nseed = []", "grid.seed = []: lists no value"),
        ("[grid]\nsed = [0]", "sweep.toml: unknown key sed; did you mean 'seed'?"),
        (
            '[grid]\nmethod = ["probmsak"]',
            "sweep.toml: method.name = probmsak: no such method; did you mean 'probmask'?",
        ),
        (
            '[run]\ndata = "digts"\n[grid]\nseed = [0]',
            "sweep.toml: data = digts: no such data set; did you mean 'digits'?",
        ),
        (
            '[run]\nmodel = "smalconv"\n[grid]\nseed = [0]',
            "sweep.toml: model = smalconv: no such model; did you mean 'smallconv'?",
        ),
        ("[grid]\nlr = [0.1]", "sweep.toml: unknown key lr; did you mean 'optimizer.lr'?"),
        (
            "[grid]\nmodel_args.widht = [0]",
            "sweep.toml: unknown key model_args.widht; did you mean 'width'?",
        ),
        ("[grid]\nmethod = [3]", "grid.method = 3: expected a name, or a table with a name"),
        ('[grid]\nmethod = [{ scope = "layer" }]', "expected a name, or a table with a name"),
        ("[grid]\nsparsity = [98]", "for 98 % pass 0.98"),
        ("[grid]\nmethod.forget_by = [2]", "method.forget_by = 2: "),
        ("[grid]\nepochs.x = [0]", "epochs = {'x': 0}: expected a whole number"),
    ],
)
def test_a_wrong_grid_raises(text, expected):
    with pytest.raises(InputError) as caught:
        planned(text)
    assert expected in str(caught.value)


def test_a_grid_that_is_too_large_raises_before_it_is_expanded(tmp_path, capsys):
    """Nine million runs would take hours to expand."""
    axes = "\n".join(f"{key} = {list(range(1, 210))}" for key in ("seed", "epochs", "batch_size"))
    (tmp_path / "huge.toml").write_text(f"[[grid]]\n{axes}\n[[grid]]\nseed = [0]\n")
    assert main(["sweep", str(tmp_path / "huge.toml"), "--dry-run"]) == 2
    assert "the grid has 9,129,330 runs, but at most 10,000 are allowed" in capsys.readouterr().err


def test_an_empty_file_raises_on_the_command_line(tmp_path, capsys):
    (tmp_path / "empty.toml").write_text("# nothing yet\n")
    assert main(["sweep", str(tmp_path / "empty.toml"), "--set", "seed=1", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith(f"probmask: {tmp_path}/empty.toml: describes no run;")


def test_an_unreadable_file_raises_with_its_name(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.toml: cannot be read"):
        load_grid(tmp_path / "nothing.toml")
    (tmp_path / "torn.toml").write_text("[grid")
    with pytest.raises(InputError, match=r"torn\.toml: not valid TOML"):
        load_grid(tmp_path / "torn.toml")
