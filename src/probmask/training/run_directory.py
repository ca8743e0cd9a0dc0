"""The directory of a run: its configuration, metrics, checkpoint, artifact and record.

config.toml             the resolved configuration
metrics.jsonl           one line per epoch
tensorboard/            the same for TensorBoard
checkpoint.safetensors  while the run is not finished
model.safetensors       the finished network
record.json             what came out; its presence means that the run is finished
"""

import json
import os
import platform
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.masking.method import Phase
from probmask.training.config import TrainConfig, load_config, make_method, to_table
from probmask.training.metrics import read_log

try:
    import fcntl
except ImportError:  # Windows has no such lock; there, two processes are the user's affair
    fcntl = None  # type: ignore[assignment]


_LEFTOVER = ".probmask-*.tmp"  # what `write_atomically` calls its unfinished files


class RunDirectory:
    """Paths of a run, and what may be done with them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoint = path / "checkpoint.safetensors"
        self.artifact = path / "model.safetensors"
        self.record = path / "record.json"
        self.lock = path / ".lock"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.record.exists()

    @property
    def busy(self) -> bool:
        """Whether another process trains in it; where there are no locks, whether one may."""
        try:
            with self.lock.open("rb") as file:
                return _is_locked(file.fileno()) if fcntl is not None else not self.finished
        except FileNotFoundError:
            return False

    def create(self, config: TrainConfig) -> None:
        """Make the directory for a new run; one that is in use is refused, untouched."""
        try:
            if self.path.exists() and (not self.path.is_dir() or self._in_use()):
                raise InputError(
                    f"--out {self.path}: is already in use; choose another, or pass --resume to "
                    "go on with the run in it."
                )
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"--out {self.path}: cannot be made or written ({error.strerror}); choose a "
                "writable directory."
            ) from error
        write_atomically(self.config, tomli_w.dumps(to_table(config)).encode(), overwrite=False)

    def _in_use(self) -> bool:
        # What a process was killed over before it had begun is not a use.
        return any(not path.match(_LEFTOVER) for path in self.path.iterdir())

    def read_config(self) -> TrainConfig:
        """The configuration of the run that is in the directory."""
        if not self.config.exists():
            raise InputError(f"--resume {self.path}: there is no run in it (no config.toml).")
        return load_config(self.config)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in the same directory.

        The system lifts the lock when the process ends, however it ends.
        """
        with self.lock.open("w") as file:
            if fcntl is not None:
                try:
                    # Not flock: processes that read images would inherit it, and hold it for some
                    # seconds after this one was killed.
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError) as error:
                    raise InputError(
                        f"--resume {self.path}: another process is training in it; "
                        "wait for it, or end it."
                    ) from error
            yield

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the record, which finishes the run."""
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        write_atomically(self.record, text.encode(), overwrite=True)

    def read_record(self) -> dict[str, Any]:
        """The record of a finished run."""
        try:
            record: dict[str, Any] = json.loads(self.record.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(
                f"{self.record}: is damaged ({error}); delete it to finish the run anew."
            ) from error
        return record

    def remove_leftovers(self) -> None:
        """Delete what a killed process was in the middle of writing."""
        for leftover in self.path.glob(_LEFTOVER):
            leftover.unlink()


def _is_locked(file: int) -> bool:
    """Ask for the lock of another process without taking it: a run may be about to start."""
    write, begin = fcntl.F_WRLCK, os.SEEK_SET
    # struct flock: type, whence, start, length, process; on BSD and macOS in another order.
    if platform.system() == "Linux":
        asked = struct.pack("hhqqi4x", write, begin, 0, 0, 0)
        (kind,) = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    else:
        asked = struct.pack("qqihhi", 0, 0, 0, write, begin, 0)
        (kind,) = struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, asked), offset=20)
    return bool(kind != fcntl.F_UNLCK)


def recorded_place(artifact: Path) -> str | None:
    """Where the data of a run lay, if the artifact still lies in the directory of the run."""
    directory = RunDirectory(artifact.parent)
    return directory.read_config().data_dir if directory.config.exists() else None


def unused_directory(stem: Path) -> Path:
    """``stem``, or ``stem-2``, ``stem-3``, … if there is something there already."""
    candidate, count = stem, 1
    while candidate.exists():
        count += 1
        candidate = stem.with_name(f"{stem.name}-{count}")
    return candidate


_TWIN = "dense"
_CONFIG = "config.toml"
# What is shown of a record.
_RESULTS = {"method", "layers", "kept", "size", "macs", "test", "bytes", "seconds"}


@dataclass(frozen=True)
class RunState:
    """A run at one moment.

    ``history`` has a line per epoch that is over. A run that nobody trains and that has no record
    is "stopped". ``twin`` is the dense network that is trained beside it, once there is one.
    """

    path: Path
    config: TrainConfig
    status: Literal["training", "stopped", "finished"]
    phases: tuple[Phase, ...]
    history: tuple[dict[str, Any], ...]
    record: dict[str, Any] | None
    twin: "RunState | None" = None

    @property
    def epochs(self) -> int:
        """The epochs of all phases."""
        return sum(phase.epochs for phase in self.phases)

    @property
    def epoch(self) -> int:
        """How many of them are over."""
        return int(self.history[-1]["epoch"]) if self.history else 0

    @property
    def phase(self) -> int:
        """The number of the phase that the next epoch belongs to, or of the last one."""
        end = 0
        for number, phase in enumerate(self.phases):
            end += phase.epochs
            if self.epoch < end:
                return number
        return len(self.phases) - 1

    @property
    def owner(self) -> Path:
        """The directory that is resumed: a twin's run is resumed with the run it belongs to."""
        return _owner(self.path)

    @property
    def at_work(self) -> "RunState":
        """What is trained at the moment: the twin comes first."""
        waits = self.record is None and not self.history
        return self.twin if waits and self.twin is not None else self


