"""Data sets of image files, which worker processes read, crop and scale when they are needed."""

import hashlib
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from probmask.core.noise import RunStream, fold
from probmask.data.image_folder import Files, list_folder
from probmask.data.image_views import (
    MAX_FAILURES_IN_A_ROW,
    CentralViews,
    Failure,
    Loaded,
    RandomViews,
    Views,
    collate,
)
from probmask.data.releases import Release
from probmask.data.settings import Photographs
from probmask.data.source import WHOLE, Batch, DataSource, Normalization, Shard
from probmask.data.splits import (
    evenly_spaced,
    limited_count,
    select_test,
    select_unused_validation,
    select_validation,
)
from probmask.errors import InputError, UnreadableImageWarning
from probmask.launch import available_cores
from probmask.messages import one_line

IMAGENET = Release("imagenet", 1000, (3, 224, 224), train_images=1_281_167, test_images=50_000)
_CHECK_BATCH_SIZE = 64
_SIZES_IN_FINGERPRINT = 50_000
_CONTENTS_IN_FINGERPRINT = 500
_BYTES_IN_FINGERPRINT = 1 << 18
# More processes than this read faster than any GPU trains, and a container may report all cores
# of a large host.
_MAX_WORKERS = 16


def default_workers(*, devices: int = 1) -> int:
    """Return the default number of worker processes that read image files.

    Args:
        devices: Number of training devices on this machine, which share its cores.

    Returns:
        The number of cores per device that this process may use, from 1 to 16.

    Example:
        >>> 1 <= default_workers() <= 16
        True
    """
    return min(max(1, available_cores() // devices), _MAX_WORKERS)


def imagenet(directory: Path | None, settings: Photographs) -> "ImageFiles":
    """ImageNet or a subset: one folder per class in DIR/train and in DIR/val."""
    # ImageNet's own test/ has no labels and no class folders, so it is not listed.
    found = list_folder("--data-dir", _required("imagenet", directory), parts=("val",))
    if "val" not in found.parts:
        raise InputError(
            f"--data-dir {directory}: does not contain both train/ and val/; download ImageNet "
            "from image-net.org (after registration) and unpack it to one folder per class in each."
        )
    parts = {"train": found.parts["train"], "test": found.parts["val"]}
    return ImageFiles("imagenet", parts, settings, class_names=found.class_names)


def folder(directory: Path | None, settings: Photographs) -> "ImageFiles":
    """Your own image files: one folder per class in DIR."""
    found = list_folder("--data-dir", _required("folder", directory))
    parts = dict(found.parts)
    if "test" not in parts and "val" in parts:
        parts["test"] = parts.pop("val")
    if "test" not in parts:
        selected = select_test("folder", parts["train"].labels)
        parts["train"], parts["test"] = parts["train"][~selected], parts["train"][selected]
    return ImageFiles("folder", parts, settings, class_names=found.class_names)


def _required(name: str, directory: Path | None) -> Path:
    if directory is None:
        raise InputError(f"--data {name}: needs the directory of the images; pass --data-dir DIR.")
    return directory


@final
class ImageFiles(DataSource):
    """A data set of image files.

    Args:
        name: Name of the data set.
        parts: The files of "train", "test" and, optionally, "val". Without "val", validation
            images are taken from the training images by `with_validation`.
        settings: Image size, normalization, and numbers of images.
        class_names: Names of the classes.
    """

    settings: Photographs

    def __init__(
        self,
        name: str,
        parts: dict[str, Files],
        settings: Photographs,
        *,
        class_names: tuple[str, ...],
    ) -> None:
        self.name, self.classes, self.class_names = name, len(class_names), class_names
        self.image_shape = (3, settings.image_size, settings.image_size)
        self.settings = settings
        self._normalize = Normalization(settings.mean, settings.std, scale=255.0)
        self._unused_validation = _unused_validation(name, parts, settings)
        train = _limited(name, "train_images", settings.train_images, parts["train"])
        test = _limited(name, "test_images", settings.test_images, parts["test"])
        self._device = torch.device("cpu")
        self._workers = 0
        self._unreadable: dict[str, str] = {}
        empty = train[torch.tensor([], dtype=torch.long)]
        self._set_parts({"train": train, "val": empty, "test": test})

    def _set_parts(self, parts: dict[str, Files]) -> None:
        self._parts = parts
        self.train_size, self.val_size, self.test_size = map(len, parts.values())

    def _with_parts(self, parts: dict[str, Files]) -> Self:
        other = copy(self)
        other._set_parts(parts)
        return other

    @property
    def train_labels(self) -> Tensor:
        """Labels of the training images."""
        return self._parts["train"].labels

    def with_validation(self) -> Self:
        """Return a copy with the given validation images, or with some of the training images."""
        train = self._parts["train"]
        if self._unused_validation is not None:
            return self._with_parts({**self._parts, "val": self._unused_validation})
        held_out = select_validation(self.name, train.labels, self.settings.validation_images)
        parts = {**self._parts, "train": train[~held_out], "val": train[held_out]}
        return self._with_parts(parts)

    def to(self, device: torch.device, *, workers: int = 0) -> Self:
        """Return a copy whose batches are on the device and made by worker processes."""
        other = copy(self)
        other._device, other._workers = device, workers
        return other

    @property
    def unreadable(self) -> dict[str, str]:
        """Files that were skipped so far because they cannot be read, with the reasons."""
        return dict(self._unreadable)

    def recall_unreadable(self, files: Mapping[str, str]) -> None:
        """Restore `unreadable` when a run is resumed."""
        self._unreadable.update(files)

    def fingerprint(self) -> str:
        """Return a digest of all file names and labels, and of a sample of sizes and contents.

        The sample is evenly spaced. In each part, it has the sizes of at most 50,000 files, and the
        first and last 256 KiB of at most 500. The digest does not depend on the directory's place.
        """
        digest = self._digest_of_names()
        for part in self._parts.values():
            for index in _sample(part, _SIZES_IN_FINGERPRINT):
                digest.update(b"%d " % part.size(index))
            for index in _sample(part, _CONTENTS_IN_FINGERPRINT):
                digest.update(part.content(index, _BYTES_IN_FINGERPRINT))
        return f"2:{digest.hexdigest()}"  # the version, and the digest

    def matches(self, fingerprint: str) -> bool:
        """Return whether a fingerprint is that of these files; the first version had names only."""
        first_version = self._digest_of_names().hexdigest()
        return fingerprint == first_version or fingerprint == self.fingerprint()

    def _digest_of_names(self) -> "hashlib.blake2b":
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts.values():
            digest.update(part.names.tobytes())
            digest.update(part.labels.numpy().data)
        return digest

    def check(self, *, progress: bool) -> None:
        """Read every file once if the settings refuse unreadable files.

        Raises:
            InputError: If a file cannot be read; the message names the first ten.
        """
        if self.settings.unreadable != "refuse":
            return
        failures: list[Failure] = []
        total = self.train_size + self.val_size + self.test_size
        with _progress_bar(f"checking {self.name}", total, visible=progress) as advance:
            for part in self._parts:
                for loaded in self._load(*self._central_views(part, _CHECK_BATCH_SIZE)):
                    failures += loaded.failures
                    advance(len(loaded.labels) + len(loaded.failures))
        if failures:
            listed = "; ".join(f"{failure.path} ({failure.reason})" for failure in failures[:10])
            more = f" and {len(failures) - 10} more" if len(failures) > 10 else ""
            raise InputError(
                f"--data {self.name}: cannot read {listed}{more}; replace or remove the damaged "
                "files, or pass --set data_args.unreadable=skip."
            )

    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Generator[Batch, None, None]:
        """Yield the training batches of an epoch, shuffled, cropped and mirrored at random."""
        size = self.settings.image_size
        views = RandomViews(self._parts["train"], size, fold(seed, RunStream.AUGMENTATION, epoch))
        slices = self._slices(epoch, batch_size=batch_size, seed=seed, start=start, shard=shard)
        keys = (list(enumerate(indices.tolist(), start=begin)) for _, begin, indices in slices)
        return self._batches(views, keys, complete=True)

    def validation(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all validation images once, in order."""
        return self._batches(*self._central_views("val", batch_size))

    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """Return all test images once, in order."""
        return self._batches(*self._central_views("test", batch_size))

    def _central_views(self, part: str, batch_size: int) -> tuple[CentralViews, Iterator[Any]]:
        files = self._parts[part]
        keys = (
            list(range(begin, min(begin + batch_size, len(files))))
            for begin in range(0, len(files), batch_size)
        )
        return CentralViews(files, self.settings.image_size), keys

    def _batches(
        self, views: Views, keys: Iterator[Any], *, complete: bool = False
    ) -> Generator[Batch, None, None]:
        """Yield normalized batches; with `complete`, raise OSError if a view is missing."""
        failures_in_a_row = 0
        for loaded in self._load(views, keys):
            for failure in loaded.failures:
                self._report(failure)
            failures_in_a_row = (
                0 if len(loaded.labels) else failures_in_a_row + len(loaded.failures)
            )
            if (complete and loaded.missing) or failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise OSError(
                    f"--data {self.name}: {len(loaded.failures)} files cannot be read, the last "
                    f"one is {loaded.failures[-1].path}; check that the disk is available."
                )
            if len(loaded.labels):
                pixels = loaded.pixels.to(self._device, non_blocking=True)
                labels = loaded.labels.to(self._device, non_blocking=True)
                yield Batch(self._normalize(pixels), labels)

    def _load(self, views: Views, keys: Iterator[Any]) -> Iterator[Loaded]:
        loader = DataLoader(
            views,
            batch_sampler=keys,
            num_workers=self._workers,
            collate_fn=collate,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # or it would advance the global generator
        )
        try:
            with _preserved_sigchld_handler():
                batches = iter(loader)
            yield from batches
        except (RuntimeError, OSError, EOFError) as error:
            if isinstance(error, RuntimeError) and not _is_about_workers(error):
                raise
            reason = one_line(error) or type(error).__name__
            raise OSError(
                f"a worker process that reads images ended ({reason}); if memory is short, pass "
                "--set workers=N with a smaller N. Continue the run with --resume."
            ) from error

    def _report(self, failure: Failure) -> None:
        """Warn once per unreadable file; raise OSError if it must not be skipped."""
        if failure.is_system_error:
            raise OSError(
                f"{failure.path}: cannot be read ({failure.reason}); solve this problem, then "
                "continue with --resume."
            )
        if self.settings.unreadable == "refuse":  # it was readable when it was checked
            raise OSError(
                f"{failure.path}: can no longer be read ({failure.reason}); restore the file, "
                "then continue with --resume."
            )
        if failure.path not in self._unreadable:
            self._unreadable[failure.path] = failure.reason
            warnings.warn(
                f"{failure.path}: skipped, because it cannot be read ({failure.reason})",
                UnreadableImageWarning,
                stacklevel=2,
            )


def _is_about_workers(error: RuntimeError) -> bool:
    """Return whether the error means that a worker process ended."""
    return "worker" in str(error) and not str(error).startswith("Caught")


@contextmanager
def _preserved_sigchld_handler() -> Iterator[None]:
    """Undo PyTorch's change of the SIGCHLD handler when it starts workers.

    PyTorch's handler raises the end of a worker wherever the main process is, for example in the
    middle of an optimizer step. Without it, the end is detected when the next batch is due.
    """
    if os.name == "nt" or threading.current_thread() is not threading.main_thread():
        yield  # PyTorch does not change the handler here
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


@contextmanager
def _progress_bar(title: str, total: int, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; the yielded function advances it."""
    if not visible:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def _unused_validation(name: str, parts: dict[str, Files], settings: Photographs) -> Files | None:
    """Return validation images that are not used for training, if the data or settings have any."""
    count = settings.validation_images
    if "val" in parts:
        return _limited(name, "validation_images", count, parts["val"])
    if count is None or settings.train_images is None:
        return None
    train = parts["train"]
    train_count = limited_count(name, "train_images", settings.train_images, len(train))
    used = torch.zeros(len(train), dtype=torch.bool)
    used[evenly_spaced(len(train), train_count)] = True
    return train[select_unused_validation(name, train.labels, used, count)]


def _sample(files: Files, count: int) -> list[int]:
    indices: list[int] = evenly_spaced(len(files), min(len(files), count)).tolist()
    return indices


def _limited(name: str, setting: str, limit: int | None, files: Files) -> Files:
    count = limited_count(name, setting, limit, len(files))
    return files if count == len(files) else files[evenly_spaced(len(files), count)]
