"""The table of data sets, and functions that load, check, download and describe them by name."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from probmask.data import cifar, mnist_and_digits
from probmask.data.download import download
from probmask.data.image_files import IMAGENET, folder, imagenet
from probmask.data.npz import npz
from probmask.data.releases import REMOTES, Release, default_directory, expand_home
from probmask.data.settings import Photographs, Sentences, Settings, SmallImages
from probmask.data.source import DataSource
from probmask.data.splits import validation_count
from probmask.data.tokenizer import absolute_tokenizer
from probmask.data.tsv import tsv
from probmask.errors import InputError
from probmask.messages import NamedTable, lookup
from probmask.parsing import Source, parse_fields


@dataclass(frozen=True)
class DataSet:
    """A data set of the table.

    Attributes:
        load: Function that loads the data set from a directory, with settings.
        defaults: Default settings.
        release: Published sizes; None for data of the user.
        locate: Function that raises InputError if the files are not in a directory; None if the
            data set cannot be downloaded.
    """

    load: Callable[[Path | None, Any], DataSource]
    defaults: Settings
    release: Release | None = None
    locate: Callable[[Release, Path], object] | None = None

    @property
    def summary(self) -> str:
        """Description in one line, from the docstring of `load`."""
        return (self.load.__doc__ or "").strip().split("\n")[0].rstrip(".")


# The statistics of the ProbMask paper, for CIFAR-10 and for CIFAR-100.
_CIFAR = SmallImages(padding=4, flip=True, mean=(0.491, 0.482, 0.447), std=(0.247, 0.243, 0.262))

DATA = NamedTable(
    "data set",
    {
        "digits": DataSet(
            mnist_and_digits.digits,
            SmallImages(padding=1, flip=False, mean=(0.3051,), std=(0.3762,)),
            mnist_and_digits.DIGITS,
        ),
        "cifar10": DataSet(cifar.cifar10, _CIFAR, cifar.CIFAR10, cifar.locate),
        "cifar100": DataSet(cifar.cifar100, _CIFAR, cifar.CIFAR100, cifar.locate),
        "mnist": DataSet(
            mnist_and_digits.mnist,
            SmallImages(padding=2, flip=False, mean=(0.1307,), std=(0.3081,)),
            mnist_and_digits.MNIST,
            mnist_and_digits.locate,
        ),
        "fashion-mnist": DataSet(
            mnist_and_digits.fashion_mnist,
            SmallImages(padding=2, flip=True, mean=(0.2860,), std=(0.3530,)),
            mnist_and_digits.FASHION_MNIST,
            mnist_and_digits.locate,
        ),
        "imagenet": DataSet(imagenet, Photographs(), IMAGENET),
        "folder": DataSet(folder, Photographs()),
        "npz": DataSet(npz, SmallImages(padding=0, flip=False)),
        "tsv": DataSet(tsv, Sentences()),
    },
)


def load_data(
    name: str, directory: str | Path | None = None, settings: Mapping[str, Any] | None = None
) -> DataSource:
    """Load a data set by name.

    Args:
        name: Name in `DATA`.
        directory: Directory of the files (``npz``: the file). Without it, CIFAR and MNIST are
            read from ``$PROBMASK_DATA`` or from the user's cache.
        settings: Settings that replace the defaults, as in the table ``[data_args]`` of a
            configuration file; see `SmallImages`, `Photographs` and `Sentences`.

    Returns:
        The data set, with its batches on the CPU.

    Raises:
        InputError: If the name or a setting is unknown, or the files are missing or damaged.

    Example:
        >>> data = load_data("digits", settings={"train_images": 1000})
        >>> data.train_size, data.test_size, data.image_shape
        (1000, 355, (1, 8, 8))
        >>> batch = next(data.training(0, batch_size=64, seed=0))
        >>> batch.inputs.shape
        torch.Size([64, 1, 8, 8])
    """
    entry = _find(name)
    return entry.load(_to_path(directory), check_settings(name, settings or {}))


def check_settings(
    name: str,
    settings: Mapping[str, Any],
    *,
    naming: str = "--data",
    source: Source | None = None,
) -> Settings:
    """Check the settings of a data set without loading it.

    Args:
        name: Name in `DATA`.
        settings: Settings that replace the defaults.
        naming: What precedes the name in error messages.
        source: Where the settings come from, for error messages.

    Returns:
        All settings, with the defaults of the data set.

    Raises:
        InputError: If the data set or a setting is unknown, or a value is invalid.

    Example:
        >>> settings = check_settings("cifar10", {"padding": 2})
        >>> settings.padding, settings.flip
        (2, True)
    """
    defaults = _find(name, naming).defaults
    source = source or f"{naming} {name}"
    given = parse_fields(type(defaults), settings, prefix="data_args.", source=source)
    return replace(defaults, **given)


def with_absolute_paths(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a data set with absolute paths, valid in any working directory.

    Args:
        name: Name in `DATA`, or any other name.
        settings: Settings that replace the defaults.

    Returns:
        The settings. A tokenizer that is an existing file or directory has its absolute path.

    Example:
        >>> with_absolute_paths("tsv", {"tokenizer": "words"})
        {'tokenizer': 'words'}
    """
    tokenizer = settings.get("tokenizer")
    if name != "tsv" or not isinstance(tokenizer, str):
        return dict(settings)
    return {**settings, "tokenizer": absolute_tokenizer(tokenizer)}