def find_runs(path: Path) -> list[Path]:
    """The run that is in a directory, or all runs below it, sorted; twins belong to their runs."""
    if not path.is_dir():
        raise InputError(f"{path}: no such directory; expected that of a run, or of several.")
    runs = [path] if (path / _CONFIG).exists() else sorted(_below(path))
    if not runs:
        raise InputError(f"{path}: there is no run in it (no {_CONFIG}).")
    return runs


def _below(path: Path) -> Iterator[Path]:
    for place, directories, files in os.walk(path):
        if _CONFIG in files:
            directories.clear()
            yield Path(place)


class RunReader:
    """Reads runs again and again, those that have not changed only once."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[object, RunState]] = {}

    def read(self, path: Path) -> RunState:
        """The run as it is now."""
        # Before the record is looked for: it is written before the lock is given up.
        trains = RunDirectory(_owner(path)).busy
        stamp = (trains, *(_stamp(path, part) for part in ("", _TWIN)))
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            known = stamp, _read(path, trains=trains)
            self._known[path] = known
        return known[1]


def _stamp(path: Path, part: str) -> object:
    """What changes whenever a file of the run does."""
    directory = RunDirectory(path / part)
    stats: list[tuple[int, int, int] | None] = []
    for file in (directory.config, directory.metrics, directory.record):
        try:
            found = file.stat()
        except OSError:
            stats.append(None)
        else:
            stats.append((found.st_ino, found.st_mtime_ns, found.st_size))
    return tuple(stats)


def _read(path: Path, *, trains: bool) -> RunState:
    directory = RunDirectory(path)
    config = load_config(directory.config)
    record = _read_record(directory) if directory.finished else None
    twin = path / _TWIN
    return RunState(
        path=path,
        config=config,
        status="finished" if record is not None else "training" if trains else "stopped",
        phases=make_method(config).phases(config.epochs),
        history=tuple(read_log(directory.metrics)) if directory.metrics.exists() else (),
        record=record,
        twin=_read(twin, trains=trains) if (twin / _CONFIG).exists() else None,
    )


def _read_record(directory: RunDirectory) -> dict[str, Any]:
    record: object = directory.read_record()
    if not isinstance(record, dict) or not record.keys() >= _RESULTS:
        raise InputError(f"{directory.record}: is not the record of a run.")
    return record


def _owner(path: Path) -> Path:
    is_twin = path.absolute().name == _TWIN and (path.absolute().parent / _CONFIG).exists()
    return path.absolute().parent if is_twin else path
