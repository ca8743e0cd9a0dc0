"""`probmask inspect`: show the layers and the origin of a finished network."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.analysis.identity import non_default_settings
from probmask.analysis.record_upgrade import upgrade_method
from probmask.checks import is_number
from probmask.cli.arguments import add_artifact, artifact_path
from probmask.cli.terminal import (
    MACS_NOTE,
    add_row,
    format_bytes,
    format_percent,
    format_setting,
    format_shape,
    make_console,
    make_table,
    print_json,
    print_pairs,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from probmask.artifact import ArtifactSummary, StoredLayer

# Metadata for programs, which the summary does not show.
_FOR_PROGRAMS = frozenset(("class_names", "macs_per_weight", "model_args", "data_args"))
_LONGEST = 200  # characters shown of an unknown entry


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    inspect = commands.add_parser(
        "inspect",
        help="show the weights kept in each layer of a finished network",
        description="Show the weights kept, the sparsity, MACs and bytes of each layer of a "
        "finished network, the size of its file, and how it was trained.",
    )
    add_artifact(inspect)
    inspect.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Read the header of the artifact and print it layer by layer."""
    from probmask.artifact import inspect

    artifact = artifact_path(options)
    summary = inspect(artifact)
    if options.json:
        layers = [
            asdict(layer) | {"sparsity": layer.sparsity, "bits_per_weight": layer.bits_per_weight}
            for layer in summary.layers
        ]
        sizes = {"file_bytes": summary.file_bytes, "dense_bytes": summary.dense_bytes}
        rest = {"rounding": summary.rounding, "metadata": summary.metadata}
        print_json({**sizes, "layers": layers, **rest})
    else:
        _print_artifact(artifact, summary)


def training_summary(
    metadata: Mapping[str, Any], rounding: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Return headings and texts that describe how the network was trained.

    The metadata of a file can be anything: entries without a heading of their own are shown
    truncated, and malformed ones as they are.
    """
    sparsity = _table(metadata.get("sparsity"))
    lines = [
        ("model", _with_settings(metadata.get("model"), metadata.get("model_args"))),
        ("data", _with_settings(metadata.get("data"), metadata.get("data_args"))),
        ("images", _shape_text(metadata.get("image_shape"))),
        ("method", _method_text(metadata.get("method"))),
        ("sparsity", _sparsity_text(sparsity) or _text(metadata.get("sparsity"))),
        ("epochs", _text(metadata.get("epochs"))),
        ("seed", _text(metadata.get("seed"))),
        ("test accuracy", _accuracy_text(metadata.get("test"))),
        ("made with", _versions_text(metadata.get("versions"))),
        ("rounding", _settings_text(rounding or {})),
    ]
    known = {"image_shape", "test", "versions", *_FOR_PROGRAMS, *(heading for heading, _ in lines)}
    lines += [(key, _text(metadata[key])[:_LONGEST]) for key in metadata if key not in known]
    return [(heading, text) for heading, text in lines if text]


def _print_artifact(path: Path, summary: "ArtifactSummary") -> None:
    """Print the layers, the file size against dense storage, and how the network was trained."""
    table = _layer_table(summary)
    console = make_console()
    print_table(console, table, optional=("bits", "MACs", "of", "stored as", "bytes"))
    ratio = summary.file_bytes / max(1, summary.dense_bytes)
    print_text(str(path))
    print_text(
        f"{format_bytes(summary.file_bytes)}, {100 * ratio:.1f} % of the "
        f"{format_bytes(summary.dense_bytes)} of dense storage",
    )
    print_text(
        f"{format_bytes(summary.layer_bytes)} for these layers, "
        f"{format_bytes(summary.other_bytes)} for other tensors, "
        f"{format_bytes(summary.header_bytes)} for the header",
    )
    if any(heading.header == "bits" for heading in table.columns):
        print_text("bits: stored per kept weight, for its value and its position")
    if any(heading.header == "MACs" for heading in table.columns):
        print_text(MACS_NOTE)
    training = training_summary(summary.metadata, summary.rounding)
    if training:
        print_pairs(console, training)


def _layer_table(summary: "ArtifactSummary") -> "Table":
    headings = ("layer", "shape", "kept", "of", "sparsity", "MACs", "stored as", "bytes", "bits")
    table = make_table(*headings)
    for layer in summary.layers:
        add_row(table, *_cells(layer))
    table.add_section()
    for total in summary.totals:
        add_row(table, *_cells(total), style="bold")
    return table


def _cells(layer: "StoredLayer") -> tuple[str, ...]:
    return (
        layer.name,
        format_shape(layer.shape),
        f"{layer.kept:,}",
        f"{layer.size:,}",
        format_percent(layer.sparsity) if layer.size else "–",
        "–" if layer.macs is None else f"{layer.macs:,}",
        f"{layer.encoding}, {layer.values}" if layer.values else "",
        f"{layer.bytes:,}",
        f"{layer.bits_per_weight:.1f}",
    )


def _with_settings(name: Any, settings: Any) -> str:
    if name is None:
        return ""
    table = {key: v for key, v in _table(settings).items() if not key.endswith("_sha256")}
    return f"{_text(name)} ({_settings_text(table)})" if table else _text(name)


def _method_text(value: Any) -> str:
    """Name the method and its settings that differ from the defaults, without the sparsity."""
    table = upgrade_method(_table(value))
    if not table:
        return _text(value)
    name = table.get("name", "?")
    settings = non_default_settings({"name": name, **table})
    other = {key: setting for key, setting in settings.items() if key != "sparsity"}
    return f"{_text(name)} ({_settings_text(other)})" if other else _text(name)


def _sparsity_text(sparsity: Mapping[str, Any]) -> str:
    words = {"asked": "requested", "reached": "reached"}
    shown = [
        f"{100.0 * sparsity[key]:.2f} % {word}"
        for key, word in words.items()
        if is_number(sparsity.get(key))
    ]
    return ", ".join(shown)


def _accuracy_text(test: Any) -> str:
    table = _table(test)
    if is_number(table.get("accuracy")) and {"correct", "total"} <= table.keys():
        return f"{table['accuracy']:.2f} % ({table['correct']} of {table['total']} correct)"
    return _text(test)


def _versions_text(value: Any) -> str:
    return ", ".join(f"{name} {_text(version)}" for name, version in _table(value).items())


def _shape_text(value: Any) -> str:
    return "×".join(_text(size) for size in value) if isinstance(value, list) else _text(value)


def _settings_text(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {format_setting(value)}" for key, value in table.items())


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return "" if value is None else str(value)
