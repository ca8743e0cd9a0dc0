"""TensorBoard shows the numbers of the log, also after a run was killed and resumed."""

import errno
import os
import threading
from pathlib import Path

import pytest

from probmask.cli import main
from probmask.errors import TensorBoardWarning
from probmask.training.metrics import MetricsLog, read_log
from training.small import flags, kill_when, lines, start_command

SETTINGS = {
    "epochs": 6,
    "batch_size": 128,
    "method__sparsity": 0.9,
    "tensorboard": True,
    "checkpoint_seconds": 0,
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that was killed after some epochs, then resumed and finished."""
    out = tmp_path_factory.mktemp("board") / "run"
    kill_when(
        start_command("train", "--out", str(out), *flags(**SETTINGS)),
        lambda: lines(out / "metrics.jsonl") >= 2,
        delay=0.05,
    )
    assert main(["train", "--resume", str(out), "--quiet"]) == 0
    return out


def board_of(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory / "tensorboard"), size_guidance={"histograms": 0})
    board.Reload()
    return board


def test_tensorboard_has_every_number_of_the_log_once(resumed):
    assert len(list((resumed / "tensorboard").iterdir())) == 2  # a file for each process
    (log, _), board = read_log(resumed / "metrics.jsonl"), board_of(resumed)
    assert [line["epoch"] for line in log] == [1, 2, 3, 4, 5, 6]
    names = log[0].keys() - {"step", "histograms"}
    assert {"loss", "train_accuracy", "expected_sparsity", "temperature"} <= names
    assert set(board.Tags()["scalars"]) == names
    for name in names:
        shown = board.Scalars(name)
        expected = [(line["step"], line[name]) for line in log if name in line]
        assert [event.step for event in shown] == [step for step, _ in expected], name
        assert [event.value for event in shown] == pytest.approx([v for _, v in expected], rel=1e-6)


def test_tensorboard_has_every_histogram_of_the_log(resumed):
    (log, _), board = read_log(resumed / "metrics.jsonl"), board_of(resumed)
    assert board.Tags()["histograms"] == ["prob"]
    expected = [line for line in log if "histograms" in line]
    assert len(expected) >= 3  # until the mask is frozen
    shown = board.Histograms("prob")
    assert [event.step for event in shown] == [line["step"] for line in expected]
    for event, line in zip(shown, expected, strict=True):
        histogram = line["histograms"]["prob"]
        assert event.histogram_value.num == sum(histogram["counts"])
        counts = [count for count in event.histogram_value.bucket if count]
        assert counts == [count for count in histogram["counts"] if count]
        assert (event.histogram_value.min, event.histogram_value.max) == (
            histogram["low"],
            histogram["high"],
        )


def test_event_files_of_the_same_second_are_read_in_order(tmp_path):
    board = tmp_path / "tensorboard"
    for step in (5, 10, 15):
        with MetricsLog(tmp_path / "metrics.jsonl", board, step=step) as log:
            log.write(step, {"loss": 2.0})
    seconds = [int(path.name.split(".")[3]) for path in board.iterdir()]
    assert len(set(seconds)) == 3
    assert [event.step for event in board_of(tmp_path).Scalars("loss")] == [5, 10, 15]


def test_an_epoch_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    """Events in memory would be lost when the process is killed."""
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
    log.write(5, {"epoch": 1, "loss": 2.0})
    assert [event.step for event in board_of(tmp_path).Scalars("loss")] == [5]
    log.close()


class FullFile:
    """A file on a disk that has room for one write."""

    writes = 0

    def write(self, content):
        self.writes += 1
        if self.writes > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self):
        pass

    def close(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("place", ["mkdir", "open", "write"])
def test_a_full_disk_costs_a_warning_but_no_training(tmp_path, monkeypatch, capfd, place):
    """No thread writes the events, so no thread can print a traceback."""
    plain = Path.open

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_event_file(path, *arguments, **options):
        if "tfevents" not in path.name:
            return plain(path, *arguments, **options)
        return FullFile() if place == "write" else fail()

    monkeypatch.setattr(Path, "open", open_event_file)
    if place == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fail)
    threads = threading.active_count()

    def write_three_epochs():
        log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard")
        for epoch in (1, 2, 3):
            log.write(5 * epoch, {"epoch": epoch, "loss": 2.0})
            assert threading.active_count() == threads
        log.close()

    with pytest.warns(TensorBoardWarning) as warned:
        write_three_epochs()
    assert len(warned) == 1
    expected = f"{tmp_path / 'tensorboard'}: cannot be written (No space left on device); the "
    assert str(warned[0].message).startswith(expected)
    assert [line["epoch"] for line in read_log(tmp_path / "metrics.jsonl")[0]] == [1, 2, 3]
    assert capfd.readouterr() == ("", "")


def test_a_value_that_is_not_finite_is_left_out_of_the_log(tmp_path):
    """The record, which is JSON, could not store it."""
    with MetricsLog(tmp_path / "metrics.jsonl", None) as log:
        log.write(5, {"epoch": 1, "loss": 2.0, "gap": float("inf"), "mean": float("nan")})
    assert read_log(tmp_path / "metrics.jsonl") == ([{"step": 5, "epoch": 1, "loss": 2.0}], 0)
