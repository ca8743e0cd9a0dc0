"""`probmask report`: write an HTML page that shows many runs."""

import argparse
from pathlib import Path
from typing import Any

from probmask.cli.arguments import add_runs, finished_runs
from probmask.cli.terminal import print_json, print_text


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    report = commands.add_parser(
        "report",
        help="write an HTML page with tables, plots and configurations of runs",
        description="Write one HTML page that works offline in any browser. It shows the results "
        "by method and sparsity, accuracy against sparsity and MACs, the weights kept in each "
        "layer, probabilities and curves over training, size and speed, and the configuration of "
        "every run.",
    )
    add_runs(report)
    report.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="PAGE.html",
        help="the page to write; replaces an older page, but no other file (default: %(default)s)",
    )
    report.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Write the page and print its path."""
    from probmask.report import write_page

    runs = finished_runs(options)
    size = write_page(runs, options.out)
    if options.json:
        print_json({"page": str(options.out), "runs": len(runs), "bytes": size})
    else:
        count = f"{len(runs):,} run{'s' * (len(runs) != 1)}"
        print_text(f"wrote a page of {size / 1000:,.0f} kB with {count}; open it in a browser:")
        print_text(str(options.out.absolute()))
