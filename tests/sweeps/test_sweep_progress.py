"""Progress of a sweep: lines, the live table, durations."""

import io

from rich.console import Console

from analysis.synthetic_records import record
from probmask.analysis.records import Run
from probmask.sweeps.sweep_progress import (
    SweepProgress,
    format_duration,
    live_table,
    progress_table,
)

STATUS = {
    "total_steps": 100,
    "step": 10,
    "epoch": 2,
    "epochs": 10,
    "loss": 1.23456,
    "accuracy": 45.678,
    "sparsity": 0.9,
}


def progress(total, *, done=0, lines=None):
    print_line = [].append if lines is None else lines.append
    return SweepProgress(total, done=done, failed=0, print_line=print_line)


def test_every_event_prints_a_line():
    lines = []
    sweep = progress(4, done=1, lines=lines)
    sweep.start("a", resumed=False)
    sweep.start("b", resumed=True)
    sweep.update("a", STATUS)
    assert sweep.summary().startswith("1 of 4 done, 2 running, 1 waiting")
    sweep.finish("a", Run("a", record(accuracy=91.234)))
    sweep.fail("b", "no luck")
    assert sweep.summary().startswith("2 of 4 done, 0 running, 1 waiting, 1 failed; about")
    assert lines[:2] == ["a: started", "b: resumed"]
    assert lines[2].startswith("[2/4] a: 91.23 % in ")
    assert lines[3] == "b: failed: no luck"


def test_the_validation_accuracy_is_shown_if_images_are_held_out():
    lines = []
    sweep = progress(1, lines=lines)
    sweep.start("a", resumed=False)
    selection = {"on": "val", "correct": 8712, "total": 10000, "accuracy": 87.12}
    sweep.finish("a", Run("a", {**record(accuracy=91.234), "selection": selection}))
    assert lines[1].startswith("[1/1] a: 87.12 % (validation) in ")


def test_the_table_has_a_row_for_every_running_run():
    sweep = progress(3)
    sweep.start("[red]a", resumed=False)
    sweep.update("[red]a", STATUS)
    sweep.update("[red]a", {**STATUS, "step": 55})
    sweep.start("b", resumed=False)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(progress_table(sweep))
    text = console.export_text()
    assert "[red]a" in text
    assert all(cell in text for cell in ("2/10", "1.235", "45.7 %", "90.0 %", "0 s"))
    assert "0 of 3 done, 2 running, 1 waiting" in text


def test_lines_are_printed_above_the_live_table(capsys):
    lines = []
    sweep = progress(1, lines=lines)
    with live_table(sweep):
        sweep.start("[red]a", resumed=False)
    assert "[red]a: started" in capsys.readouterr().err
    sweep.fail("[red]a", "no luck")
    assert lines == ["[red]a: failed: no luck"]


def test_durations_are_rounded_to_one_unit():
    shown = [format_duration(seconds) for seconds in (5, 99, 600, 7200, 86400 * 3)]
    assert shown == ["5 s", "99 s", "10 min", "2.0 h", "3 days"]
