"""`probmask compare`: print tables of runs, with mean and standard deviation over seeds."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from probmask.cli.arguments import add_runs, finished_runs
from probmask.cli.terminal import print_csv, print_json, print_rows, print_text

if TYPE_CHECKING:
    from probmask.analysis.comparison import Cell, Setting

_FORMATS = ("text", "markdown", "csv", "json")
_SPEED_HEADINGS = ("method", "sparsity", "weights", "MACs", "bytes", "ms", "images", "threads")
_MEASURES = {
    "test": "test accuracy at the last epoch, %",
    "val": "validation accuracy at the last epoch, %",
}


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    compare = commands.add_parser(
        "compare",
        help="print tables of runs: mean ± standard deviation over seeds",
        description="Compare runs by their test or validation accuracy after the last epoch. Runs "
        "with the same network, data, epochs and optimizer share a table. The best method at each "
        "sparsity is marked; runs that missed their target sparsity are not ranked.",
    )
    add_runs(compare)
    compare.add_argument(
        "--on",
        choices=("test", "val"),
        default="test",
        help="part on which the accuracy was measured; val: the training examples held out by "
        'select_on = "val", to choose between runs without using the test images (default: '
        "%(default)s)",
    )
    compare.add_argument(
        "--columns",
        choices=("sparsity", "updates"),
        default="sparsity",
        help="updates: put trainings of different lengths into one table per sparsity (default: "
        "%(default)s)",
    )
    compare.add_argument(
        "--updates", type=int, metavar="N", help="only runs with this number of updates"
    )
    compare.add_argument(
        "--methods",
        nargs="+",
        default=(),
        metavar="LABEL",
        help="only these rows, as in --methods gmp 'probmask recipe=*'; * matches any text",
    )
    compare.add_argument(
        "--format",
        choices=_FORMATS,
        default="text",
        help="default: %(default)s; --json selects json",
    )
    compare.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Print one table per group of comparable runs."""
    from probmask.analysis.comparison import compare
    from probmask.analysis.records import filter_runs

    runs = filter_runs(finished_runs(options), updates=options.updates, methods=options.methods)
    settings = compare(runs, options.on, columns=options.columns)
    print_comparison(settings, "json" if options.json else options.format)


def print_comparison(settings: "Sequence[Setting]", form: str) -> None:
    """Print comparisons as text, markdown, csv or json; the output depends on the records only."""
    if form == "json":
        tables = [
            {
                "title": setting.title,
                "details": list(setting.details),
                "cells": [_line(setting, index) for index in range(len(setting.cells))],
            }
            for setting in settings
        ]
        print_json({"settings": tables})
    elif form == "csv":
        print_csv(_csv_rows(settings))
    else:
        for index, setting in enumerate(settings):
            if index:
                print_text()
            _print_table(setting, markdown=form == "markdown")


def _csv_rows(settings: "Sequence[Setting]") -> Iterator[list[Any]]:
    for index, setting in enumerate(settings):
        lines = [_line(setting, position) for position in range(len(setting.cells))]
        if index == 0:
            yield ["network and data", "training", *lines[0]]
        about = [setting.title, "; ".join(setting.details)]
        for line in lines:
            yield [*about, *("" if value is None else value for value in line.values())]


def _line(setting: "Setting", index: int) -> dict[str, Any]:
    """Return a cell for csv and json, without rounding."""
    cell = setting.cells[index]
    return {
        "method": cell.label,
        "sparsity": cell.sparsity,
        "updates": cell.updates,
        "of": "MACs" if cell.cost == "flops" else "weights",
        "reached": cell.reached,
        "verified": cell.verified,
        "seeds": len(cell.runs),
        "accuracy_on": cell.on,
        "accuracy": cell.mean,
        "deviation": cell.deviation,
        "best": index in setting.best,
        "paper": cell.paper,
        "kept": cell.mean_of("kept"),
        "macs": cell.mean_of("macs", "sparse"),
        "bytes": cell.mean_of("bytes"),
        "seconds": cell.mean_of("seconds"),
        "milliseconds": cell.milliseconds,
        "batch": None if cell.milliseconds is None or cell.timed is None else cell.timed[0],
    }


