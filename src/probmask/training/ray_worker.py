"""One rank of a training on a Ray cluster: the actor that trains on a node.

The actor gets the environment variables that torchrun would set, and calls `train` as any other
rank does. The directory of the run on the node is a copy. `news` returns what has changed in it
since the last call; it is called in another thread while `train` runs.
"""

import importlib
import os
import queue
import shutil
import socket
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from probmask.errors import (
    DownloadError,
    InputError,
    NonFiniteError,
    RankLostError,
    RankMismatchError,
)
from probmask.files import write_atomically
from probmask.messages import one_line
from probmask.training.config import TrainConfig
from probmask.training.progress import Status
from probmask.training.run_directory import is_temporary
from probmask.training.trainer import train_rank

# Content of files by their path in the directory of the run.
Files = dict[str, bytes]

# Errors whose message is enough for the user.
_MESSAGES = (
    InputError,
    NonFiniteError,
    DownloadError,
    RankLostError,
    RankMismatchError,
    OSError,
)


@dataclass(frozen=True)
class Place:
    """The node of a worker, its address, the GPUs of the worker, and where its files are."""

    node: str
    address: str
    gpus: tuple[str, ...]
    directory: str


@dataclass(frozen=True)
class Begin:
    """The run or its dense twin begins: the arguments of a reporter."""

    title: str
    total_steps: int


@dataclass(frozen=True)
class End:
    """The run or its dense twin ends."""


@dataclass(frozen=True)
class Notice:
    """A warning, to be repeated where the command was typed."""

    text: str
    category: type[Warning]


Event = Begin | Status | End | Notice


@dataclass(frozen=True)
class News:
    """What has happened on a worker since the last question, and the files that have changed."""

    events: Sequence[Event]
    files: Files


@dataclass(frozen=True)
class Failure:
    """Why a worker ended, as the class and the message of an error.

    ``where`` is the line that raised it, or empty if the message says all that a user needs.
    """

    kind: type[Exception]
    text: str
    where: str


class RayWorker:
    """Train as one rank. Its methods are called remotely, and `news` also while `train` runs."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._directory: Path | None = None
        self._seen: dict[str, tuple[int, int]] = {}

    def place(self, name: str) -> Place:
        """Return where this worker runs, and the directory on its node for the run ``name``."""
        ray: Any = importlib.import_module("ray")  # an optional dependency

        return Place(
            ray.get_runtime_context().get_node_id(),
            ray.util.get_node_ip_address(),
            tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            str(Path.home() / ".cache" / "probmask" / "ray" / name),
        )

    def free_port(self) -> int:
        """Return a port that is free on this node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def receive(self, directory: str, files: Files) -> None:
        """Write the files of the run to ``directory``, in place of what is there."""
        self._directory = Path(directory)
        shutil.rmtree(self._directory, ignore_errors=True)
        for name, content in files.items():
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, overwrite=True)
        self._seen = dict(file_stamps(self._directory))

    def train(
        self,
        config: TrainConfig,
        directory: str,
        variables: Mapping[str, str],
        *,
        resume: bool,
        working_directory: str,
    ) -> Failure | None:
        """Train as the rank that ``variables`` describe; return why it failed, or None."""
        os.environ.update(variables)
        if Path(working_directory).is_dir():
            os.chdir(working_directory)  # the user's own network may be there
        warnings.showwarning = self._show_warning
        ended: queue.SimpleQueue[Failure | None] = queue.SimpleQueue()

        def train_to_the_end() -> None:
            try:
                train_rank(
                    config,
                    out=directory,
                    resume=resume,
                    make_reporter=self._make_reporter,
                    end=lambda message: ended.put(Failure(RankLostError, message, "")),
                    is_copied=True,
                )
            except Exception as error:
                ended.put(_failure(error))
            else:
                ended.put(None)

        # If another rank does not respond, that thread waits for it. This worker must answer.
        threading.Thread(target=train_to_the_end, daemon=True).start()
        return ended.get()

    def news(self) -> News:
        """Return the events and the changed files since the last call."""
        events: list[Event] = []
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Status) and events and isinstance(events[-1], Status):
                    events.pop()  # nobody has seen it
                events.append(event)
        return News(events, dict(self._changed_files()))

    def clean(self) -> None:
        """Delete the copy of the run on this node."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _changed_files(self) -> Iterator[tuple[str, bytes]]:
        if self._directory is None:
            return
        # A record is read first: the other files of its run do not change after it is written.
        stamps = sorted(file_stamps(self._directory), key=lambda item: not is_record(item[0]))
        for name, stamp in stamps:
            if self._seen.get(name) != stamp:
                with suppress(FileNotFoundError):  # a checkpoint is deleted when its run ends
                    content = (self._directory / name).read_bytes()
                    self._seen[name] = stamp
                    yield name, content

    def _make_reporter(self, title: str, total_steps: int) -> "_Reporter":
        return _Reporter(self._events, Begin(title, total_steps))

    def _show_warning(
        self, message: Warning | str, category: type[Warning], *_: Any, **__: Any
    ) -> None:
        if category.__module__ == InputError.__module__:  # one of ours
            self._events.put(Notice(str(message), category))


class _Reporter:
    """Reporter whose events are sent with the news."""

    def __init__(self, events: queue.SimpleQueue[Event], begin: Begin) -> None:
        self._events, self._begin = events, begin

    def __enter__(self) -> Self:
        self._events.put(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._events.put(End())

    def show(self, status: Status) -> None:
        """Send the status."""
        self._events.put(status)


def file_stamps(directory: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the path of every file of a run, and a pair that changes with its content."""
    for path in sorted(directory.rglob("*")):
        with suppress(FileNotFoundError):
            if path.is_file() and not is_temporary(path):
                status = path.stat()
                yield path.relative_to(directory).as_posix(), (status.st_mtime_ns, status.st_ino)


def is_record(name: str) -> bool:
    """Return whether the file is the record of a run or of its dense twin."""
    return Path(name).name == "record.json"


def _failure(error: Exception) -> Failure:
    if isinstance(error, _MESSAGES):
        kind = next(kind for kind in _MESSAGES if isinstance(error, kind))
        return Failure(kind, str(error), "")
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {one_line(error)}"
    return Failure(RuntimeError, text, f"{last.filename}, line {last.lineno}")
