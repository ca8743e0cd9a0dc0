"""Comparisons as text: for people in rows of methods, for programs one line a cell."""

import csv
import json
import sys
from collections.abc import Sequence
from typing import Any

from probmask.analysis.comparison import Cell, Setting, rounded
from probmask.analysis.tables import print_rows

_SPEED_HEADINGS = ("method", "sparsity", "weights", "MACs", "bytes", "ms", "images", "threads")
_MEASURES = {
    "test": "test accuracy at the last epoch, %",
    "val": "validation accuracy at the last epoch, %",
}


def print_comparison(settings: Sequence[Setting], form: str) -> None:
    """Print comparisons as text, markdown, csv or json; the same bytes for the same records."""
    if form == "json":
        tables = [
            {
                "title": setting.title,
                "details": list(setting.details),
                "cells": [_line(setting, place) for place in range(len(setting.cells))],
            }
            for setting in settings
        ]
        print(json.dumps({"settings": tables}, indent=2, ensure_ascii=False))
    elif form == "csv":
        _print_csv(settings)
    else:
        for place, setting in enumerate(settings):
            if place:
                print()
            _print_table(setting, markdown=form == "markdown")


def _print_csv(settings: Sequence[Setting]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for place, setting in enumerate(settings):
        lines = [_line(setting, position) for position in range(len(setting.cells))]
        if place == 0:
            writer.writerow(["network and data", "training", *lines[0]])
        about = [setting.title, "; ".join(setting.details)]
        for line in lines:
            writer.writerow([*about, *("" if value is None else value for value in line.values())])


def _line(setting: Setting, place: int) -> dict[str, Any]:
    """A cell for programs: nothing is rounded."""
    cell = setting.cells[place]
    return {
        "method": cell.label,
        "sparsity": cell.sparsity,
        "of": "MACs" if cell.cost == "flops" else "weights",
        "reached": cell.reached,
        "verified": cell.verified,
        "seeds": len(cell.runs),
        "accuracy_on": cell.on,
        "accuracy": cell.mean,
        "deviation": cell.deviation,
        "best": place in setting.best,
        "paper": cell.paper,
        "kept": cell.mean_of("kept"),
        "macs": cell.mean_of("macs", "sparse"),
        "bytes": cell.mean_of("bytes"),
        "seconds": cell.mean_of("seconds"),
        "milliseconds": cell.milliseconds,
        "batch": None if cell.milliseconds is None or cell.timed is None else cell.timed[0],
    }


def _print_table(setting: Setting, *, markdown: bool) -> None:
    title = ", ".join((setting.title, *setting.details))
    print(f"**{_plain(title)}**\n" if markdown else title)
    labels = setting.ranking
    levels = sorted({cell.level for cell in setting.cells})
    places = {(cell.label, cell.level): place for place, cell in enumerate(setting.cells)}
    columns: dict[str, list[str]] = {"method": labels}
    for level in levels:
        found = [places.get((label, level)) for label in labels]
        cells = [None if place is None else setting.cells[place] for place in found]
        columns[_heading(level)] = [_entry(setting, place) for place in found]
        if any(cell is not None and cell.paper is not None for cell in cells):
            columns[f"paper, {_heading(level)}"] = [_paper(cell) for cell in cells]
    print_rows(list(columns), list(zip(*columns.values(), strict=True)), markdown=markdown)
    if markdown:
        print()
    for note in _notes(setting):
        print(note)
    if any(cell.milliseconds is not None for cell in setting.cells):
        print()
        _print_speeds(setting, markdown=markdown)


def _print_speeds(setting: Setting, *, markdown: bool) -> None:
    """Size and speed, of the cells that were timed."""
    rows = [
        (
            cell.label,
            _heading(cell.level),
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
        print()
    print("ms: a forward pass of so many images, as `probmask bench` measured it; means over seeds")


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _heading(level: tuple[float, str]) -> str:
    sparsity, cost = level
    if sparsity == 0:
        return "dense"
    return f"{100 * sparsity:.4g} %" + (" of MACs" if cost == "flops" else "")


def _entry(setting: Setting, place: int | None) -> str:
    if place is None:
        return "–"
    cell = setting.cells[place]
    entry = rounded(cell.mean)
    if cell.deviation is not None:
        entry += f" ± {rounded(cell.deviation)}"
    if _uneven(setting):
        entry += f" ({len(cell.runs)})"
    if not cell.verified:
        entry += f" † {100 * cell.reached:.2f} %"
    return entry + " ★" * (place in setting.best)


def _paper(cell: Cell | None) -> str:
    return "–" if cell is None or cell.paper is None else rounded(cell.paper)


def _notes(setting: Setting) -> list[str]:
    counts = {len(cell.runs) for cell in setting.cells}
    if counts == {1}:
        seeds = "one seed each"
    elif len(counts) == 1:
        seeds = f"mean ± standard deviation over {counts.pop()} seeds"
    else:
        seeds = "mean ± standard deviation over seeds (how many)"
    best = "; ★ best at its sparsity" if setting.best else ""
    notes = [f"{_MEASURES[setting.on]}: {seeds}{best}"]
    if any(not cell.verified for cell in setting.cells):
        notes.append("† ended at another sparsity than was asked for; not compared")
    return notes


def _uneven(setting: Setting) -> bool:
    return len({len(cell.runs) for cell in setting.cells}) > 1


def _plain(text: str) -> str:
    """Text that Markdown leaves alone."""
    return "".join(f"\\{each}" if each in "\\*_`[]<>|#" else each for each in text)
