"""Download of the published files of a data set.

pooch verifies the digests of the files, retries, and gives a file its name only after it is
verified. This file adds what pooch does not have: transfers that stop as soon as a file is larger
than published or too slow, a mirror, a check of the free space, no retries after a permanent
refusal, files that are never replaced, and errors in one sentence.
"""

import hashlib
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from probmask.data.releases import Remote
from probmask.errors import DownloadError, InputError

if TYPE_CHECKING:  # optional dependencies
    from requests import Response
    from rich.progress import Progress

_CHUNK_SIZE = 1 << 16
# Bytes per second. A slower server is treated as stalled: it could occupy a machine for days.
_LOWEST_SPEED = 2_000
# Client errors after which the same request may succeed later.
_TEMPORARY_ERRORS = (408, 429)


def download(
    remotes: Sequence[Remote],
    directory: Path,
    *,
    progress: bool,
    timeout: float = 30.0,
    retries: int = 2,
) -> list[Path]:
    """Download the files that are not in the directory yet.

    A file gets its name only after its digest is verified. A failure or Ctrl-C leaves no partial
    file; files that were completed before it stay. An existing file is never overwritten. A
    transfer ends as soon as it exceeds the published size, or is slower than 2 kB/s.

    The environment variable ``PROBMASK_MIRROR=http://host/path`` replaces everything before the
    file name in every URL, for machines without access to the internet. MNIST and Fashion-MNIST
    use the same file names, so they need different paths. The digests are still checked.

    Args:
        remotes: The files.
        directory: Directory for the files; created if it does not exist.
        progress: Whether to show progress bars.
        timeout: Seconds to wait for data from the server.
        retries: Number of further attempts after an error that may be temporary.

    Returns:
        The paths of all files.

    Raises:
        InputError: If an existing file has another digest, the disk has too little space, or the
            directory is not writable.
        DownloadError: If the transfer fails, or the file does not have the published digest.
    """
    needed = [
        _mirrored(remote)
        for remote in remotes
        if not _is_verified(remote, directory / remote.filename)
    ]
    if needed:
        _require_pooch()
        _check_space(sum(remote.size for remote in needed), directory)
        _make_writable(directory)
    with _progress_display() if progress and needed else nullcontext() as display:
        for remote in needed:
            bar = _Bar(display, remote) if display else None
            _fetch(remote, directory, bar, timeout, retries)
    return [directory / remote.filename for remote in remotes]


def _is_verified(remote: Remote, path: Path) -> bool:
    """Return whether the file exists; raise InputError if its content is different."""
    algorithm = remote.digest.partition(":")[0]
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: is not a regular file; move it away to download the file.")
        if status.st_size != remote.size:
            raise _differs(path, f"its size is {status.st_size:,} bytes, expected {remote.size:,}")
        with path.open("rb") as file:
            digest = f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); move it away to download it again."
        ) from error
    if digest != remote.digest:
        raise _differs(path, f"its digest is {digest}, expected {remote.digest}")
    return True


def _differs(path: Path, reason: str) -> InputError:
    return InputError(
        f"{path}: differs from the published file ({reason}); move it away to download it again."
    )


def _mirrored(remote: Remote) -> Remote:
    """Return the file at the mirror, if there is one."""
    mirror = os.environ.get("PROBMASK_MIRROR", "")
    if not mirror:
        return remote
    if not re.match(r"https?://(\[[\da-fA-F:.]+\]|[^\s/?#\[\]])+(/|$)", mirror):
        raise InputError(
            f"PROBMASK_MIRROR={mirror}: is not the address of a web server; use http://host/path."
        )
    return replace(remote, url=f"{mirror.rstrip('/')}/{remote.filename}")


def _require_pooch() -> None:
    try:
        import pooch  # noqa: F401
    except ImportError as error:
        raise InputError("--download needs pooch; run pip install 'probmask[train]'.") from error


def _check_space(needed: int, directory: Path) -> None:
    directory = directory.absolute()
    while not directory.exists():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise InputError(
            f"{directory}: the download needs {needed:,} bytes, but only {free:,} are free; free "
            "some space, or choose another directory."
        )


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{directory}: cannot be created ({error.strerror}); choose another directory."
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(f"{directory}: is not writable; choose another directory.")


def _fetch(
    remote: Remote, directory: Path, bar: "_Bar | None", timeout: float, retries: int
) -> None:
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
    except (RequestException, _RefusedError, ValueError) as error:
        raise DownloadError(
            f"{remote.url}: {_describe(error, remote, timeout)}; try again, or download it "
            f"yourself to {directory}."
        ) from error


