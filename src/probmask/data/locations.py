"""Where data sets lie, and what to say when they do not."""

import os
from pathlib import Path

from probmask.data.remotes import REMOTES
from probmask.errors import InputError


def default_directory(name: str) -> Path:
    """Where a data set lies if nobody says: in $PROBMASK_DATA, else in the user's cache."""
    given = os.environ.get("PROBMASK_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return (Path(given) if given else Path(cache) / "probmask") / name


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
