"""Runs that this user started on this machine with a network of their own.

A run names its network, and importing it executes code. A run from elsewhere must not decide what
is imported. When a run is created with the user's own network, a note is therefore written to the
user's state directory, outside of the run; a note in the run could be copied with it. Commands
import the network of a run without asking only if there is a note that still agrees with the run.
"""

import hashlib
import json
import os
import stat
from contextlib import suppress
from pathlib import Path

from probmask.data.releases import expand_home
from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.models.own_network import allow_imports, module_location

_LARGEST_NOTE = 65536  # bytes


def remember_run(directory: Path, config: Path, model: str) -> None:
    """Note that the user created the run in the directory with this network.

    Nothing happens for a network of probmask. If the note cannot be written, the user has to pass
    ``--trust`` later.

    Args:
        directory: Directory of the run.
        config: The configuration file of the run.
        model: The network, ``package.module:function``.
    """
    location = module_location(model) if ":" in model else None
    if location is None:
        return
    with suppress(InputError, OSError):
        path = _note_path(directory)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps(_note(directory, config, model, location), indent=2) + "\n"
        write_atomically(path, text.encode(), overwrite=True)


def is_trusted_run(directory: Path, config: Path, model: str) -> bool:
    """Return whether the user created this run here, with this network from the same place.

    If so, the network can then be imported from any working directory.
    """
    try:
        note = _read_note(_note_path(directory))
        location = Path(note["location"])
        allow_imports(model, location.parent)
        return note == _note(directory, config, model, location) and (
            module_location(model) == location
        )
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return False


def _note(directory: Path, config: Path, model: str, location: Path) -> dict[str, str]:
    return {
        "directory": str(directory.resolve()),
        "config": hashlib.sha256(config.read_bytes()).hexdigest(),
        "model": model,
        "location": str(location),
    }


def _note_path(directory: Path) -> Path:
    state = expand_home(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
    return state / "probmask" / "trusted_runs" / f"{name}.json"


def _read_note(path: Path) -> dict[str, str]:
    """Read a note; raise `OSError` or `ValueError` if others could have written it."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if os.name == "posix" and (
            status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            raise ValueError(f"{path}: others can write this file")
        note: dict[str, str] = json.loads(file.read(_LARGEST_NOTE))
    return note
