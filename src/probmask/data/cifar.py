"""CIFAR-10 and CIFAR-100, from the official binary or Python release, unpacked or as tar.gz.

A binary file is a sequence of records. A record is one byte for the label (CIFAR-100: two, for the
coarse and the fine label) and 3,072 bytes of pixels, the red plane first. A Python file is a
pickled dictionary with the same content; see `pickle_reader`.
"""

import gzip
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probmask.data.in_memory import Images, InMemory
from probmask.data.pickle_reader import read_pickle
from probmask.data.releases import (
    Release,
    check_labels,
    damaged,
    default_directory,
    is_file,
    missing,
    unreadable,
)
from probmask.data.settings import SmallImages
from probmask.errors import InputError
from probmask.files import read_bounded
from probmask.messages import one_line

CIFAR10 = Release("cifar10", 10, (3, 32, 32), train_images=50_000, test_images=10_000)
CIFAR100 = Release("cifar100", 100, (3, 32, 32), train_images=50_000, test_images=10_000)
_PIXELS = 3 * 32 * 32
_MAX_FILE_SIZE = 200_000_000  # the training images of CIFAR-100 take 155 MB
_MAX_ARCHIVE_SIZE = 400_000_000  # the images of each release take 185 MB
_CHUNK_SIZE = 1 << 20
# Types of members in a tar archive: files, and members without content whatever their size says.
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_CONTENT = (
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE),
    *(tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE),
)


@dataclass(frozen=True)
class _Layout:
    """The files of one form of the release, and the folder that its archive unpacks to."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    binary: bool


_NUMBERS = range(1, 6)
_LAYOUTS = {
    "cifar10": (
        _Layout(
            "cifar-10-batches-bin",
            "cifar-10-binary.tar.gz",
            tuple(f"data_batch_{number}.bin" for number in _NUMBERS),
            ("test_batch.bin",),
            binary=True,
        ),
        _Layout(
            "cifar-10-batches-py",
            "cifar-10-python.tar.gz",
            tuple(f"data_batch_{number}" for number in _NUMBERS),
            ("test_batch",),
            binary=False,
        ),
    ),
    "cifar100": (
        _Layout(
            "cifar-100-binary",
            "cifar-100-binary.tar.gz",
            ("train.bin",),
            ("test.bin",),
            binary=True,
        ),
        _Layout("cifar-100-python", "cifar-100-python.tar.gz", ("train",), ("test",), binary=False),
    ),
}


def cifar10(directory: Path | None, settings: SmallImages) -> InMemory:
    """Small color photographs in 10 classes."""
    return _load(CIFAR10, directory, settings)


def cifar100(directory: Path | None, settings: SmallImages) -> InMemory:
    """Small color photographs in 100 classes."""
    return _load(CIFAR100, directory, settings)


def _load(release: Release, directory: Path | None, settings: SmallImages) -> InMemory:
    path = directory or default_directory(release.name)
    layout, place = locate(release, path)
    files = _read(place, layout)
    train, test = (
        _concatenate([_parse(release, layout, files[name], place / name) for name in names])
        for names in (layout.train, layout.test)
    )
    release.check(train, test, source=place)
    return InMemory(release.name, train, test, settings, classes=release.classes)


def locate(release: Release, path: Path) -> tuple[_Layout, Path]:
    """Return the form of the release found at a path, and the folder or archive with its files.

    Raises:
        InputError: If there is none.
    """
    layouts = _LAYOUTS[release.name]
    for layout in layouts:
        for folder in (path / layout.folder, path):
            if is_file(folder / layout.train[0]):
                return layout, folder
        for archive in (path / layout.archive, path):
            if archive.name == layout.archive and is_file(archive):
                return layout, archive
    if is_file(path):
        names = " or ".join(layout.archive for layout in layouts)
        raise InputError(
            f"--data-dir {path}: not an archive of {release.name}; expected a file named {names}, "
            "or a directory that contains it."
        )
    expected = " or ".join(f"{layout.folder}/{layout.train[0]}" for layout in layouts)
    raise missing(release.name, path, expected)


def _read(place: Path, layout: _Layout) -> dict[str, bytes]:
    names = (*layout.train, *layout.test)
    if place.is_dir():
        return {name: read_bounded(place / name, most=_MAX_FILE_SIZE) for name in names}
    try:
        with gzip.open(place) as opened:
            unpacked = _Unpacked(opened, place)
            files = _read_members(unpacked, layout.folder, names, place)
            unpacked.skip(_MAX_ARCHIVE_SIZE)  # up to the checksum at the end
            return files
    except InputError:
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError, zlib.error) as error:
        if isinstance(error, OSError) and error.strerror:
            raise unreadable(place, error) from error
        raise damaged(place, one_line(error)) from error


class _Unpacked:
    """The content of an archive, which may be read in order, up to a total size."""

    def __init__(self, file: gzip.GzipFile, source: Path) -> None:
        self._file, self._source = file, source
        self._left = _MAX_ARCHIVE_SIZE

    def read(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end of the archive."""
        if size > self._left:
            raise damaged(self._source, f"it unpacks to more than {_MAX_ARCHIVE_SIZE:,} bytes")
        self._left -= size
        return self._file.read(size)

    def skip(self, size: int) -> None:
        """Read and discard bytes in small parts; stop at the end of the archive."""
        while size > 0 and self.read(min(size, _CHUNK_SIZE)):
            size -= _CHUNK_SIZE


