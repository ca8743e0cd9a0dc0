"""`probmask watch`: states of runs, in terminals of any size."""

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
from rich.console import Console

from probmask.cli import main
from probmask.cli.dashboard import render_run, render_runs
from probmask.training.run_directory import RunDirectory, RunReader, find_runs
from probmask.training.trainer import train
from training.small import small, snapshot

SIZES = [(60, 20), (80, 24), (119, 30), (120, 20), (200, 60)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with its dense twin; tests must not change it."""
    config = small(epochs=4, method__sparsity=0.9, dense_twin=True)
    return train(config, out=tmp_path_factory.mktemp("watch") / "run").directory


@pytest.fixture(scope="module")
def phased(tmp_path_factory):
    """A finished run of two phases."""
    config = small(epochs=5, method={"name": "pbw", "sparsity": 0.5})
    return train(config, out=tmp_path_factory.mktemp("phased") / "run").directory


@pytest.fixture
def unfinished(run, tmp_path):
    """A copy of the run, as if it had been killed in its third epoch."""
    there = shutil.copytree(run, tmp_path / "killed run")
    (there / "record.json").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (there / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:40])
    return there


HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def trained(directory):
    """Lock the directory in another process, as a training does."""
    command = [sys.executable, "-c", HOLD, str(RunDirectory(directory).lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        yield holder
        holder.kill()


def output(capsys, *arguments):
    assert main(["watch", *map(str, arguments)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    return printed.out


def error(capsys, *arguments):
    assert main(["watch", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_finished_run_shows_curves_and_results(run, capsys):
    before = snapshot(run)
    text = output(capsys, run)
    assert text.startswith(
        "probmask-tied 90 % · smallconv on digits · seed 0\nfinished · epoch 4 of 4\n"
    )
    last = RunReader().read(run).history[-1]
    assert f" loss {last['loss']:.4g} " in text
    assert f" training accuracy {last['train_accuracy']:.2f} % " in text
    assert " sparsity 90.0" in text
    assert re.search("[\u2801-\u28ff]", text)
    assert main(["train", "--resume", str(run)]) == 0
    assert text.endswith(capsys.readouterr().out)  # the tables that `probmask train` prints
    assert snapshot(run) == before


def test_once_equals_output_to_a_pipe(run, capsys):
    assert output(capsys, run, "--once") == output(capsys, run)


def test_a_stopped_run_prints_how_to_resume(unfinished, capsys):
    text = output(capsys, unfinished)
    assert "\nstopped · epoch 2 of 4\n" in text  # the third line of the log is torn
    assert text.endswith(f"\nstopped; continue with probmask train --resume '{unfinished}'\n")


def test_a_twin_is_resumed_with_its_run(unfinished, capsys):
    (unfinished / "dense" / "record.json").unlink()
    text = output(capsys, unfinished / "dense")
    assert text.endswith(f"--resume '{unfinished}'\n")


def test_a_training_run(unfinished, capsys):
    with trained(unfinished) as holder:
        assert "\ntraining · epoch 2 of 4\n" in output(capsys, unfinished)
        assert "resume" not in output(capsys, unfinished)
        holder.kill()
        holder.wait()
        assert "\nstopped · " in output(capsys, unfinished)


def test_reading_the_state_takes_no_lock(unfinished):
    directory = RunDirectory(unfinished)
    assert not directory.busy
    with directory.locked():  # raises if another process holds it
        pass
    directory.lock.unlink()
    assert not directory.busy
    assert not directory.lock.exists()


def test_curves_of_the_dense_twin_while_it_trains(unfinished, capsys):
    (unfinished / "metrics.jsonl").unlink()
    (unfinished / "dense" / "record.json").unlink()
    text = output(capsys, unfinished)
    assert "its dense twin first · epoch 4 of 4" in text
    assert " loss " in text


def test_no_curves_before_the_first_epoch(unfinished, capsys):
    (unfinished / "metrics.jsonl").write_bytes(b'{"step": 3')
    shutil.rmtree(unfinished / "dense")
    assert "the first epoch has not finished" in output(capsys, unfinished)


def test_json_has_the_curves_and_the_record(run, unfinished, capsys):
    printed = json.loads(output(capsys, run, "--json"))
    assert printed["status"] == "finished"
    assert (printed["epoch"], printed["epochs"]) == (4, 4)
    assert printed["phases"] == [{"name": "train", "epochs": 4}]
    assert printed["record"] == json.loads((run / "record.json").read_text())
    assert printed["test_accuracy"] == printed["record"]["test"]["accuracy"]
    assert [line["epoch"] for line in printed["history"]] == [1, 2, 3, 4]
    assert "histograms" not in printed["history"][0]
    assert printed["dense"]["status"] == "finished"
    stopped = json.loads(output(capsys, unfinished, "--json"))
    assert (stopped["status"], stopped["epoch"], stopped["record"]) == ("stopped", 2, None)


def rendered(renderable, width, height):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(renderable)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("which", ["run", "phased"])
def test_curves_fit_the_terminal(request, which, width, height):
    state = RunReader().read(request.getfixturevalue(which))
    lines = rendered(render_run(state, width=width, height=height, seconds_left=9), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) in range(width - 3, width + 1)
    assert sum("┤" in line for line in lines) == (2 if width >= 120 else 6)
    assert len(lines) > height - 3 or width >= 119


def test_the_borders_of_phases_are_marked(phased, capsys):
    text = output(capsys, phased)
    assert "finished · epoch 5 of 5\n" in text
    (axis, *_) = [line for line in text.splitlines() if "└" in line]
    assert re.search("─train─+┴─*", axis)
    drawn = [line for line in text.splitlines() if "┊" in line]
    assert len(drawn) >= 3
    assert {line.index("┊") for line in drawn} == {axis.index("┴")}


def test_an_unfinished_run_names_its_phase(phased, tmp_path, capsys):
    there = shutil.copytree(phased, tmp_path / "run")
    (there / "record.json").unlink()
    assert "epoch 5 of 5 · phase 2 of 2: fine-tune\n" in output(capsys, there)


def test_a_metric_that_was_never_finite_has_no_curve(unfinished, capsys):
    lines = [{"step": n, "epoch": n, "expected_sparsity": 0.5} for n in (1, 2)]
    lines[0]["loss"] = 0.25
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (unfinished / "metrics.jsonl").write_text(text)
    printed = output(capsys, unfinished)
    assert " loss 0.25" in printed
    assert " sparsity 50.00 %" in printed
    assert "accuracy" not in printed


def test_a_directory_of_runs_is_a_table(run, phased, unfinished, tmp_path, capsys):
    root = tmp_path / "sweep"
    shutil.copytree(run, root / "probmask" / "seed0")
    shutil.copytree(phased, root / "pbw")
    shutil.move(unfinished, root / "killed")
    (root / "broken").mkdir()
    (root / "broken" / "config.toml").write_text("epochs = 0\n")
    text = output(capsys, root)
    assert text.startswith(f"{root}: 4 runs, 1 stopped, 1 unreadable, 2 finished\n")
    rows = [line.split() for line in text.splitlines() if "finished  " in line or "/4 " in line]
    assert [row[0] for row in rows] == ["killed", "pbw", "probmask/seed0"]
    assert rows[0][1:4] == ["stopped", "█████░░░░░", "2/4"]
    assert "config.toml: epochs = 0: must be" in text
    printed = json.loads(output(capsys, root, "--json"))
    assert [row["status"] for row in printed] == ["unreadable", "stopped", "finished", "finished"]
    assert "history" not in printed[1]


def expected_cells(state, width):
    """Yield the cells of a finished run after its name."""
    last, test = state.history[-1], state.record["test"]["accuracy"]
    yield "finished"
    if width >= 100:
        yield "██████████"
    yield from ("4/4", f"{last['loss']:.4g}")
    if width >= 90:
        yield from (f"{last['train_accuracy']:.2f}", "%")
    if width >= 80:
        yield from (f"{100 * last['expected_sparsity']:.2f}", "%")
    yield from (f"{test:.2f}", "%")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_table_fits_the_terminal(run, width, height):
    state = RunReader().read(run)
    root = run.parent
    runs = {root / f"a-rather-long-name-{'x' * 200}-{n}": state for n in range(100)}
    runs[root / "z"] = "no"
    lines = rendered(render_runs(root, runs, width=width, height=height), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "unreadable" in " ".join(lines[:6])  # runs that need attention come first
    assert any("more" in line for line in lines)
    row = next(line for line in lines if "…" in line and "x-" in line)
    assert row.split()[1:] == [*expected_cells(state, width)]
    assert re.fullmatch(r"…[-a-z]*x-\d+", row.split()[0])


def test_unchanged_runs_are_read_only_once(run, unfinished):
    reader = RunReader()
    first = reader.read(unfinished)
    assert reader.read(unfinished) is first
    (unfinished / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    assert reader.read(unfinished).epoch == 4


def test_find_runs_recursively_without_twins(run, tmp_path):
    shutil.copytree(run, tmp_path / "a" / "b" / "c")
    assert find_runs(tmp_path) == [tmp_path / "a" / "b" / "c"]
    assert find_runs(tmp_path / "a" / "b" / "c") == [tmp_path / "a" / "b" / "c"]


def test_other_directories_raise(tmp_path, run, unfinished, capsys):
    assert "no such directory" in error(capsys, tmp_path / "nowhere")
    assert "no such directory" in error(capsys, run / "record.json")
    (tmp_path / "empty").mkdir()
    assert "contains no run (no config.toml)" in error(capsys, tmp_path / "empty")
    (unfinished / "record.json").write_text("{}")
    assert "the record is damaged (bytes is missing)" in error(capsys, unfinished)
    (unfinished / "config.toml").write_text("epochs = ")
    assert "not valid TOML" in error(capsys, unfinished)


def test_damaged_lines_of_the_log_are_skipped(unfinished, capsys):
    log = unfinished / "metrics.jsonl"
    first, second, half = log.read_bytes().split(b"\n")
    bad = [b"rubbish", b"\0" * 99, b"{}", b'{"epoch": 1e9}', b'{"epoch": true}', b"[" * 99_999]
    bad += [b'{"epoch": 1, "loss": 1%b}' % (b"0" * size) for size in (400, 5000)]
    log.write_bytes(
        b"\n".join([first, *bad, second.replace(b'"loss": ', b'"loss": 1e-323, "x": '), half])
    )
    assert main(["watch", str(unfinished), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "epoch 2 of 4 · skipped 8 damaged lines of metrics.jsonl" in printed
    assert main(["watch", str(unfinished), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [line["epoch"] for line in found["history"]] == [1, 2]
    assert found["damaged_lines"] == 8


def in_terminal(directory):
    """Start the command in a pseudo-terminal; return the process and the screen."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "probmask.cli", "watch", str(directory)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    return process, ours


def read_until(screen, text):
    seen = b""
    while text.encode() not in seen:  # a character can arrive in two parts
        seen += os.read(screen, 65536)


def read_rest(screen):
    seen = b""
    with suppress(OSError):  # the terminal closes with its process
        while more := os.read(screen, 65536):
            seen += more
    return seen.decode(errors="replace")  # the first character can be incomplete


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_live_until_interrupted(unfinished):
    with RunDirectory(unfinished).locked():
        process, screen = in_terminal(unfinished)
        read_until(screen, "training · epoch 2 of 4")
        process.send_signal(signal.SIGINT)
        left = read_rest(screen)
        assert process.wait(30) == 0
    assert "Traceback" not in left
    assert "training · epoch 2 of 4" in left.rpartition("\x1b[?1049l")[2]
    os.close(screen)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_live_until_finished(run, unfinished):
    with RunDirectory(unfinished).locked():
        process, screen = in_terminal(unfinished)
        read_until(screen, "training · epoch 2 of 4")
        (unfinished / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
        read_until(screen, "epoch 4 of 4")
        shutil.copy(run / "record.json", unfinished)
        left = read_rest(screen)
        assert process.wait(30) == 0
    after = left.rpartition("\x1b[?1049l")[2]
    assert "finished · epoch 4 of 4" in after
    assert "test accuracy" in after
    os.close(screen)
