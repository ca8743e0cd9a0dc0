"""Tables for the terminal, made from records and artifacts."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from probmask.analysis.provenance import provenance
from probmask.messages import printable

if TYPE_CHECKING:
    from probmask.artifact import ArtifactSummary

_SHORT_CONVENTION = "MACs: multiply-accumulates by STR's convention, without pooling"


def print_training(
    directory: Path, record: Mapping[str, Any], dense: Mapping[str, Any] | None
) -> None:
    """Show what a run kept, layer by layer, and how accurate it is, beside its dense twin."""
    table = _table("layer", "shape", "kept", "of", "sparsity")
    for layer in record["layers"]:
        table.add_row(
            _verbatim(layer["name"]),
            _shape(layer["shape"]),
            f"{layer['kept']:,}",
            f"{layer['size']:,}",
            _percent(layer["sparsity"]),
        )
    table.add_section()
    reached = 1 - record["kept"] / record["size"]
    table.add_row(
        "all", "", f"{record['kept']:,}", f"{record['size']:,}", _percent(reached), style="bold"
    )
    console = _console()
    _show(console, table)

    selected = record.get("selection") is not None and record["selection"]["on"] == "val"
    accuracies = ("test accuracy", "validation") if selected else ("test accuracy",)
    results = _table("network", *accuracies, "weights", "MACs", "file", "trained in")
    for name, run in (("dense", dense), (record["method"]["name"], record)):
        if run is not None:
            results.add_row(name, *_result(run, with_validation=selected))
    _show(console, results, optional=("trained in",))
    _say(console, _SHORT_CONVENTION)
    skipped = record.get("unreadable", [])
    if skipped:
        _say(console, f"{len(skipped)} image files could not be read; record.json names them")
    _say(console, f"in {directory}: config.toml, metrics.jsonl, model.safetensors, record.json")


def print_layers(path: Path, summary: "ArtifactSummary") -> None:
    """Print an artifact: its layers, its size and the size stored dense, and its origin."""
    table = _table("layer", "shape", "kept", "of", "sparsity", "MACs", "stored as", "bytes")
    for layer in summary.layers:
        table.add_row(
            _verbatim(layer.name),
            _shape(layer.shape),
            f"{layer.kept:,}",
            f"{layer.size:,}",
            _percent(layer.sparsity),
            "–" if layer.macs is None else f"{layer.macs:,}",
            layer.encoding,
            f"{layer.bytes:,}",
        )
    table.add_section()
    table.add_row(
        "all",
        "",
        f"{summary.kept:,}",
        f"{summary.size:,}",
        _percent(summary.sparsity) if summary.size else "–",
        "–" if summary.macs is None else f"{summary.macs:,}",
        "",
        f"{summary.layer_bytes:,}",
        style="bold",
    )
    console = _console()
    _show(console, table, optional=("MACs", "of", "stored as", "bytes"))
    ratio = summary.file_bytes / max(1, summary.dense_bytes)
    _say(console, str(path))
    _say(
        console,
        f"{_bytes(summary.file_bytes)}, {100 * ratio:.1f} % of the "
        f"{_bytes(summary.dense_bytes)} that its tensors take when stored dense",
    )
    _say(
        console,
        f"{_bytes(summary.layer_bytes)} for these layers, "
        f"{_bytes(summary.other_bytes)} for other tensors, "
        f"{_bytes(summary.header_bytes)} for the header",
    )
    if any(heading.header == "MACs" for heading in table.columns):
        _say(console, _SHORT_CONVENTION)
    said = provenance(summary.metadata, summary.rounding)
    if said:
        _show_pairs(console, said)


def print_rows(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    optional: Sequence[str] = (),
    markdown: bool = False,
) -> None:
    """Show a plain table, numbers to the right, or write it as Markdown.

    A terminal that is too narrow gets it without the ``optional`` columns.
    """
    rows = list(rows)
    right = [all(_is_figure(row[column]) for row in rows) for column in range(len(headings))]
    if markdown:
        print("| " + " | ".join(headings) + " |")
        print("|" + "|".join("---:" if figures else "---" for figures in right) + "|")
        for row in rows:
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        return
    table = _empty_table()
    for heading, figures in zip(headings, right, strict=True):
        table.add_column(heading, justify="right" if figures else "left")
    for row in rows:
        table.add_row(*row)
    _show(_console(), table, optional=optional)


def model_rows(described: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The networks as a table; the headings are `MODEL_HEADINGS`."""
    return [
        (
            model["name"],
            _shape(model["image_shape"]),
            f"{model['classes']}",
            f"{model['layers']}",
            f"{model['weights']:,}",
            f"{model['parameters']:,}",
            f"{model['macs']:,}",
            f"{model['pooling_macs']:,}",
            model["summary"],
        )
        for model in described
    ]