def _print_table(setting: "Setting", *, markdown: bool) -> None:
    title = ", ".join((setting.title, *setting.details))
    print_text(f"**{_escaped(title)}**" if markdown else title)
    if markdown:
        print_text()
    labels = setting.ranking
    levels = sorted({cell.level for cell in setting.cells})
    indices = {(cell.label, cell.level): index for index, cell in enumerate(setting.cells)}
    columns: dict[str, list[str]] = {"method": labels}
    for level in levels:
        found = [indices.get((label, level)) for label in labels]
        cells = [None if index is None else setting.cells[index] for index in found]
        columns[_heading(setting, level)] = [_entry(setting, index) for index in found]
        if any(cell is not None and cell.paper is not None for cell in cells):
            columns[f"paper, {_heading(setting, level)}"] = [_paper_entry(cell) for cell in cells]
    print_rows(list(columns), list(zip(*columns.values(), strict=True)), markdown=markdown)
    if markdown:
        print_text()
    for note in _notes(setting):
        print_text(note)
    if any(cell.milliseconds is not None for cell in setting.cells):
        print_text()
        _print_latencies(setting, markdown=markdown)


def _print_latencies(setting: "Setting", *, markdown: bool) -> None:
    """Print size and speed of the cells that `probmask bench` has timed."""
    rows = [
        (
            cell.label,
            _heading(setting, cell.level),
            _figure(cell.mean_of("kept")),
            _figure(cell.mean_of("macs", "sparse")),
            _figure(cell.mean_of("bytes")),
            f"{cell.milliseconds:.2f}",
            f"{cell.timed[0]:g}",
            f"{cell.timed[1]:g}",
        )
        for cell in setting.cells
        if cell.milliseconds is not None and cell.timed is not None
    ]
    print_rows(_SPEED_HEADINGS, rows, markdown=markdown)
    if markdown:
        print_text()
    print_text("ms: one forward pass of a batch, timed by `probmask bench`; mean over seeds")


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _heading(setting: "Setting", level: tuple[float, str]) -> str:
    value, cost = level
    unit = " of MACs" if cost == "flops" else ""
    if setting.columns == "updates":
        return f"{value:,.0f}" + (f" ({unit.strip()})" if unit else "")
    return "dense" if value == 0 else f"{100 * value:.4g} %{unit}"


def _entry(setting: "Setting", index: int | None) -> str:
    from probmask.analysis.comparison import rounded

    if index is None:
        return "–"
    cell = setting.cells[index]
    entry = rounded(cell.mean)
    if cell.deviation is not None:
        entry += f" ± {rounded(cell.deviation)}"
    if len(_seed_counts(setting)) > 1:
        entry += f" ({len(cell.runs)})"
    if not cell.verified:
        entry += f" † {100 * cell.reached:.2f} %"
    return entry + " ★" * (index in setting.best)


def _paper_entry(cell: "Cell | None") -> str:
    from probmask.analysis.comparison import rounded

    return "–" if cell is None or cell.paper is None else rounded(cell.paper)


def _notes(setting: "Setting") -> list[str]:
    counts = _seed_counts(setting)
    if counts == {1}:
        seeds = "one seed each"
    elif len(counts) == 1:
        seeds = f"mean ± standard deviation over {counts.pop()} seeds"
    else:
        seeds = "mean ± standard deviation (number of seeds)"
    place = "at its number of updates" if setting.columns == "updates" else "at its sparsity"
    best = f"; ★ best {place}" if setting.best else ""
    notes = [f"{_MEASURES[setting.on]}: {seeds}{best}"]
    if any(not cell.verified for cell in setting.cells):
        notes.append("† missed its target sparsity; not ranked")
    return notes


def _seed_counts(setting: "Setting") -> set[int]:
    return {len(cell.runs) for cell in setting.cells}


def _escaped(text: str) -> str:
    """Escape the characters that have a meaning in Markdown."""
    return "".join(f"\\{each}" if each in "\\*_`[]<>|#" else each for each in text)
