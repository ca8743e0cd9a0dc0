"""Progress of a run: lines without a terminal, a bar in one."""

import re

import pytest

from probmask.cli import main
from probmask.training import progress
from probmask.training.progress import Bar, Lines, Status
from training.small import flags


def status(step, *, per_epoch=4, epochs=20):
    return Status(
        step=step,
        epoch=-(-step // per_epoch),
        epochs=epochs,
        loss=0.5,
        accuracy=87.25,
        sparsity=0.98,
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def printed_lines(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_line_after_each_tenth_with_the_time_left(clock, capsys):
    with Lines("probmask", 80) as lines:
        for step in range(1, 81):
            clock[0] += 0.5
            lines.show(status(step))
    printed = printed_lines(capsys)
    assert len(printed) == 10
    assert printed[0] == "probmask: epoch 2/20 loss 0.500 acc 87.2% sparsity 98.0%, 0:00:36 left"
    assert printed[-1] == "probmask: epoch 20/20 loss 0.500 acc 87.2% sparsity 98.0%"


def test_few_epochs_have_a_line_each(clock, capsys):
    lines = Lines("dense", 12)
    for step in range(1, 13):
        lines.show(status(step, epochs=3))
    assert [re.match(r"dense: epoch (\d)/3", line)[1] for line in printed_lines(capsys)] == [
        "1",
        "2",
        "3",
    ]


def test_long_epochs_print_a_line_every_thirty_seconds(clock, capsys):
    lines = Lines("probmask", 80_000)
    for step in range(1, 121):
        clock[0] += 1
        lines.show(status(step, per_epoch=4000))
    assert len(printed_lines(capsys)) == 4


def test_days_of_training_do_not_fill_a_log(clock, capsys):
    lines = Lines("probmask", 10**9)
    for step in range(1, 3 * 86_400 // 5):
        clock[0] += 5
        lines.show(status(step, per_epoch=10**6, epochs=1000))
    assert 50 < len(printed_lines(capsys)) < 200


def test_the_time_left_of_a_resumed_run_counts_from_its_first_step(clock, capsys):
    lines = Lines("probmask", 80)
    for step in range(41, 49):
        clock[0] += 1
        lines.show(status(step))
    assert printed_lines(capsys) == [
        "probmask: epoch 12/20 loss 0.500 acc 87.2% sparsity 98.0%, 0:00:32 left"
    ]


def test_the_bar_fills_the_remaining_width(monkeypatch, capsys):
    lengths = {}
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        with Bar("probmask", 80) as bar:
            bar.show(status(80))
        (line,) = {text for text in printed_lines(capsys) if "epoch 20/20" in text}
        lengths[width] = line.count("━")
        assert len(line) <= width
        assert "epoch 20/20 loss 0.500 acc 87.2% sparsity 98.0%" in line
    assert lengths[120] == lengths[80] + 40


@pytest.mark.parametrize("flag", ["--quiet", "--json"])
def test_quiet_and_json_show_no_progress(tmp_path, capsys, flag):
    out = str(tmp_path / "run")
    assert main(["train", flag, "--out", out, *flags(epochs=1, method__sparsity=0.5)]) == 0
    assert capsys.readouterr().err == ""


def test_without_a_terminal_the_command_prints_lines(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main(["train", "--out", out, *flags(epochs=2, method__sparsity=0.5)]) == 0
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(" loss")[0] for line in printed] == [
        "probmask-tied: epoch 1/2",
        "probmask-tied: epoch 2/2",
    ]
