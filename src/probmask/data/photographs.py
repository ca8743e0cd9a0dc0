"""Images that are read, cropped and scaled by worker processes whenever they are needed."""

import hashlib
import os
import signal
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from probmask.core.noise import fold
from probmask.data.augmentation import Normalisation
from probmask.data.bars import counting
from probmask.data.folder import Files, list_folder
from probmask.data.release import Release
from probmask.data.settings import Photographs
from probmask.data.source import AUGMENTATION, WHOLE, Batch, DataSource, Shard
from probmask.data.splits import beside_training, evenly, for_testing, for_validation, limited
from probmask.data.views import (
    MOST_IN_A_ROW,
    CentralViews,
    Failure,
    Loaded,
    RandomViews,
    Views,
    collate,
)
from probmask.errors import InputError, UnreadableImageWarning

IMAGENET = Release("imagenet", 1000, (3, 224, 224), train_images=1_281_167, test_images=50_000)
_CHECKED_AT_ONCE = 64


def imagenet(directory: Path | None, settings: Photographs) -> "ImageFiles":
    """ImageNet or an excerpt: folders of classes in DIR/train and DIR/val."""
    # Its own test/ has no labels, and no folders.
    found = list_folder("--data-dir", _given("imagenet", directory), parts=("val",))
    if "val" not in found.parts:
        raise InputError(
            f"--data-dir {directory}: has no train/ and val/ in it; ImageNet (image-net.org, after "
            "registration) is unpacked to one folder for each class in both."
        )
    parts = {"train": found.parts["train"], "test": found.parts["val"]}
    return ImageFiles("imagenet", parts, settings, class_names=found.class_names)


def folder(directory: Path | None, settings: Photographs) -> "ImageFiles":
    """Your own image files: folders of classes in DIR."""
    found = list_folder("--data-dir", _given("folder", directory))
    parts = dict(found.parts)
    if "test" not in parts and "val" in parts:
        parts["test"] = parts.pop("val")
    if "test" not in parts:
        held = for_testing("folder", parts["train"].labels)
        parts["train"], parts["test"] = parts["train"][~held], parts["train"][held]
    return ImageFiles("folder", parts, settings, class_names=found.class_names)


def _given(name: str, directory: Path | None) -> Path:
    if directory is None:
        raise InputError(f"--data {name}: where is it? Pass --data-dir DIR.")
    return directory


