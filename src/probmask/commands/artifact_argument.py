"""The finished network that a command is about."""

import argparse
from pathlib import Path


def add_artifact(command: argparse.ArgumentParser) -> None:
    """Take an artifact, or a run's directory for the artifact in it."""
    command.add_argument(
        "artifact", type=Path, metavar="ARTIFACT", help="a model.safetensors, or a run's directory"
    )


def artifact_of(options: argparse.Namespace) -> Path:
    """The artifact, or that of the run whose directory is given."""
    given: Path = options.artifact
    return given / "model.safetensors" if given.is_dir() else given
