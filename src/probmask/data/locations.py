"""Where data sets lie, and what to say when they do not."""

import os
import stat
from pathlib import Path

from probmask.data.remotes import REMOTES
from probmask.errors import InputError


def default_directory(name: str) -> Path:
    """Where a data set lies if nobody says: in $PROBMASK_DATA, else in the user's cache."""
    given = os.environ.get("PROBMASK_DATA")
    if given:
        return expanded(given) / name
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "probmask" / name


def expanded(path: str | Path) -> Path:
    """The path with ~ replaced by the home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"{path}: which home directory that is cannot be found out; give the place in full, by "
            "--data-dir or $PROBMASK_DATA."
        ) from error


def is_file(path: Path) -> bool:
    """Whether there is a file of that name; if that cannot be known, say why."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null in the name
        return False
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> InputError:
    """Say that the system does not let the file be read."""
    return InputError(f"{path}: cannot be read ({error.strerror}).")


def missing(name: str, directory: Path, looked_for: str) -> InputError:
    """Say that a published data set is not there, and how to get it."""
    remotes = REMOTES[name]
    size = sum(remote.size for remote in remotes) / 1e6
    place = remotes[0].url.rpartition("/")[0]
    files = ", ".join(remote.filename for remote in remotes)
    found = "holds no" if directory.exists() else "does not exist, so it holds no"
    return InputError(
        f"--data {name}: {directory} {found} {looked_for}; pass --download to fetch it "
        f"({size:.0f} MB), or get {files} from {place}/, or name its place by --data-dir."
    )
