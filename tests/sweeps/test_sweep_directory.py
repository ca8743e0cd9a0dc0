"""Plans: what is finished, failed, begun or new, told by records and directories."""

import io
import json
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from analysis import made_up
from probmask.analysis.records import Run, find_records, write_compact
from probmask.cli import main
from probmask.errors import InputError
from probmask.sweeps.grid import expand, load_grid
from probmask.sweeps.local_processes import environment, with_threads
from probmask.sweeps.ray_cluster import wanted_resources
from probmask.sweeps.sweep_directory import SweepDirectory, make_plan, update_copy
from probmask.sweeps.sweep_progress import Board, LiveBoard, duration
from probmask.training.run import train
from probmask.training.run_directory import RunDirectory
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
    """The record of the grid's first run, trained on its own, in a directory of another name."""
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


def test_everything_is_new_at_first(runs, tmp_path):
    plan = make_plan(runs, SweepDirectory(tmp_path / "out"))
    assert states(plan) == ([], [], [(0, False), (1, False), (2, False)])
    assert not (tmp_path / "out").exists()


def test_a_record_from_elsewhere_finishes_its_run(runs, record, tmp_path):
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
        directory.put_record(runs[0])
        shutil.rmtree(directory.runs)
        assert states(make_plan(runs, directory)) == ([0], [], [(1, False), (2, False)])


def test_a_directory_that_was_begun_goes_on(runs, tmp_path):
    directory = SweepDirectory(tmp_path)
    with directory.locked():
        directory.run(runs[1]).create(runs[1].config)
        directory.run(runs[2]).path.mkdir()  # killed before it had begun
        assert states(make_plan(runs, directory)) == ([], [], [(0, False), (1, True), (2, False)])


def test_what_failed_is_tried_again_only_on_request(runs, tmp_path):
    directory = SweepDirectory(tmp_path)
    with directory.locked():
        directory.put_failure(runs[1], "no luck")
        plan = make_plan(runs, directory)
        assert states(plan) == ([], [1], [(0, False), (2, False)])
        assert plan.failed[0][1] == "no luck"
        assert len(make_plan(runs, directory, retry=True).jobs) == 3
        (directory.failed / f"{runs[2].name}.json").write_text("torn")
        assert "cannot be read" in make_plan(runs, directory).failed[1][1]


def test_a_damaged_record_is_refused_and_nothing_is_lost(runs, tmp_path):
    directory = SweepDirectory(tmp_path)
    with directory.locked():
        directory.run(runs[0]).create(runs[0].config)
        directory.run(runs[0]).record.write_text("{")
        with pytest.raises(InputError, match="is a damaged record"):
            make_plan(runs, directory)
    assert RunDirectory(directory.run(runs[0]).path).record.read_text() == "{"


# The command without training


def test_a_dry_run_shows_the_plan_and_makes_nothing(record, tmp_path, capsys):
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


def test_a_dry_run_tells_of_data_that_is_not_there(tmp_path, capsys):
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
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data: ")]
    (line,) = told  # once, for both runs on it; the digits are always there
    assert line.startswith(f"data: --data cifar10: {nowhere} does not exist")
    assert "--download" in line
    fetched = ["--download", "--data-dir", str(nowhere), "--set", "data=cifar10"]
    assert main([*arguments, "--json", *fetched]) == 0
    assert json.loads(capsys.readouterr().out)["missing_data"] == [
        "--data cifar10: is not there; --download fetches it first."
    ]
    assert not nowhere.exists()


def test_a_dry_run_tells_of_settings_that_the_data_does_not_allow(tmp_path, capsys):
    file = write_sweep(tmp_path / "s.toml", "[grid]\ndata_args.train_images = [100, 9999]")
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["missing_data"]
    assert line.startswith("data_args.train_images=9999: digits has only")


def test_a_sweep_that_is_all_finished_trains_nothing(record, tmp_path, capsys):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nsparsity = 0.9\nepochs = 1")
    out = tmp_path / "out"
    assert main(["sweep", str(file), "--out", str(out), "--records", str(record)]) == 0
    assert list(out.glob("runs/*")) == []


