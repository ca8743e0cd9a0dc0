"""Print messages, texts, JSON and tables. Everything that commands print goes through here.

Names in files can be anything: terminal escapes, or markup of rich. All text is therefore made
printable here, and rich never interprets markup. Rich is imported with the first table, so that
help is fast.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.launch import is_first_rank, launched_rank
from probmask.messages import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

MACS_NOTE = "MACs: multiply-accumulates by STR's convention, without pooling"
PIPE_WIDTH = 220  # characters per line where output does not go to a terminal


def print_message(message: str, *, every_rank: bool = False) -> None:
    """Print a message to stderr, on the first rank only unless `every_rank` is set."""
    message = printable(message)
    if is_first_rank():
        print(f"probmask: {message}", file=sys.stderr)
    elif every_rank:
        print(f"probmask (rank {launched_rank()}): {message}", file=sys.stderr)


def print_text(text: str = "") -> None:
    """Print a line to stdout, unwrapped."""
    print(printable(text))


def print_json(value: Any) -> None:
    """Print a result as JSON, in ASCII."""
    print(json.dumps(value, indent=2).replace("\x7f", "\\u007f"))


def print_csv(rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as CSV."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    for row in rows:
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in row])


def shows_progress(options: argparse.Namespace) -> bool:
    """Return whether a progress bar would be visible: in a terminal, without --json, on rank 0."""
    return sys.stderr.isatty() and not options.json and is_first_rank()


def print_training(
    directory: Path, record: Mapping[str, Any], dense: Mapping[str, Any] | None
) -> None:
    """Print the layers and the results of a run, next to the results of its dense twin."""
    console = make_console()
    print_table(console, _layer_table(record))
    selected = record.get("selection") is not None and record["selection"]["on"] == "val"
    accuracies = ("test accuracy", "validation") if selected else ("test accuracy",)
    results = make_table("network", *accuracies, "weights", "MACs", "file", "trained in")
    for name, run in (("dense", dense), (record["method"]["name"], record)):
        if run is not None:
            add_row(results, name, *_result(run, with_validation=selected))
    print_table(console, results, optional=("trained in",))
    print_text(MACS_NOTE)
    unreadable = record.get("unreadable", [])
    if unreadable:
        print_text(f"{len(unreadable)} image files are unreadable; record.json lists them")
    files = "config.toml, metrics.jsonl, model.safetensors, record.json"
    print_text(f"in {directory}: {files}")


def print_rows(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    optional: Sequence[str] = (),
    markdown: bool = False,
) -> None:
    """Print a table with right-aligned numbers, for the terminal or as Markdown.

    A terminal that is too narrow gets the table without the `optional` columns.
    """
    rows = list(rows)
    right = [all(_is_figure(row[column]) for row in rows) for column in range(len(headings))]
    if markdown:
        print_text("| " + " | ".join(headings) + " |")
        print_text("|" + "|".join("---:" if figures else "---" for figures in right) + "|")
        for row in rows:
            print_text("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        return
    table = _empty_table()
    for heading, figures in zip(headings, right, strict=True):
        table.add_column(heading, justify="right" if figures else "left")
    for row in rows:
        add_row(table, *row)
    print_table(make_console(), table, optional=optional)


def print_pairs(console: "Console", pairs: Iterable[tuple[str, str]]) -> None:
    """Print headings and texts in two columns; long texts wrap within their column."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, text in pairs:
        table.add_row(verbatim(heading, style="bold"), verbatim(text))
    console.print()
    console.print(table)


def print_table(console: "Console", table: "Table", *, optional: Sequence[str] = ()) -> None:
    """Print a table; drop `optional` columns while it is too wide, but never truncate figures."""
    from rich.measure import Measurement

    for heading in (*optional, None):
        width = Measurement.get(console, console.options.update(max_width=1000), table).maximum
        if width <= console.width or heading is None:
            break
        table.columns = [column for column in table.columns if column.header != heading]
        for index, column in enumerate(table.columns):
            column._index = index
    console.width = max(width, console.width)
    console.print(table)


def make_console() -> "Console":
    """Return a console; its lines are wide where the output goes to a file or a pipe."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def make_table(*headings: str) -> "Table":
    """Return an empty table of figures; the first column and texts are aligned to the left."""
    table = _empty_table()
    for index, heading in enumerate(headings):
        left = index == 0 or heading in ("shape", "stored as")
        table.add_column(heading, justify="left" if left else "right")
    return table


def add_row(table: "Table", *cells: str, style: str | None = None) -> None:
    """Add a row of texts to a table."""
    table.add_row(*map(verbatim, cells), style=style)


def verbatim(text: str, style: str = "") -> "Text":
    """Return a text for rich without markup or control codes."""
    from rich.text import Text

    return Text(printable(text), style=style)


def format_shape(shape: Sequence[int]) -> str:
    """Write a shape as in 3×32×32."""
    return "×".join(str(n) for n in shape)


def format_percent(fraction: float) -> str:
    """Write a fraction in percent."""
    return f"{100 * fraction:.2f} %"


def format_setting(value: Any) -> str:
    """Write the value of a setting; None is written as in a configuration file."""
    return "none" if value is None else str(value)


def format_bytes(count: int) -> str:
    """Write a number of bytes in B, kB or MB."""
    if count < 1000:
        return f"{count} B"
    return f"{count / 1000:,.1f} kB" if count < 1_000_000 else f"{count / 1e6:,.2f} MB"


def _layer_table(record: Mapping[str, Any]) -> "Table":
    table = make_table("layer", "shape", "kept", "of", "sparsity")
    for layer in record["layers"]:
        add_row(
            table,
            layer["name"],
            format_shape(layer["shape"]),
            f"{layer['kept']:,}",
            f"{layer['size']:,}",
            format_percent(layer["sparsity"]),
        )
    table.add_section()
    kept, size = record["kept"], record["size"]
    total = ("all", "", f"{kept:,}", f"{size:,}", format_percent(1 - kept / size))
    add_row(table, *total, style="bold")
    network = record.get("network", record)
    if network["size"] != size:
        name = "with unmasked tensors"
        counts = f"{network['kept']:,}", f"{network['size']:,}"
        add_row(table, name, "", *counts, format_percent(network["sparsity"]), style="bold")
    return table


def _result(run: Mapping[str, Any], *, with_validation: bool) -> tuple[str, ...]:
    test = run["test"]
    macs = run["macs"]["sparse"]
    validation = (f"{run['selection']['accuracy']:.2f} %",) if with_validation else ()
    return (
        f"{test['accuracy']:.2f} % ({test['correct']}/{test['total']})",
        *validation,
        f"{run['kept']:,}",
        f"{macs / 1e6:,.2f} M",
        format_bytes(run["bytes"]),
        f"{run['seconds']:.0f} s",
    )


def _empty_table() -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)


def _is_figure(text: str) -> bool:
    return text == "–" or text[:1].isdigit()
