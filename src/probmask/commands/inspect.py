"""`probmask inspect`: show what a finished network kept, by layer."""

import argparse
from typing import Any

from probmask.commands.artifact_argument import add_artifact, artifact_of
from probmask.commands.output import print_json


def add(commands: Any) -> None:
    """Add the command and its flags."""
    inspect = commands.add_parser("inspect", help="show what a finished network kept, by layer")
    add_artifact(inspect)
    inspect.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Print the header of the artifact, layer by layer."""
    from probmask.analysis.tables import layer_rows, print_layers
    from probmask.artifact import read

    artifact = artifact_of(options)
    info = read(artifact)
    if options.json:
        sizes = {"file_bytes": info.file_bytes, "dense_bytes": info.dense_bytes}
        rest = {"rounding": info.rounding, "metadata": info.metadata}
        print_json({**sizes, "layers": layer_rows(info), **rest})
    else:
        print_layers(artifact, info)