def test_a_run_that_ended_after_its_sweep_was_killed_gets_its_record_to_commit(record, tmp_path):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nsparsity = 0.9\nepochs = 1")
    (run,) = load_grid(file)
    directory = SweepDirectory(tmp_path / "out")
    shutil.copytree(record, directory.run(run).path)
    assert main(["sweep", str(file), "--out", str(directory.path)]) == 0
    assert [each.identity for each in find_records([directory.records])] == [run.identity]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--jobs", "0"], "--jobs 0: runs at a time, at least 1"),
        (["--out", "{file}"], "is a file"),
        (["--records", "nowhere"], "nowhere: there is no such file"),
        (["--set", "epochs"], "--set epochs: expected KEY=VALUE"),
        (["--data-dir", "nowhere", "--set", "data=cifar10"], "nowhere"),
        (
            ["--set", "data=cifr10"],
            "--set data = cifr10: no such data set; did you mean 'cifar10'?",
        ),
        (["--set", "lr=2"], "the command line: unknown key lr; did you mean 'optimizer.lr'?"),
    ],
)
def test_wrong_input_gets_one_line(arguments, said, tmp_path, capsys):
    file = write_sweep(tmp_path / "s.toml", "[grid]\nseed = [0]")
    given = [argument.replace("{file}", str(file)) for argument in arguments]
    out = [] if "--out" in given else ["--out", str(tmp_path / "out")]
    assert main(["sweep", str(file), *given, *out]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_without_ray_the_command_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    file = write_sweep(tmp_path / "s.toml", "[grid]\nseed = [0]")
    assert main(["sweep", str(file), "--ray", "local", "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'probmask[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# Shares of the machine


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_ray_address_where_nobody_listens_is_refused_at_once(scheme, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    file = write_sweep(tmp_path / "s.toml", "[grid]\nseed = [0]")
    began = time.monotonic()
    assert main(["sweep", str(file), "--ray", address, "--out", str(tmp_path / "out")]) == 2
    assert time.monotonic() - began < 30  # Ray itself waits for minutes
    printed = capsys.readouterr().err
    assert f"--ray {address}: cannot be reached: " in printed
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_threads_are_shared_unless_the_configuration_says_how_many(runs):
    assert with_threads(small(data="cifar10", threads="none"), 3).threads == 3
    assert with_threads(small(threads=1), 3).threads == 1


def test_every_run_has_its_threads_and_its_gpu(runs):
    config = small(threads=2)
    alone = environment({"HOME": "/h", "OMP_NUM_THREADS": "9"}, 3, config, gpus=[])
    assert alone["HOME"] == "/h"
    assert {alone[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {"2"}
    assert "CUDA_VISIBLE_DEVICES" not in alone
    visible = [
        environment({"CUDA_VISIBLE_DEVICES": "4,6"}, slot, config)["CUDA_VISIBLE_DEVICES"]
        for slot in range(3)
    ]
    assert visible == ["4", "6", "4"]
    several = environment({"CUDA_VISIBLE_DEVICES": "4,6"}, 0, small(devices=2, threads=1))
    assert several["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_ray_sets_gpus_aside_where_a_run_can_have_them():
    cpu, auto = small(threads=2), small(threads=2, accelerator="auto")
    assert wanted_resources(cpu, {"GPU": 4}) == {"num_cpus": 2}
    assert wanted_resources(auto, {"CPU": 8}) == {"num_cpus": 2}
    assert wanted_resources(auto, {"GPU": 4}) == {"num_cpus": 2, "num_gpus": 1}


# What is shown


STATUS = {
    "total_steps": 100,
    "step": 10,
    "epoch": 2,
    "epochs": 10,
    "loss": 1.23456,
    "accuracy": 45.678,
    "sparsity": 0.9,
}


def test_a_line_for_every_event():
    lines = []
    board = Board(4, done=1, failed=0, say=lines.append)
    with board:
        board.start("a", resumed=False)
        board.start("b", resumed=True)
        board.show("a", STATUS)
        assert board.summary().startswith("1 of 4 done, 2 running, 1 to come")
        board.finish("a", Run("a", made_up.record(accuracy=91.234)))
        board.fail("b", "no luck")
        assert board.summary().startswith("2 of 4 done, 0 running, 1 to come, 1 failed; about")
    assert lines[:2] == ["a: begins", "b: goes on"]
    assert lines[2].startswith("[2/4] a: 91.23 % in ")
    assert lines[3] == "b: failed: no luck"


def test_where_images_are_held_out_their_accuracy_is_shown_not_that_of_the_test():
    lines = []
    board = Board(1, done=0, failed=0, say=lines.append)
    board.start("a", resumed=False)
    selection = {"on": "val", "correct": 8712, "total": 10000, "accuracy": 87.12}
    board.finish("a", Run("a", {**made_up.record(accuracy=91.234), "selection": selection}))
    assert lines[1].startswith("[1/1] a: 87.12 % (validation) in ")


def test_the_live_table_has_a_row_for_every_running_run():
    from rich.console import Console

    board = LiveBoard(3, done=0, failed=0, say=print)
    board.running.clear()
    Board.start(board, "[red]a", resumed=False)
    board.show("[red]a", STATUS)
    board.show("[red]a", {**STATUS, "step": 55})
    Board.start(board, "b", resumed=False)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(board.table())
    text = console.export_text()
    assert "[red]a" in text
    assert all(cell in text for cell in ("2/10", "1.235", "45.7 %", "90.0 %", "0 s"))
    assert "0 of 3 done, 2 running, 1 to come" in text


def test_durations_as_people_say_them():
    said = [duration(seconds) for seconds in (5, 99, 600, 7200, 86400 * 3)]
    assert said == ["5 s", "99 s", "10 min", "2.0 h", "3 days"]


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_sweep_goes_into_no_file_and_into_no_run(tmp_path, capsys, flags):
    sweep = write_sweep(tmp_path / "sweep.toml", "")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    for out, reason in ((sweep, "is a file"), (run, "is the directory of a run")):
        assert main(["sweep", str(sweep), "--out", str(out), *flags]) == 2
        assert reason in capsys.readouterr().err
    assert [path.name for path in run.iterdir()] == ["config.toml"]


def test_a_run_that_lies_at_the_root_has_no_copy_of_its_record():
    update_copy(RunDirectory(Path("/run")), {})
