"""The data sets, by the names they have on the command line."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from probmask.data import cifar, mnist
from probmask.data.digits import DIGITS, digits
from probmask.data.download import download
from probmask.data.locations import default_directory, expanded
from probmask.data.npz import npz
from probmask.data.photographs import IMAGENET, folder, imagenet
from probmask.data.release import Release
from probmask.data.remotes import REMOTES
from probmask.data.settings import Photographs, SmallImages
from probmask.data.source import Batch, DataSource, Shard
from probmask.data.workers import default_workers
from probmask.errors import InputError
from probmask.messages import lookup
from probmask.parsing import Source, parse_fields


@dataclass(frozen=True)
class DataSet:
    """How a data set is loaded, its settings' defaults, and what is known of it beforehand."""

    load: Callable[[Path | None, Any], DataSource]
    defaults: SmallImages | Photographs
    release: Release | None = None
    locate: Callable[[Release, Path], object] | None = None

    @property
    def summary(self) -> str:
        """What it is, in one line."""
        return (self.load.__doc__ or "").strip().split("\n")[0].rstrip(".")


# ProbMask's statistics, for both.
_CIFAR = SmallImages(padding=4, flip=True, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262))

DATA: dict[str, DataSet] = {
    "digits": DataSet(
        digits, SmallImages(padding=1, flip=False, mean=(0.3051,), std=(0.3762,)), DIGITS
    ),
    "cifar10": DataSet(cifar.cifar10, _CIFAR, cifar.CIFAR10, cifar.locate),
    "cifar100": DataSet(cifar.cifar100, _CIFAR, cifar.CIFAR100, cifar.locate),
    "mnist": DataSet(
        mnist.mnist,
        SmallImages(padding=2, flip=False, mean=(0.1307,), std=(0.3081,)),
        mnist.MNIST,
        mnist.locate,
    ),
    "fashion-mnist": DataSet(
        mnist.fashion_mnist,
        SmallImages(padding=2, flip=True, mean=(0.2860,), std=(0.3530,)),
        mnist.FASHION_MNIST,
        mnist.locate,
    ),
    "imagenet": DataSet(imagenet, Photographs(), IMAGENET),
    "folder": DataSet(folder, Photographs()),
    "npz": DataSet(npz, SmallImages(padding=0, flip=False)),
}


def load_data(
    name: str, directory: str | Path | None = None, settings: Mapping[str, Any] | None = None
) -> DataSource:
    """Load a data set by name, from a directory if it lies in one; settings as in ``[data_args]``.

    CIFAR and MNIST are looked for in the user's cache where no directory is given.
    """
    entry = _find(name)
    return entry.load(_path(directory), check_settings(name, settings or {}))


def check_settings(
    name: str,
    settings: Mapping[str, Any],
    *,
    naming: str = "--data",
    source: Source | None = None,
) -> SmallImages | Photographs:
    """The settings of a data set, with its defaults where none is given.

    In errors ``naming`` stands before the name, ``source`` says where the settings are from.
    """
    defaults = _find(name, naming).defaults
    source = source or f"{naming} {name}"
    given = parse_fields(type(defaults), settings, prefix="data_args.", source=source)
    return replace(defaults, **given)


def download_data(name: str, directory: str | Path | None = None, *, visible: bool) -> Path:
    """Fetch and verify a data set that is not there yet; return the place that it is in."""
    place = _path(directory) or default_directory(name)
    if not is_fetched(name, directory):
        download(REMOTES[name], place, visible=visible)
    return place


def is_fetched(name: str, directory: str | Path | None = None) -> bool:
    """Whether a data set that can be downloaded is there already; others are refused."""
    entry = _find(name)
    if name not in REMOTES:
        raise InputError(
            f"--download --data {name}: cannot be downloaded; those that can are "
            f"{', '.join(REMOTES)}."
        )
    assert entry.locate is not None
    assert entry.release is not None
    with suppress(InputError):  # it is not there
        entry.locate(entry.release, _path(directory) or default_directory(name))
        return True
    return False


def _find(name: str, naming: str = "--data") -> DataSet:
    if name not in DATA and (Path(name).suffix == ".npz" or _is_directory(name)):
        kind = "npz" if Path(name).suffix == ".npz" else "folder"
        raise InputError(
            f"{naming} {name}: is a path; for your own data pass --data {kind} --data-dir {name}."
        )
    return lookup("data set", naming, name, DATA)


def _is_directory(name: str) -> bool:
    with suppress(OSError):  # such as a name that is too long
        return name != "" and Path(name).is_dir()
    return False


def _path(directory: str | Path | None) -> Path | None:
    return None if directory is None else expanded(directory)


__all__ = [
    "DATA",
    "Batch",
    "DataSet",
    "DataSource",
    "Photographs",
    "Shard",
    "SmallImages",
    "check_settings",
    "default_workers",
    "download_data",
    "is_fetched",
    "load_data",
]
