"""Read files within bounds, and write them atomically.

A reader sees the old content or the new content, never a partial file.
"""

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from probmask.errors import InputError

Content = bytes | Iterable[bytes | memoryview] | Callable[[BinaryIO], object]
# The system fails; another path would not help. All other errors are about the path.
_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)


def read_bounded(path: str | os.PathLike[str], *, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes.

    A pipe or a device is refused at once, since reading it might never end.

    Raises:
        InputError: The file cannot be read, is larger, or is not a regular file.
    """
    # Opening a pipe would otherwise wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InputError(f"{path}: is not a regular file.")
            size = status.st_size
            content = file.read(size + 1) if size <= most else b""
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
    if max(size, len(content)) > most:
        raise InputError(f"{path}: has {size:,} bytes, but such a file has at most {most:,}.")
    return content


def write_atomically(path: str | os.PathLike[str], data: Content, *, overwrite: bool) -> None:
    """Write `data` to `path` atomically: a crash leaves the old file or the new one.

    `data` is bytes, an iterable of chunks, or a function that writes to the open file. Symbolic
    links are followed. An error while writing (a full disk, an exception in the function) is
    raised; the old file is then untouched and no temporary file is left. An OSError names `path`.
    """
    target = writable_target(path, overwrite=overwrite)
    temporary = target.with_name(f".probmask-{secrets.token_hex(8)}.tmp")
    with naming(target, instead_of=temporary):
        created = _create(temporary, target)
        try:
            with created as file:
                _write(file, data)
                file.flush()
                os.fsync(file.fileno())
            _publish(temporary, target, overwrite)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(target.parent)


@contextmanager
def naming(path: Path, *, instead_of: Path | None = None) -> Iterator[None]:
    """Make an OSError name `path` if it names no file, or the file `instead_of`."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename in (None, instead_of, str(instead_of))
        if error.errno is None or not unnamed:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_failure(error: OSError) -> bool:
    """Return whether the system failed, as with a full disk, so that no path would be better."""
    return error.errno in _FAILURES


def writable_target(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Return the file to write, with symbolic links resolved.

    Raise `InputError` if it is a directory, if it exists and `overwrite` is False, if its
    symbolic links form a loop, or if its directory does not exist or is not writable.
    """
    path = Path(path)
    try:
        target = path.resolve()
        if target.is_dir():
            raise InputError(f"{path}: is a directory; pass the path of a file.")
        if target.exists() and not overwrite:
            raise _exists(path)
        if not stat.S_ISDIR(target.parent.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, RuntimeError) as error:  # before 3.13 a loop of links is a RuntimeError
        raise _unwritable(path, error) from error
    return target


def _create(temporary: Path, target: Path) -> BinaryIO:
    try:
        # `tempfile` would create it with mode 0600; here the user's umask decides.
        return temporary.open("xb")
    except OSError as error:
        if is_failure(error):
            raise
        raise _unwritable(target, error) from error


def _write(file: BinaryIO, data: Content) -> None:
    if callable(data):
        data(file)
    elif isinstance(data, bytes):
        file.write(data)
    else:
        file.writelines(data)


def _publish(temporary: Path, target: Path, overwrite: bool) -> None:
    """Give the finished file its final name."""
    if overwrite:
        temporary.replace(target)
        return
    try:
        # Unlike a rename, a hard link fails if another process created the file in the meantime.
        target.hardlink_to(temporary)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError:  # a file system without hard links
        if target.exists():
            raise _exists(target) from None
        temporary.replace(target)


def sync_directory(directory: Path) -> None:
    """Make the new name survive a power failure, where the system supports it."""
    if os.name == "nt":  # Windows cannot sync a directory
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync directories
            raise
    finally:
        os.close(descriptor)


def _exists(path: Path) -> InputError:
    return InputError(f"{path}: the file exists; pass overwrite=True to replace it.")


def _unwritable(path: Path, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else "the symbolic links form a loop"
    return InputError(f"{path}: cannot be written ({reason}); pass a path in a writable directory.")
