"""Runs that this user started on this machine with code of their own.

A run names its network and its optimizer, and importing them executes code. A run from elsewhere
must not decide what is imported. When a run is created with the user's own code, a note is
therefore written to the user's state directory, outside of the run; a note in the run could be
copied with it. Commands import the code of a run without asking only if there is a note that still
agrees with the run.
"""

import hashlib
import json
import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from probmask.data.releases import expand_home
from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.models.own_code import allow_imports, module_location

_LARGEST_NOTE = 65536  # bytes


def remember_run(directory: Path, config: Path, names: Collection[str]) -> None:
    """Note that the user created the run in the directory with this code.

    It does nothing if the run uses no code of the user. If the note cannot be written, the user
    has to pass ``--trust`` later.

    Args:
        directory: Directory of the run.
        config: The configuration file of the run.
        names: The user's own code, each ``package.module:name``.
    """
    locations = {name: module_location(name) for name in names}
    if not names or None in locations.values():
        return
    with suppress(InputError, OSError):
        path = _note_path(directory)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        places = {name: str(location) for name, location in locations.items()}
        text = json.dumps(_note(directory, config, places), indent=2) + "\n"
        write_atomically(path, text.encode(), overwrite=True)


def is_trusted_run(directory: Path, config: Path, names: Collection[str]) -> bool:
    """Return whether the user created this run here, with this code from the same places.

    If so, the code can then be imported from any working directory.
    """
    try:
        note = _read_note(_note_path(directory))
        places = note["locations"]
        if note != _note(directory, config, places):
            return False
        for name in names:
            allow_imports(name, Path(places[name]).parent)
        return all(module_location(name) == Path(places[name]) for name in names)
    except (InputError, OSError, ValueError, KeyError, TypeError):
        return False


def _note(directory: Path, config: Path, locations: Mapping[str, str]) -> dict[str, Any]:
    return {
        "directory": str(directory.resolve()),
        "config": hashlib.sha256(config.read_bytes()).hexdigest(),
        "locations": dict(locations),
    }


def _note_path(directory: Path) -> Path:
    state = expand_home(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]
    return state / "probmask" / "trusted_runs" / f"{name}.json"


def _read_note(path: Path) -> dict[str, Any]:
    """Read a note; raise `OSError` or `ValueError` if others could have written it."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if os.name == "posix" and (
            status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            raise ValueError(f"{path}: others can write this file")
        note: dict[str, Any] = json.loads(file.read(_LARGEST_NOTE))
    return note
