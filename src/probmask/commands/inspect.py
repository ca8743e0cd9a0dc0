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
    """Print the contents of the artifact, layer by layer."""
    from dataclasses import asdict

    from probmask.analysis.tables import print_layers
    from probmask.artifact import inspect

    artifact = artifact_of(options)
    summary = inspect(artifact)
    if options.json:
        layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in summary.layers]
        sizes = {"file_bytes": summary.file_bytes, "dense_bytes": summary.dense_bytes}
        rest = {"rounding": summary.rounding, "metadata": summary.metadata}
        print_json({**sizes, "layers": layers, **rest})
    else:
        print_layers(artifact, summary)
