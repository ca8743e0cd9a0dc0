"""Where a command finds its data set, and how it gets there."""

import argparse

from probmask.commands.output import visible


def add_data_place(command: argparse.ArgumentParser) -> None:
    """Take the place of the data set, and whether it is to be fetched."""
    command.add_argument("--data-dir", metavar="DIR", help="where the data set lies")
    command.add_argument(
        "--download", action="store_true", help="fetch the data set first if it is not there"
    )


def fetch(data: str, directory: str | None, options: argparse.Namespace) -> None:
    """Download the data set, unless it is there."""
    from probmask.data import download_data

    # Every rank of a launcher that starts them together, as none may go on without the files; what
    # is there already is not fetched again, and a file gets its name when it is complete.
    download_data(data, directory, visible=visible(options))
