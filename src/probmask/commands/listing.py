"""`probmask list`: the methods, models and data sets there are."""

import argparse
from typing import Any

from probmask.commands.output import print_json


def add(commands: Any) -> None:
    """Add the command and its flags."""
    listing = commands.add_parser("list", help="list the methods, models or data sets there are")
    listing.add_argument("what", choices=("methods", "models", "data"))
    listing.add_argument("--markdown", action="store_true", help="print a Markdown table")
    listing.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Print the table that is asked for."""
    _LISTINGS[options.what](options)


def _list_methods(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import print_rows
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
    print_rows(("name", "group", "year", "what it does"), rows, markdown=options.markdown)


def _list_models(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import MODEL_HEADINGS, model_rows, print_rows
    from probmask.masking.macs import CONVENTION
    from probmask.models import describe_models

    described = describe_models()
    if options.json:
        print_json(described)
        return
    print_rows(
        MODEL_HEADINGS,
        model_rows(described),
        optional=("what it is", "pooling", "parameters"),
        markdown=options.markdown,
    )
    print(f"\n{CONVENTION}")


def _list_data(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import DATA_HEADINGS, data_rows, print_rows
    from probmask.data.catalogue import describe_data

    described = describe_data()
    if options.json:
        print_json(described)
    else:
        print_rows(
            DATA_HEADINGS,
            data_rows(described),
            optional=("what it is", "download"),
            markdown=options.markdown,
        )


_LISTINGS = {"methods": _list_methods, "models": _list_models, "data": _list_data}
