"""Keys of the configuration that are set on the command line."""

import argparse
from typing import Any

from probmask.errors import InputError


def add_assignments(command: argparse.ArgumentParser) -> None:
    """Take ``--set KEY=VALUE``, as often as wanted."""
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of the configuration, as in --set optimizer.lr=0.05",
    )


def assignments_of(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """The keys and values that were set."""
    from probmask.training.config import parse_value

    assignments = []
    for assignment in options.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise InputError(f"--set {assignment}: expected KEY=VALUE, as in optimizer.lr=0.05.")
        assignments.append((key, parse_value(value)))
    return assignments
