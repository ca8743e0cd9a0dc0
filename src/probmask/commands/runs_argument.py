"""The finished runs that a command is about."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from probmask.errors import InputError

if TYPE_CHECKING:
    from probmask.analysis.records import Run


def add_runs(command: argparse.ArgumentParser) -> None:
    """Take runs: their directories, directories of them, or their records."""
    command.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="record.json files, runs' directories, or directories with many of them",
    )


def runs_of(options: argparse.Namespace) -> "Sequence[Run]":
    """The finished runs below the given paths, each once; at least one."""
    from probmask.analysis.records import find_records

    found = find_records(options.runs)
    if not found:
        places = ", ".join(str(path) for path in options.runs)
        raise InputError(
            f"{places}: there is no record.json in it; a run has one once it is finished."
        )
    return found