def download_data(
    name: str, directory: str | Path | None = None, *, progress: bool = False
) -> Path:
    """Download a data set and verify it, unless it is already there.

    Args:
        name: Name in `DATA`.
        directory: Directory for the files; the default is the one where `load_data` looks.
        progress: Whether to show a progress bar.

    Returns:
        The directory.

    Raises:
        InputError: If the data set cannot be downloaded, or the directory is not writable.
        DownloadError: If the download fails.

    Example:
        >>> download_data("digits")
        Traceback (most recent call last):
        ...
        probmask.errors.InputError: --download --data digits: cannot be downloaded; choose from \
cifar10, cifar100, mnist, fashion-mnist.
    """
    place = _to_path(directory) or default_directory(name)
    if not is_downloaded(name, directory):
        download(REMOTES[name], place, progress=progress)
    return place


def is_downloaded(name: str, directory: str | Path | None = None) -> bool:
    """Return whether the files of a downloadable data set are there.

    Args:
        name: Name in `DATA`.
        directory: Directory of the files; the default is the one where `load_data` looks.

    Returns:
        Whether all files exist. Their content is not checked.

    Raises:
        InputError: If the data set is unknown or cannot be downloaded.

    Example:
        >>> is_downloaded("mnist", "/no/such/directory")
        False
    """
    entry = _find(name)
    if name not in REMOTES:
        raise InputError(
            f"--download --data {name}: cannot be downloaded; choose from {', '.join(REMOTES)}."
        )
    assert entry.locate is not None
    assert entry.release is not None
    with suppress(InputError):  # raised if a file is missing
        entry.locate(entry.release, _to_path(directory) or default_directory(name))
        return True
    return False


def describe_data() -> list[dict[str, Any]]:
    """Describe each data set.

    Returns:
        One dictionary per data set. Values that depend on files of the user are None. ``train``
        counts all training images; ``validation`` of them are held out by default.

    Example:
        >>> row = describe_data()[0]
        >>> row["name"], row["train"], row["validation"], row["test"]
        ('digits', 1442, 144, 355)
    """
    return [_describe(name, entry) for name, entry in DATA.items()]


def _describe(name: str, entry: DataSet) -> dict[str, Any]:
    release = entry.release
    remotes = REMOTES.get(name, ())
    return {
        "name": name,
        "summary": entry.summary,
        "image_shape": list(release.image_shape) if release else None,
        "classes": release.classes if release else None,
        "train": release.train_images if release else None,
        "validation": validation_count(release.train_images) if release else None,
        "test": release.test_images if release else None,
        "download_bytes": sum(remote.size for remote in remotes) or None,
    }


def _find(name: str, naming: str = "--data") -> DataSet:
    suffix = Path(name).suffix
    if name not in DATA and (suffix in (".npz", ".tsv") or _is_directory(name)):
        kind = suffix[1:] if suffix in (".npz", ".tsv") else "folder"
        raise InputError(
            f"{naming} {name}: is a path; for your own data pass --data {kind} --data-dir {name}."
        )
    return lookup("data set", naming, name, DATA)


def _is_directory(name: str) -> bool:
    with suppress(OSError):  # for example, if the name is too long
        return name != "" and Path(name).is_dir()
    return False


def _to_path(directory: str | Path | None) -> Path | None:
    return None if directory is None else expand_home(directory)