class _RefusedError(Exception):
    """The server refuses the file permanently; pooch does not retry after this type."""


class _WrongContentError(ValueError):
    """The server sends a file of the wrong size, or too slowly; pooch retries after this type."""


class _Transfer:
    """One attempt to transfer a file; pooch calls this a downloader."""

    def __init__(self, remote: Remote, bar: "_Bar | None", timeout: float) -> None:
        self._size, self._bar, self._timeout = remote.size, bar, timeout

    def __call__(self, url: str, path: str, store: object) -> None:
        import requests

        # pooch created the file with mode 0600. A new file gets the mode that the umask allows.
        Path(path).unlink()
        with requests.get(
            url,
            headers={"Accept-Encoding": "identity"},
            hooks={"response": _check_response},
            stream=True,
            timeout=self._timeout,
        ) as response:
            response.raise_for_status()
            with Path(path).open("wb") as file:
                self._receive(response, file)

    def _receive(self, response: "Response", file: BinaryIO) -> None:
        received, started = 0, time.monotonic()
        while received <= self._size:
            chunk = _read_chunk(response)
            if not chunk:
                break
            file.write(chunk)
            received += len(chunk)
            self._show(received)
            seconds = time.monotonic() - started
            if seconds > self._timeout + received / _LOWEST_SPEED:
                raise _WrongContentError(
                    f"the server sent only {received:,} of {self._size:,} bytes in {seconds:.0f} s"
                )
        if received != self._size:
            many = "more" if received > self._size else f"{received:,} bytes"
            raise _WrongContentError(f"received {many}, expected {self._size:,}")

    def _show(self, received: int) -> None:
        if self._bar is not None:
            self._bar.show(received)


def _read_chunk(response: "Response") -> bytes:
    """Return the next bytes as soon as some arrive; an empty result is the end.

    They are not decoded: some servers declare a .gz file as compressed for the transfer. It would
    be decompressed on arrival, and its digest would be wrong.
    """
    from requests import ConnectionError as BrokenConnectionError
    from urllib3.exceptions import HTTPError

    try:
        chunk: bytes = response.raw.read1(_CHUNK_SIZE, decode_content=False)
    except HTTPError as error:
        raise BrokenConnectionError(error) from error  # pooch retries after an error of requests
    return chunk


def _check_response(response: "Response", **_: Any) -> None:
    """Refuse what a further attempt would not change; called for redirections too."""
    if response.status_code >= 400 or response.is_redirect:
        response.close()  # or requests would read a page of any length
    if 400 <= response.status_code < 500 and response.status_code not in _TEMPORARY_ERRORS:
        raise _RefusedError(_describe_status(response))
    target = response.headers.get("Location", "") if response.is_redirect else ""
    if response.url.startswith("https:") and target.lower().startswith("http:"):
        raise _RefusedError("the server redirects to an address without TLS")


def _describe_status(response: "Response") -> str:
    return f"the server answered {response.status_code} {response.reason}"


def _describe(error: Exception, remote: Remote, timeout: float) -> str:
    """Return in a few words why a transfer failed."""
    from requests import RequestException, exceptions

    if isinstance(error, _RefusedError | _WrongContentError):
        return str(error)
    if not isinstance(error, RequestException):  # pooch raises a ValueError for a wrong digest
        return f"the downloaded file does not have the digest {remote.digest}"
    if isinstance(error, exceptions.HTTPError) and error.response is not None:
        return _describe_status(error.response)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError):
            return f"the server sent nothing for {timeout:g} s"
        if isinstance(cause, OSError) and cause.strerror:
            return f"the connection failed ({cause.strerror})"
        cause = cause.__context__
    if isinstance(error, exceptions.ConnectionError | exceptions.ChunkedEncodingError):
        return "the connection was interrupted"
    return str(error).rstrip(".")


@contextmanager
def _silenced(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _progress_display() -> "Progress":
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
        console=Console(stderr=True),
    )


class _Bar:
    """The progress bar of one file; it stays visible until the last file is complete."""

    def __init__(self, display: "Progress", remote: Remote) -> None:
        self._display = display
        self._size = remote.size
        self._task = display.add_task(remote.filename, total=remote.size)

    def show(self, received: int) -> None:
        """Show the number of bytes received; a new attempt starts at 0 again."""
        self._display.update(self._task, completed=min(received, self._size))