def _read_members(
    unpacked: _Unpacked, folder: str, names: Sequence[str], source: Path
) -> dict[str, bytes]:
    """Read the files in the order of the archive, in memory; nothing is written to disk.

    `tarfile` parses each header, but does not read the archive: it would load extended headers of
    any size into memory. They are skipped, because the names and sizes of the release need none.
    """
    members = {f"{folder}/{name}": name for name in names}
    files: dict[str, bytes] = {}
    while len(files) < len(names):
        header = unpacked.read(tarfile.BLOCKSIZE)
        if not header.strip(b"\0"):  # the end of the archive
            absent = next(name for name in names if name not in files)
            raise damaged(source, f"{folder}/{absent} is missing")
        member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        name = members.get(member.name.removeprefix("./"))
        size = 0 if member.type in _WITHOUT_CONTENT else member.size
        if name is not None and member.type in _REGULAR:
            files[name] = _read_member(unpacked, member, source)
        else:
            unpacked.skip(size)
        unpacked.skip(-size % tarfile.BLOCKSIZE)
    return files


def _read_member(unpacked: _Unpacked, member: tarfile.TarInfo, source: Path) -> bytes:
    if not 0 <= member.size <= _MAX_FILE_SIZE:
        raise damaged(source, f"{member.name} has a declared size of {member.size:,} bytes")
    content = unpacked.read(member.size)
    if len(content) < member.size:
        raise damaged(source, f"it ends within {member.name}")
    return content


def _parse(release: Release, layout: _Layout, data: bytes, source: Path) -> Images:
    images = (_from_binary if layout.binary else _from_python)(release, data, source)
    check_labels(images.labels, release.classes, source)
    return images


def _from_binary(release: Release, data: bytes, source: Path) -> Images:
    label_bytes = 2 if release is CIFAR100 else 1
    record = label_bytes + _PIXELS
    if not data or len(data) % record:
        raise damaged(
            source, f"its {len(data):,} bytes are not a multiple of the record size {record}"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return _to_images(rows[:, label_bytes:], rows[:, label_bytes - 1])


def _from_python(release: Release, data: bytes, source: Path) -> Images:
    content = read_pickle(data, source=str(source))
    kind = "fine_labels" if release is CIFAR100 else "labels"
    pixels, labels = _entry(content, "data"), _entry(content, kind)
    fits = (
        isinstance(pixels, np.ndarray)
        and pixels.dtype == np.uint8
        and pixels.ndim == 2
        and pixels.shape[1] == _PIXELS
        and isinstance(labels, list)
        and all(type(label) is int and abs(label) < 2**31 for label in labels)
        and len(labels) == len(pixels)
    )
    if not fits:
        raise damaged(source, f"it does not contain images under 'data' and labels under '{kind}'")
    return _to_images(pixels, np.array(labels))


def _entry(content: Any, key: str) -> Any:
    """Look up a key, which is bytes if Python 2 wrote the file and str if Python 3 did."""
    if not isinstance(content, Mapping):
        return None
    return content.get(key.encode(), content.get(key))


def _to_images(pixels: "np.ndarray[Any, Any]", labels: "np.ndarray[Any, Any]") -> Images:
    return Images(
        torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()),
        torch.from_numpy(labels.astype(np.int64)),
    )


def _concatenate(parts: Sequence[Images]) -> Images:
    return Images(
        torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts])
    )
