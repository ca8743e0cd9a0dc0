"""What commands print: messages, JSON, and whether a bar is seen by anybody."""

import argparse
import json
import sys
from typing import Any

from probmask.launch import is_first_rank, launched_rank
from probmask.messages import printable


def say(message: str, *, every_rank: bool = False) -> None:
    """Print a message: the first rank's, or also what another one alone may know."""
    message = "\n".join(map(printable, message.split("\n")))
    if is_first_rank():
        print(f"probmask: {message}", file=sys.stderr)
    elif every_rank:
        print(f"probmask (rank {launched_rank()}): {message}", file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result for machines."""
    print(json.dumps(value, indent=2))


def visible(options: argparse.Namespace) -> bool:
    """Whether somebody is there to see a bar."""
    return sys.stderr.isatty() and not options.json and is_first_rank()
