"""Write files so that a reader sees the old content or the new, never a part of either."""

import errno
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from probmask.errors import InputError

Content = bytes | Iterable[bytes | memoryview] | Callable[[BinaryIO], object]


def write_atomically(path: str | os.PathLike[str], data: Content, *, overwrite: bool) -> None:
    """Write `data` to `path` in one step that survives a crash.

    `data` is the bytes, an iterable of chunks, or a function that writes to the open file it is
    handed. Whatever fails on the way (a full disk, an exception of the function) is raised
    unchanged, with the old file untouched and nothing left behind. A symbolic link is followed.
    """
    target = writable_target(path, overwrite=overwrite)
    temporary = target.with_name(f".probmask-{secrets.token_hex(8)}.tmp")
    created = _create(temporary, target)
    try:
        with created as file:
            _write(file, data)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, target, overwrite)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(target.parent)


def writable_target(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Return the file that `path` stands for, or say why it cannot be written."""
    path = Path(path)
    try:
        target = path.resolve()
        if target.is_dir():
            raise InputError(f"{path}: is a directory; give the path of a file")
        if target.exists() and not overwrite:
            raise _exists(path)
    except (OSError, RuntimeError) as error:  # before 3.13 a loop of links is a RuntimeError
        raise _unwritable(path, error) from error
    return target


def _create(temporary: Path, target: Path) -> BinaryIO:
    try:
        # Unlike tempfile's 0600, the mode of any new file: the user's umask decides.
        return temporary.open("xb")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO):
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
    """Give the finished file its name."""
    if overwrite:
        temporary.replace(target)
        return
    try:
        # Unlike a rename, a link fails if another process has made the file in the meantime.
        target.hardlink_to(temporary)
    except FileExistsError as error:
        raise _exists(target) from error
    except OSError:  # a file system without hard links
        if target.exists():
            raise _exists(target) from None
        temporary.replace(target)


def _sync_directory(directory: Path) -> None:
    """Make the new name itself survive a power failure, where the system can."""
    if os.name == "nt":  # no such thing there
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems sync no directories
            raise
    finally:
        os.close(descriptor)


def _exists(path: Path) -> InputError:
    return InputError(f"{path}: the file exists; pass overwrite=True to replace it")


def _unwritable(path: Path, error: Exception) -> InputError:
    reason = error.strerror if isinstance(error, OSError) else "the symbolic links form a loop"
    return InputError(f"{path}: cannot write there ({reason}); give a path in a writable directory")
