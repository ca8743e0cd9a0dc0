"""`probmask compare`: the table of many runs, mean ± standard deviation over seeds."""

import argparse
from typing import Any

from probmask.commands.runs_argument import add_runs, runs_of

_FORMATS = ("text", "markdown", "csv", "json")


def add(commands: Any) -> None:
    """Add the command and its flags."""
    compare = commands.add_parser(
        "compare",
        help="print the table of runs: mean ± standard deviation over seeds",
        description="Compare runs by their accuracy after the last epoch, on the test images or "
        "on those held out for validation, in one table for all that were trained alike: the same "
        "network, data, epochs and optimizer. The best of each sparsity is marked; runs that "
        "missed the sparsity they were asked for are not compared.",
    )
    add_runs(compare)
    compare.add_argument(
        "--on",
        choices=("test", "val"),
        default="test",
        help='the images that the accuracy is of; val: those held out by select_on = "val", for '
        "choosing between runs without a look at the test images; default: %(default)s",
    )
    compare.add_argument(
        "--format", choices=_FORMATS, default="text", help="default: %(default)s; --json is json"
    )
    compare.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Print the tables."""
    from probmask.analysis.comparison import compare
    from probmask.analysis.comparison_tables import print_comparison

    settings = compare(runs_of(options), options.on)
    print_comparison(settings, "json" if options.json else options.format)
