"""Fetch the files of a data set's release, and accept nothing but the bytes that were released."""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from probmask.errors import DownloadError, InputError

if TYPE_CHECKING:
    from requests import RequestException, Response
    from rich.progress import Progress

_CHUNK = 1 << 16
# What a server says when the same request may well succeed a little later.
_PASSING = {408, 429}


@dataclass(frozen=True)
class Remote:
    """A file of a data set's release: where it is, and what it must be."""

    url: str
    digest: str  # "sha256:…" or "md5:…"
    size: int  # bytes

    @property
    def filename(self) -> str:
        """The last part of the URL's path."""
        return urlsplit(self.url).path.rpartition("/")[2]


def download(
    remotes: Sequence[Remote],
    directory: Path,
    *,
    visible: bool,
    timeout: float = 30.0,
    retries: int = 2,
) -> list[Path]:
    """Fetch into the directory what is not there yet; return the paths of all the files.

    A file gets its name when its digest is right, not before. One that is there already is
    fetched no more, and never overwritten: with another digest it is an InputError. So is too
    little space on the disk. Whatever fails on the network is a DownloadError, raised after
    ``retries`` more attempts where one may help; ``timeout`` is how many seconds the server may
    be silent. Neither a failure nor Ctrl-C leaves a part of a file behind; files that came
    before it stay.

    The environment variable ``PROBMASK_MIRROR=http://host/path`` stands in for everything before
    the file name of every URL, for machines that do not reach the internet. MNIST and
    Fashion-MNIST give their files the same names, so they need a path each. A mirror is trusted
    no more than the original: the digests are checked all the same.
    """
    missing = [
        _mirrored(remote)
        for remote in remotes
        if not _is_there(remote, directory / remote.filename)
    ]
    if missing:
        _require_pooch()
        _check_space(sum(remote.size for remote in missing), directory)
        _make_writable(directory)
    with _progress() if visible and missing else nullcontext() as progress:
        for remote in missing:
            bar = _Bar(progress, remote) if progress else None
            _fetch(remote, directory, bar, timeout, retries)
    return [directory / remote.filename for remote in remotes]


def _is_there(remote: Remote, path: Path) -> bool:
    """Whether the very file is there; another one of its name is refused."""
    algorithm = remote.digest.partition(":")[0]
    try:
        with path.open("rb") as file:
            digest = f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); move it away, and it is downloaded anew."
        ) from error
    if digest != remote.digest:
        raise InputError(
            f"{path}: is not the released file (its digest is {digest}, the release's "
            f"{remote.digest}); move it away, and it is downloaded anew."
        )
    return True


def _mirrored(remote: Remote) -> Remote:
    """The same file, at the mirror if there is one."""
    mirror = os.environ.get("PROBMASK_MIRROR", "")
    if not mirror:
        return remote
    if not re.match(r"https?://(\[[\da-fA-F:.]+\]|[^\s/?#\[\]])+(/|$)", mirror):
        raise InputError(
            f"PROBMASK_MIRROR={mirror}: is no address of a web server; write http://host/path."
        )
    return replace(remote, url=f"{mirror.rstrip('/')}/{remote.filename}")


def _require_pooch() -> None:
    try:
        import pooch  # noqa: F401
    except ImportError as error:
        raise InputError("--download needs pooch; pip install 'probmask[train]'") from error


def _check_space(needed: int, directory: Path) -> None:
    """Refuse before the first byte what would fill the disk."""
    directory = directory.absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(
            f"{directory}: the download takes {needed:,} bytes and {free:,} are free; make room, "
            "or give another directory."
        )


