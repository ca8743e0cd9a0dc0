"""Arguments that several commands share."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.cli.terminal import shows_progress
from probmask.errors import InputError

if TYPE_CHECKING:
    from probmask.analysis.records import Run

_MODEL_HELP = "package.module:function of your own network; the function is imported and called"
MODEL_NAME_HELP = "see 'probmask list models', or package.module:function of your own network"


def add_artifact(command: argparse.ArgumentParser) -> None:
    """Add ARTIFACT: a file, or a run's directory."""
    command.add_argument(
        "artifact", type=Path, metavar="ARTIFACT", help="a model.safetensors, or a run's directory"
    )


def artifact_path(options: argparse.Namespace) -> Path:
    """Return the path of the artifact, which may be in a run's directory."""
    given: Path = options.artifact
    if not given.is_dir():
        return given
    artifact = given / "model.safetensors"
    if not artifact.exists() and (given / "config.toml").exists():
        raise InputError(
            f"{given}: this run has not finished, so it has no network yet; continue it with "
            f"probmask train --resume {given}."
        )
    return artifact


def add_model(command: argparse.ArgumentParser) -> None:
    """Add ``--model`` and ``--trust``, for commands that build the network of an artifact."""
    command.add_argument("--model", help=_MODEL_HELP)
    add_trust(command, "the network that ARTIFACT names")


def add_trust(command: argparse.ArgumentParser, what: str) -> None:
    """Add ``--trust``."""
    command.add_argument(
        "--trust",
        action="store_true",
        help=f"import {what}, though it is not part of probmask; this executes its code. Runs that "
        "you started on this machine do not need it",
    )


def model_to_import(options: argparse.Namespace) -> str | None:
    """Return the network that the user allows to import, or None for networks of probmask.

    It is ``--model``, or else the name in the artifact if the user passes ``--trust`` or started
    the run on this machine.
    """
    from probmask.artifact import read
    from probmask.training.run_directory import RunDirectory
    from probmask.training.trusted_runs import is_trusted_run

    if options.model is not None:
        return str(options.model)
    artifact = artifact_path(options)
    name = read(artifact).metadata.get("model")
    if not isinstance(name, str) or ":" not in name:
        return None
    run = RunDirectory(artifact.parent)
    return name if options.trust or is_trusted_run(run.path, run.config, [name]) else None


def add_runs(command: argparse.ArgumentParser) -> None:
    """Add RUNS: records, directories of runs, or directories that contain either."""
    command.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUNS",
        help="record.json files, directories of runs, or directories that contain any of these",
    )


def finished_runs(options: argparse.Namespace) -> "Sequence[Run]":
    """Return the finished runs at the given paths, each once.

    Raises:
        InputError: If there are none.
    """
    from probmask.analysis.records import find_records

    found = find_records(options.runs)
    if not found:
        paths = ", ".join(str(path) for path in options.runs)
        raise InputError(
            f"{paths}: found no record.json. A run writes it when it finishes; pass the directory "
            "of a finished run."
        )
    return found


def add_assignments(command: argparse.ArgumentParser) -> None:
    """Add ``--set KEY=VALUE``, which may be repeated."""
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any key of the configuration, as in --set optimizer.lr=0.05; may be repeated",
    )


def assignments(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the keys and parsed values of ``--set``."""
    from probmask.training.config import parse_value

    parsed = []
    for assignment in options.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise InputError(f"--set {assignment}: expected KEY=VALUE, as in optimizer.lr=0.05.")
        parsed.append((key, parse_value(value, source=f"--set {key}")))
    return parsed


def as_written(options: argparse.Namespace, flags: Mapping[str, str]) -> dict[str, str]:
    """Return what the user wrote for each key of the configuration, for error messages.

    Args:
        options: Parsed arguments.
        flags: Keys by the name of the option that sets them.
    """
    written = {}
    for option, key in flags.items():
        value = getattr(options, option)
        if value is not None:
            flag = option.replace("_", "-")
            shown = f"{value:g}" if isinstance(value, float) else value
            written[key] = f"--{flag}" if value is True else f"--{flag} {shown}"
    for assignment in options.set:
        written[assignment.partition("=")[0]] = f"--set {assignment}"
    return written


def check_sparsity_flag(sparsity: float) -> None:
    """Raise if the value of ``--sparsity`` is not in [0, 1)."""
    from probmask.checks import check_sparsity
    from probmask.training.origins import Origins

    with Origins(written={"sparsity": f"--sparsity {sparsity:g}"}).named():
        check_sparsity("train", sparsity)


def add_data_location(command: argparse.ArgumentParser) -> None:
    """Add ``--data-dir`` and ``--download``."""
    command.add_argument("--data-dir", metavar="DIR", help="directory of the data set")
    command.add_argument(
        "--download", action="store_true", help="download the data set first if it is missing"
    )


def download(data: str, directory: str | None, options: argparse.Namespace) -> None:
    """Download a data set unless its files exist.

    Every rank calls this, because none can train without the files. A file gets its name only
    once it is complete, and existing files are not downloaded again.
    """
    from probmask.data import download_data

    download_data(data, directory, progress=shows_progress(options))


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Parse the shape of one input, as in ``3,32,32``; return None for None."""
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError as error:
        raise InputError(
            f"--input-shape {text}: expected the shape of one input, as in 3,32,32."
        ) from error