class ImageFiles(DataSource):
    """A data set of image files.

    ``parts`` has "train" and "test", and "val" if validation images are given; otherwise they are
    taken from the training images when they are asked for.
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
        self._normalised = Normalisation(settings.mean, settings.std, scale=255.0)
        train, test = parts["train"], parts["test"]
        self._beside = _beside(name, parts, settings)
        train = _spread(train, limited(name, "train_images", settings.train_images, len(train)))
        test = _spread(test, limited(name, "test_images", settings.test_images, len(test)))
        self._parts = {
            "train": train,
            "val": train[torch.tensor([], dtype=torch.long)],
            "test": test,
        }
        self._device = torch.device("cpu")
        self._workers = 0
        self._unreadable: dict[str, str] = {}
        self._count()

    def _count(self) -> None:
        self.train_size, self.val_size, self.test_size = map(len, self._parts.values())

    def _replaced(self, **attributes: Any) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update({**self.__dict__, **attributes})
        other._count()
        return other

    @property
    def train_labels(self) -> Tensor:
        """The classes of the training images."""
        return self._parts["train"].labels

    def with_validation(self) -> Self:
        """The same data with its own validation images, or with some of the training images."""
        train = self._parts["train"]
        if self._beside is not None:
            return self._replaced(_parts={**self._parts, "val": self._beside})
        held = for_validation(self.name, train.labels, self.settings.validation_images)
        return self._replaced(_parts={**self._parts, "train": train[~held], "val": train[held]})

    def to(self, device: torch.device, *, workers: int = 0) -> Self:
        """The same data, whose batches come on the device, made by so many processes."""
        return self._replaced(_device=device, _workers=workers)

    @property
    def unreadable(self) -> dict[str, str]:
        """The files that had to be left out so far, each with the reason."""
        return dict(self._unreadable)

    def recall_unreadable(self, files: Mapping[str, str]) -> None:
        """Take over what was found unreadable before the run was interrupted."""
        self._unreadable.update(files)

    def fingerprint(self) -> str:
        """A digest of the names of all files, and of their labels."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self._parts.values():
            digest.update(part.names.tobytes())
            digest.update(part.labels.numpy().data)
        return digest.hexdigest()

    def check(self, *, visible: bool) -> None:
        """Read every file once if unreadable ones are to be refused."""
        if self.settings.unreadable != "refuse":
            return
        failures: list[Failure] = []
        total = self.train_size + self.val_size + self.test_size
        with counting(f"checking {self.name}", total, visible=visible) as advance:
            for part in self._parts:
                for loaded in self._load(*self._central_views(part, _CHECKED_AT_ONCE)):
                    failures += loaded.failures
                    advance(len(loaded.labels) + len(loaded.failures))
        if failures:
            named = "; ".join(f"{failure.path} ({failure.reason})" for failure in failures[:10])
            more = f" and {len(failures) - 10} more" if len(failures) > 10 else ""
            raise InputError(
                f"--data {self.name}: cannot read {named}{more}; replace or remove what is "
                "damaged, or pass --set data_args.unreadable=skip."
            )

    def training(
        self, epoch: int, *, batch_size: int, seed: int, start: int = 0, shard: Shard = WHOLE
    ) -> Generator[Batch, None, None]:
        """The training batches of an epoch, shuffled, cropped and mirrored at random."""
        size = self.settings.image_size
        views = RandomViews(self._parts["train"], size, fold(seed, AUGMENTATION, epoch))
        places = self._places(epoch, batch_size=batch_size, seed=seed, start=start, shard=shard)
        keys = (list(enumerate(chosen.tolist(), start=begin)) for _, begin, chosen in places)
        return self._batches(views, keys, whole=True)

    def validation(self, *, batch_size: int) -> Iterator[Batch]:
        """All validation images once, in order."""
        return self._batches(*self._central_views("val", batch_size))

    def testing(self, *, batch_size: int) -> Iterator[Batch]:
        """All test images once, in order."""
        return self._batches(*self._central_views("test", batch_size))

    def _central_views(self, part: str, batch_size: int) -> tuple[CentralViews, Iterator[Any]]:
        files = self._parts[part]
        keys = (
            list(range(begin, min(begin + batch_size, len(files))))
            for begin in range(0, len(files), batch_size)
        )
        return CentralViews(files, self.settings.image_size), keys

    def _batches(
        self, views: Views, keys: Iterator[Any], *, whole: bool = False
    ) -> Generator[Batch, None, None]:
        in_a_row = 0
        for loaded in self._load(views, keys):
            for failure in loaded.failures:
                self._report(failure)
            in_a_row = 0 if len(loaded.labels) else in_a_row + len(loaded.failures)
            if (whole and loaded.missing) or in_a_row >= MOST_IN_A_ROW:
                raise OSError(
                    f"--data {self.name}: {len(loaded.failures)} files cannot be read, the last of "
                    f"them {loaded.failures[-1].path}; is the disk still there?"
                )
            if len(loaded.labels):
                pixels = loaded.pixels.to(self._device, non_blocking=True)
                labels = loaded.labels.to(self._device, non_blocking=True)
                yield Batch(self._normalised(pixels), labels)

    def _load(self, views: Views, keys: Iterator[Any]) -> Iterator[Loaded]:
        loader = DataLoader(
            views,
            batch_sampler=keys,
            num_workers=self._workers,
            collate_fn=collate,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # or it takes a number from the global one
        )
        try:
            with _same_signals():
                batches = iter(loader)
            yield from batches
        except (RuntimeError, OSError, EOFError) as error:
            if isinstance(error, RuntimeError) and not _is_about_workers(error):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise OSError(
                f"a process that reads images ended ({reason}); is there memory for fewer of them? "
                "Pass --set workers=N, and --resume to go on."
            ) from error

    def _report(self, failure: Failure) -> None:
        """Warn of a file once; give up if the system fails, or if the file had been checked."""
        if failure.is_of_the_system:
            raise OSError(
                f"{failure.path}: cannot be read ({failure.reason}); mend that and pass --resume "
                "to go on."
            )
        if self.settings.unreadable == "refuse":
            raise OSError(
                f"{failure.path}: cannot be read any more ({failure.reason}); bring it back and "
                "pass --resume to go on."
            )
        if failure.path not in self._unreadable:
            self._unreadable[failure.path] = failure.reason
            warnings.warn(
                f"{failure.path}: is left out, as it cannot be read ({failure.reason})",
                UnreadableImageWarning,
                stacklevel=2,
            )


def _is_about_workers(error: RuntimeError) -> bool:
    """Whether a worker has ended, and not raised the error itself."""
    return "worker" in str(error) and not str(error).startswith("Caught")


@contextmanager
def _same_signals() -> Iterator[None]:
    """Undo what PyTorch does to SIGCHLD when it starts workers.

    Its handler raises the end of a worker wherever this process happens to be, in the middle of an
    update too. Without it the end is found out when a batch is waited for.
    """
    if os.name == "nt" or threading.current_thread() is not threading.main_thread():
        yield  # PyTorch does nothing to it there
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _beside(name: str, parts: dict[str, Files], settings: Photographs) -> Files | None:
    """The validation images that are none of those trained on, if there are such."""
    asked = settings.validation_images
    if "val" in parts:
        given = parts["val"]
        return _spread(given, limited(name, "validation_images", asked, len(given)))
    if asked is None or settings.train_images is None:
        return None
    train = parts["train"]
    count = limited(name, "train_images", settings.train_images, len(train))
    trained = torch.zeros(len(train), dtype=torch.bool)
    trained[evenly(len(train), count)] = True
    return train[beside_training(name, train.labels, trained, asked)]


def _spread(files: Files, count: int) -> Files:
    return files if count == len(files) else files[evenly(len(files), count)]
