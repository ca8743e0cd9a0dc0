"""`probmask report`: one page about many runs, for a browser."""

import argparse
from pathlib import Path
from typing import Any

from probmask.commands.output import print_json
from probmask.commands.runs_argument import add_runs, runs_of


def add(commands: Any) -> None:
    """Add the command and its flags."""
    report = commands.add_parser(
        "report",
        help="write an HTML page about runs: tables, plots, configurations",
        description="Write one page that shows runs in any browser, offline: results by method and "
        "sparsity, accuracy against sparsity and MACs, what is kept of each layer, probabilities "
        "and curves over training, size and speed, and every run's configuration.",
    )
    add_runs(report)
    report.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="PAGE.html",
        help="default: %(default)s; an older page is replaced, another file is not",
    )
    report.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Write the page; print where it is."""
    from probmask.analysis.report import write_page

    runs = runs_of(options)
    size = write_page(runs, options.out)
    if options.json:
        print_json({"page": str(options.out), "runs": len(runs), "bytes": size})
    else:
        word = "run" if len(runs) == 1 else "runs"
        print(f"{len(runs):,} {word} on one page of {size / 1000:,.0f} kB, for any browser:")
        print(options.out.absolute())