def _make_writable(directory: Path) -> None:
    """Make the directory if it is missing, and refuse one that takes no files."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{directory}: cannot be made a directory ({error.strerror}); give another."
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(f"{directory}: is not writable; give another directory.")


def _fetch(
    remote: Remote, directory: Path, bar: "_Bar | None", timeout: float, retries: int
) -> None:
    """Fetch one file, or say in one sentence why it did not come."""
    import pooch
    from requests import RequestException

    store = pooch.create(
        path=directory.absolute(),
        base_url="",
        registry={remote.filename: remote.digest},
        urls={remote.filename: remote.url},
        retry_if_failed=retries,
        allow_updates=False,
    )
    try:
        with _silenced(pooch.get_logger()):
            store.fetch(remote.filename, downloader=_Transfer(remote, bar, timeout))
    except RequestException as error:
        raise _failure(remote, directory, _what_happened(error, timeout)) from error
    except (_RefusedError, _WrongSizeError) as error:
        raise _failure(remote, directory, str(error)) from error
    except ValueError as error:  # pooch's word for another digest
        reason = f"what came is not the released file (its digest is not {remote.digest})"
        raise _failure(remote, directory, reason) from error


class _RefusedError(Exception):
    """The server will not hand out the file, now or later; not of a kind that pooch tries again."""


class _WrongSizeError(ValueError):
    """More or fewer bytes came than the file has; a ValueError, so that pooch tries again."""


class _Transfer:
    """One attempt to bring a file over: what pooch calls a downloader."""

    def __init__(self, remote: Remote, bar: "_Bar | None", timeout: float) -> None:
        import pooch

        self._size = remote.size
        self._http = pooch.HTTPDownloader(
            progressbar=bar or False,
            chunk_size=_CHUNK,
            timeout=timeout,
            headers={"Accept-Encoding": "identity"},
            hooks={"response": _check_response},
        )

    def __call__(self, url: str, path: str, store: object) -> None:
        # pooch made the file for this user alone; made anew, the umask decides who may read it.
        Path(path).unlink()
        self._http(url, path, store)
        received = Path(path).stat().st_size
        if received != self._size:
            raise _WrongSizeError(f"what came has {received:,} bytes, not {self._size:,}")


def _check_response(response: "Response", **_: Any) -> None:
    """Take the bytes as they lie on the server, and give up at once where a retry cannot help."""
    # Some servers declare a .gz file to be compressed for the transfer only: it would be unpacked
    # on arrival, and have another digest.
    response.raw.headers.pop("Content-Encoding", None)
    if response.status_code >= 400:
        response.close()
    if 400 <= response.status_code < 500 and response.status_code not in _PASSING:
        raise _RefusedError(_answer(response))


def _answer(response: "Response") -> str:
    return f"the server answered {response.status_code} {response.reason}"


def _what_happened(error: "RequestException", timeout: float) -> str:
    """Say in a few words why a request failed."""
    from requests import exceptions

    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return _answer(error.response)
    for cause in _causes(error):
        if isinstance(cause, TimeoutError):
            return f"the server was silent for {timeout:g} s"
        if isinstance(cause, OSError) and cause.strerror:
            return f"the connection failed ({cause.strerror})"
    if isinstance(error, exceptions.ConnectionError | exceptions.ChunkedEncodingError):
        return "the connection broke off"
    return str(error).rstrip(".")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _failure(remote: Remote, directory: Path, reason: str) -> DownloadError:
    return DownloadError(
        f"{remote.url}: {reason}; try again, or fetch it by hand and put it into {directory}."
    )


@contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=Console(stderr=True),
    )


class _Bar:
    """One file's line in the display, moved by pooch."""

    def __init__(self, progress: "Progress", remote: Remote) -> None:
        self._progress = progress
        self._size = remote.size
        self._done = 0
        self._task = progress.add_task(remote.filename, total=remote.size)

    @property
    def total(self) -> int:
        """The size of the file, whatever the server says."""
        return self._size

    @total.setter
    def total(self, _: int) -> None:
        # pooch sets it whenever an attempt begins; a second one begins at nothing.
        self._done = 0
        self._progress.reset(self._task)

    def update(self, count: int) -> None:
        """Move on; pooch counts the last chunk as a whole one."""
        self._done = min(self._done + count, self._size)
        self._progress.update(self._task, completed=self._done)

    def reset(self) -> None:
        """Do nothing: pooch would fill a bar anew that has come short, and this one has not."""

    def close(self) -> None:
        """Do nothing: the line stays until all files are there."""
