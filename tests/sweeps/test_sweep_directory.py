"""Plans: which runs are finished, failed, unfinished or new; `probmask sweep` without training."""

import json
import shutil
from pathlib import Path

import pytest

from probmask.analysis.records import find_records, write_compact
from probmask.cli import main
from probmask.errors import InputError
from probmask.sweeps.grid import expand, load_grid
from probmask.sweeps.sweep_directory import SweepDirectory, make_plan, update_copy
from probmask.training.run_directory import RunDirectory
from probmask.training.trainer import train
from sweeps.small_sweep import write_sweep
from training.small import small

TABLE = {
    "run": {
        "model_args": {"width": 8},
        "batch_size": 256,
        "epochs": 1,
        "select_on": "none",
        "dense_twin": False,
        "tensorboard": False,
    },
    "grid": {"sparsity": 0.9, "seed": [0, 1, 2]},
}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The first run of the grid, trained outside the sweep."""
    config = small(epochs=1, method__sparsity=0.9)
    return train(config, out=tmp_path_factory.mktemp("elsewhere") / "mine").directory


@pytest.fixture
def runs():
    return expand(TABLE, source="sweep.toml")


def states(plan):
    return (
        [planned.config.seed for planned, _ in plan.finished],
        [planned.config.seed for planned, _ in plan.failed],
        [(job.planned.config.seed, job.resume) for job in plan.jobs],
    )


def test_all_runs_of_a_new_sweep_are_new(runs, tmp_path):
    plan = make_plan(runs, SweepDirectory(tmp_path / "out"))
    assert states(plan) == ([], [], [(0, False), (1, False), (2, False)])
    assert not (tmp_path / "out").exists()


def test_a_record_outside_the_sweep_counts_as_finished(runs, record, tmp_path):
    directory = SweepDirectory(tmp_path / "out")
    plan = make_plan(runs, directory, records=[record])
    assert states(plan) == ([0], [], [(1, False), (2, False)])
    committed = tmp_path / "committed"
    committed.mkdir()
    write_compact(json.loads((record / "record.json").read_text()), committed / "any name.json")
    assert states(make_plan(runs, directory, records=[committed])) == states(plan)
    assert states(make_plan(runs, directory, records=[tmp_path])) == states(plan)


def test_records_of_the_sweep_count_without_its_runs(runs, record, tmp_path):
    directory = SweepDirectory(tmp_path)
    with directory.locked():
        shutil.copytree(record, directory.run(runs[0]).path)
        directory.write_record(runs[0])
        shutil.rmtree(directory.runs)
        assert states(make_plan(runs, directory)) == ([0], [], [(1, False), (2, False)])


def test_an_unfinished_run_is_resumed(runs, tmp_path):
    directory = SweepDirectory(tmp_path)
    with directory.locked():
        directory.run(runs[1]).create(runs[1].config)
        directory.run(runs[2]).path.mkdir()  # killed before it started
        assert states(make_plan(runs, directory)) == ([], [], [(0, False), (1, True), (2, False)])


def test_a_failed_run_is_retried_only_on_request(runs, tmp_path):
    directory = SweepDirectory(tmp_path)
    with directory.locked():
        directory.write_failure(runs[1], "no luck")
        plan = make_plan(runs, directory)
        assert states(plan) == ([], [1], [(0, False), (2, False)])
        assert plan.failed[0][1] == "no luck"
        assert len(make_plan(runs, directory, retry=True).jobs) == 3
        (directory.failed / f"{runs[2].name}.json").write_text("torn")
        assert "cannot be read" in make_plan(runs, directory).failed[1][1]


def test_a_damaged_record_raises_and_stays_unchanged(runs, tmp_path):
    directory = SweepDirectory(tmp_path)
    with directory.locked():
        directory.run(runs[0]).create(runs[0].config)
        directory.run(runs[0]).record.write_text("{")
        with pytest.raises(InputError, match="the record is damaged"):
            make_plan(runs, directory)
    assert RunDirectory(directory.run(runs[0]).path).record.read_text() == "{"


# The command without training


def test_a_dry_run_prints_the_plan_and_creates_nothing(record, tmp_path, capsys):
    out = tmp_path / "out"
    file = write_sweep(tmp_path / "s.toml", "[grid]\nsparsity = 0.9\nseed = [0, 1]\nepochs = 1")
    arguments = ["sweep", str(file), "--dry-run", "--out", str(out), "--records", str(record)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "1 finished, 0 failed, 1 to do" in printed
    assert str(record) in printed
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["state"] for row in rows] == ["finished", "new"]
    assert rows[0]["record"] == str(record / "record.json")
    assert not out.exists()


def test_a_dry_run_reports_missing_data(tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    grids = f"""
    [[grid]]
    data = "digits"
    [[grid]]
    data = "cifar10"
    data_dir = "{nowhere}"
    data_args.flip = [true, false]
    """
    arguments = ["sweep", str(write_sweep(tmp_path / "s.toml", grids)), "--dry-run"]
    assert main(arguments) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    (line,) = lines  # one line for both runs; digits are always available
    assert line.startswith(f"data: --data cifar10: {nowhere} does not exist")
    assert "--download" in line
    fetched = ["--download", "--data-dir", str(nowhere), "--set", "data=cifar10"]
    assert main([*arguments, "--json", *fetched]) == 0
    assert json.loads(capsys.readouterr().out)["missing_data"] == [
        "--data cifar10: is missing; --download fetches it first."
    ]
    assert not nowhere.exists()


def test_a_dry_run_reports_settings_that_the_data_does_not_allow(tmp_path, capsys):
    file = write_sweep(tmp_path / "s.toml", "[grid]\ndata_args.train_images = [100, 9999]")
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["missing_data"]
    assert line.startswith("data_args.train_images=9999: digits has only")


def test_a_finished_sweep_trains_nothing(record, tmp_path, capsys):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nsparsity = 0.9\nepochs = 1")
    out = tmp_path / "out"
    assert main(["sweep", str(file), "--out", str(out), "--records", str(record)]) == 0
    assert list(out.glob("runs/*")) == []


def test_a_run_that_finished_after_its_sweep_was_killed_gets_a_record(record, tmp_path):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nsparsity = 0.9\nepochs = 1")
    (run,) = load_grid(file)
    directory = SweepDirectory(tmp_path / "out")
    shutil.copytree(record, directory.run(run).path)
    assert main(["sweep", str(file), "--out", str(directory.path)]) == 0
    assert [each.identity for each in find_records([directory.records])] == [run.identity]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--jobs", "0"], "--jobs 0: the number of parallel runs must be at least 1"),
        (["--out", "{file}"], "is a file"),
        (["--records", "nowhere"], "nowhere: no such file"),
        (["--set", "epochs"], "--set epochs: expected KEY=VALUE"),
        (["--data-dir", "nowhere", "--set", "data=cifar10"], "nowhere"),
        (
            ["--set", "data=cifr10"],
            "--set data = cifr10: no such data set; did you mean 'cifar10'?",
        ),
        (["--set", "lr=2"], "--set lr=2: unknown key lr; did you mean 'optimizer.lr'?"),
    ],
)
def test_wrong_input_prints_one_line(arguments, expected, tmp_path, capsys):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nseed = [0]")
    given = [argument.replace("{file}", str(file)) for argument in arguments]
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    assert main(["sweep", str(file), *given, *out]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_file_or_a_run_as_sweep_directory_raises(tmp_path, capsys, flags):
    sweep = write_sweep(tmp_path / "sweep.toml", "")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    for out, reason in ((sweep, "is a file"), (run, "is the directory of a run")):
        assert main(["sweep", str(sweep), "--out", str(out), *flags]) == 2
        assert reason in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["config.toml"]


def test_a_run_at_the_root_directory_has_no_record_copy():
    update_copy(RunDirectory(Path("/run")), {})
