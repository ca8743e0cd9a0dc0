"""Published data sets: sizes, locations on disk, files on the web, and errors about them."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch

from probmask.data.in_memory import Images
from probmask.errors import InputError


@dataclass(frozen=True)
class Release:
    """The sizes of a published data set."""

    name: str
    classes: int
    image_shape: tuple[int, int, int]
    train_images: int
    test_images: int

    def check(self, train: Images, test: Images, *, source: Path) -> None:
        """Raise InputError if the number or the shape of the images is not the published one."""
        for images, count in ((train, self.train_images), (test, self.test_images)):
            shape = (count, *self.image_shape)
            if tuple(images.pixels.shape) != shape or len(images) != count:
                found = f"{_format_shape(images.pixels.shape)} pixels and {len(images):,} labels"
                expected = f"{_format_shape(shape)} pixels and {count:,} labels"
                raise damaged(source, f"expected {expected}, found {found}")


@dataclass(frozen=True)
class Remote:
    """A published file: its URL, its digest ("sha256:…" or "md5:…") and its size in bytes."""

    url: str
    digest: str
    size: int

    @property
    def filename(self) -> str:
        """Name of the file, the last part of the URL's path."""
        return urlsplit(self.url).path.rpartition("/")[2]


def default_directory(name: str) -> Path:
    """Return $PROBMASK_DATA/NAME, or else NAME in the user's cache (~/.cache/probmask)."""
    data = os.environ.get("PROBMASK_DATA")
    if data:
        return expand_home(data) / name
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "probmask" / name


def expand_home(path: str | Path) -> Path:
    """Replace ~ by the home directory.

    Raises:
        InputError: If the home directory is unknown.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"{path}: this home directory is unknown; pass the full path in --data-dir or "
            "$PROBMASK_DATA."
        ) from error


def is_file(path: Path) -> bool:
    """Return whether the file exists.

    Raises:
        InputError: If the system denies access.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null in the name
        return False
    except OSError as error:
        raise unreadable(path, error) from error


def check_labels(labels: torch.Tensor, classes: int, source: Path | str) -> None:
    """Raise InputError if a label is outside 0 to `classes` - 1."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        index = int(wrong.nonzero()[0])
        label = int(labels[index])
        raise damaged(source, f"the label of image {index} is {label}, not in 0 to {classes - 1}")


def damaged(source: Path | str, reason: str) -> InputError:
    """Return the error for a file with unexpected content."""
    return InputError(f"{source}: the content is damaged ({reason}); download it again.")


def unreadable(path: Path, error: OSError) -> InputError:
    """Return the error for a file that the system cannot read."""
    return InputError(f"{path}: cannot be read ({error.strerror}).")


def missing(name: str, directory: Path, expected: str) -> InputError:
    """Return the error for a data set that is not in the directory."""
    remotes = REMOTES[name]
    size = sum(remote.size for remote in remotes) / 1e6
    site = remotes[0].url.rpartition("/")[0]
    files = ", ".join(remote.filename for remote in remotes)
    found = f"contains no {expected}" if directory.exists() else "does not exist"
    return InputError(
        f"--data {name}: {directory} {found}; pass --download to download {size:.0f} MB, or get "
        f"{files} from {site}/ yourself, or pass the right directory as --data-dir."
    )


def _format_shape(shape: tuple[int, ...]) -> str:
    return "×".join(f"{size:,}" for size in shape)


_TORONTO = "https://www.cs.toronto.edu/~kriz"
# PyTorch's copy: the original server often rejects downloads.
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
# The authors' bucket. Its website, which they publish as the address, has no TLS.
_FASHION_MNIST = "https://fashion-mnist.s3.eu-central-1.amazonaws.com"

REMOTES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (
        Remote(
            f"{_TORONTO}/cifar-10-binary.tar.gz",
            "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
        ),
    ),
    "cifar100": (
        Remote(
            f"{_TORONTO}/cifar-100-binary.tar.gz",
            "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            168_513_733,
        ),
    ),
    "mnist": (
        Remote(
            f"{_MNIST}/train-images-idx3-ubyte.gz",
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            9_912_422,
        ),
        Remote(
            f"{_MNIST}/train-labels-idx1-ubyte.gz",
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            28_881,
        ),
        Remote(
            f"{_MNIST}/t10k-images-idx3-ubyte.gz",
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            1_648_877,
        ),
        Remote(
            f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            4_542,
        ),
    ),
    "fashion-mnist": (
        Remote(
            f"{_FASHION_MNIST}/train-images-idx3-ubyte.gz",
            "sha256:3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            26_421_880,
        ),
        Remote(
            f"{_FASHION_MNIST}/train-labels-idx1-ubyte.gz",
            "sha256:a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            29_515,
        ),
        Remote(
            f"{_FASHION_MNIST}/t10k-images-idx3-ubyte.gz",
            "sha256:346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            4_422_102,
        ),
        Remote(
            f"{_FASHION_MNIST}/t10k-labels-idx1-ubyte.gz",
            "sha256:67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            5_148,
        ),
    ),
}
