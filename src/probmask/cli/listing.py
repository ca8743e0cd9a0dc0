"""`probmask list`: list the methods, models or data sets."""

import argparse
from typing import Any

from probmask.cli.terminal import format_bytes, format_shape, print_json, print_rows, print_text

_METHOD_HEADINGS = ("name", "group", "year", "what it does")
_MODEL_HEADINGS = (
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
_DATA_HEADINGS = (
    "name",
    "images",
    "classes",
    "training",
    "validation",
    "test",
    "download",
    "what it is",
)


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    listing = commands.add_parser(
        "list",
        help="list the methods, models or data sets",
        description="List the methods, models or data sets that 'probmask train' knows.",
    )
    listing.add_argument("what", choices=tuple(_LISTINGS), help="what to list")
    listing.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    listing.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Print the requested table."""
    _LISTINGS[options.what](options)


def _list_methods(options: argparse.Namespace) -> None:
    from probmask.methods import METHODS

    described: list[dict[str, Any]] = [
        {
            "name": name,
            "group": method.group,
            "year": method.year,
            "summary": method.summary,
            "reference": method.reference,
        }
        for name, method in METHODS.items()
    ]
    if options.json:
        print_json(described)
        return
    rows = [
        (row["name"], row["group"], str(row["year"] or "–"), row["summary"]) for row in described
    ]
    print_rows(_METHOD_HEADINGS, rows, markdown=options.markdown)


def _list_models(options: argparse.Namespace) -> None:
    from probmask.masking.macs import CONVENTION
    from probmask.models import describe_models

    described = describe_models()
    if options.json:
        print_json(described)
        return
    rows = [
        (
            model["name"],
            format_shape(model["image_shape"]) if model["image_shape"] else "–",
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
    print_rows(
        _MODEL_HEADINGS,
        rows,
        optional=("what it is", "pooling", "parameters"),
        markdown=options.markdown,
    )
    print_text()
    print_text(CONVENTION)


def _list_data(options: argparse.Namespace) -> None:
    from probmask.data import describe_data

    described = describe_data()
    if options.json:
        print_json(described)
        return
    rows = [
        (
            data["name"],
            format_shape(data["image_shape"]) if data["image_shape"] else "–",
            *(
                "–" if data[key] is None else f"{data[key]:,}"
                for key in ("classes", "train", "validation", "test")
            ),
            "–" if data["download_bytes"] is None else format_bytes(data["download_bytes"]),
            data["summary"],
        )
        for data in described
    ]
    print_rows(
        _DATA_HEADINGS,
        rows,
        optional=("what it is", "download"),
        markdown=options.markdown,
    )


_LISTINGS = {"methods": _list_methods, "models": _list_models, "data": _list_data}