MODEL_HEADINGS = (
    "name",
    "images",
    "classes",
    "layers",
    "weights",
    "parameters",
    "MACs",
    "pooling",
    "what it is",
)


def data_rows(described: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The data sets as a table; the headings are `DATA_HEADINGS`."""
    return [
        (
            data["name"],
            _shape(data["image_shape"]) if data["image_shape"] else "–",
            *(
                "–" if data[key] is None else f"{data[key]:,}"
                for key in ("classes", "train", "validation", "test")
            ),
            "–" if data["download_bytes"] is None else _bytes(data["download_bytes"]),
            data["summary"],
        )
        for data in described
    ]


DATA_HEADINGS = (
    "name",
    "images",
    "classes",
    "training",
    "validation",
    "test",
    "download",
    "what it is",
)


def _result(run: Mapping[str, Any], *, with_validation: bool) -> tuple[str, ...]:
    test = run["test"]
    macs = run["macs"]["sparse"]
    validation = (f"{run['selection']['accuracy']:.2f} %",) if with_validation else ()
    return (
        f"{test['accuracy']:.2f} % ({test['correct']}/{test['total']})",
        *validation,
        f"{run['kept']:,}",
        f"{macs / 1e6:,.2f} M",
        _bytes(run["bytes"]),
        f"{run['seconds']:.0f} s",
    )


def _show_pairs(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Print headings and texts side by side; a long text goes on below itself."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, text in pairs:
        table.add_row(Text(heading, style="bold"), _verbatim(text))
    console.print()
    console.print(table)


def _verbatim(text: str) -> Text:
    """Text of anybody's: brackets are no markup, and nothing in it steers the terminal."""
    return Text(printable(text))


def _say(console: Console, text: str) -> None:
    # A path may hold brackets, which are markup to rich, and be copied, so never broken.
    console.print(text, markup=False, soft_wrap=True)


def _console() -> Console:
    # Piped output is read by programs and by people later on: full width, no colour codes.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=220)


def _show(console: Console, table: Table, *, optional: Sequence[str] = ()) -> None:
    """Print a table; if it is too wide, without optional columns, but never with cut figures."""
    for heading in (*optional, None):
        width = Measurement.get(console, console.options.update(max_width=1000), table).maximum
        if width <= console.width or heading is None:
            break
        table.columns = [column for column in table.columns if column.header != heading]
        for index, column in enumerate(table.columns):
            column._index = index
    console.width = max(width, console.width)
    console.print(table)


def _empty_table() -> Table:
    return Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)


def _table(*headings: str) -> Table:
    table = _empty_table()
    for index, heading in enumerate(headings):
        left = index == 0 or heading in ("shape", "stored as")
        table.add_column(heading, justify="left" if left else "right")
    return table


def _is_figure(text: str) -> bool:
    return text == "–" or text[:1].isdigit()


def _shape(shape: Sequence[int]) -> str:
    return "×".join(str(n) for n in shape)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    return f"{count / 1000:,.1f} kB" if count < 1_000_000 else f"{count / 1e6:,.2f} MB"
