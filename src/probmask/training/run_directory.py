"""The directory of a run: its files, its lock, and the state that they show.

config.toml             the complete configuration
metrics.jsonl           one line per epoch
tensorboard/            the same numbers for TensorBoard
checkpoint.safetensors  exists while the run is unfinished
checkpoint-…/           the part of it that the ranks of a sharded network have written
model.safetensors       the finished network
record.json             the results; it exists if the run is finished
dense/                  the same files of the dense twin
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from filelock import FileLock, Timeout

from probmask.errors import InputError
from probmask.files import is_failure, write_atomically
from probmask.masking.method import Phase
from probmask.models.own_code import untrusted
from probmask.parsing import check_plain
from probmask.training.config import TrainConfig, load_config, own_code, phases_of, to_table
from probmask.training.metrics import read_log
from probmask.training.record_format import read_record
from probmask.training.trusted_runs import is_trusted_run, remember_run

_CONFIG = "config.toml"
_LOCK = ".lock"
_TWIN = "dense"
# What the code under a key of the configuration is, and the flag that names it.
_CODE = {
    "model": ("model", "--model"),
    "optimizer.name": ("optimizer", "--set optimizer.name=…"),
}
SHARDS = "checkpoint-" + 16 * "[0-9a-f]"  # directories
_TEMPORARY = ".probmask-*.tmp"  # unfinished files of `write_atomically`
# A process that only asks whether the directory is locked holds the lock for a moment.
_LOCK_SECONDS = 0.2


class RunDirectory:
    """Paths of the files of a run, and how they are created, locked, read and written.

    If the directory ``is_copied`` elsewhere during the run, file by file, a checkpoint must be a
    single file.
    """

    def __init__(self, path: Path, *, is_copied: bool = False) -> None:
        self.path = path
        self.is_copied = is_copied
        self.config = path / _CONFIG
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoint = path / "checkpoint.safetensors"
        self.artifact = path / "model.safetensors"
        self.record = path / "record.json"
        self.lock = path / _LOCK

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.record.exists()

    @property
    def busy(self) -> bool:
        """Whether a process is training in the directory.

        An unfinished run whose lock this user may not open counts as busy.
        """
        if not self.lock.exists():
            return False
        try:
            with FileLock(self.lock, blocking=False):
                return False
        except Timeout:
            return True
        except OSError:
            return not self.finished

    def check_unused(self) -> None:
        """Raise `InputError` if the path is a file or a directory that contains files."""
        try:
            if self.path.exists() and (not self.path.is_dir() or self._has_files()):
                raise InputError(
                    f"--out {self.path}: is already in use; choose another, or pass --resume to "
                    "continue the run in it."
                )
        except OSError as error:
            raise not_writable(self.path, error) from error

    def create(self, config: TrainConfig) -> None:
        """Create the directory of a new run.

        Raises:
            InputError: The directory is in use, and stays as it is, or it cannot be written, or a
                value of the configuration cannot be stored, for example a path that is not text.
        """
        check_plain(to_table(config), source="train")
        self.check_unused()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_writable(self.path, error) from error
        write_atomically(self.config, tomli_w.dumps(to_table(config)).encode(), overwrite=False)
        remember_run(self.path, self.config, own_code(config).values())

    def check_trusted(self, config: TrainConfig, given: Collection[str] = ()) -> None:
        """Raise `InputError` unless the user started the run here with this code.

        A run from elsewhere must not decide which code is imported. ``given`` are keys of the
        configuration that the user sets in this command.
        """
        remedy = f"config=probmask.load_config({str(self.config)!r})"
        for key, name in own_code(config, given=given).items():
            if not is_trusted_run(self.path, self.config, [name]):
                raise InputError(untrusted_code(self.path, key, name, in_python=remedy))

    def read_config(self) -> TrainConfig:
        """Return the configuration of the run in the directory."""
        if not self.config.exists():
            raise InputError(f"--resume {self.path}: contains no run (no {_CONFIG}).")
        return load_config(self.config)

    @contextmanager
    def locked(self, *, timeout: float = _LOCK_SECONDS) -> Iterator[None]:
        """Keep other processes from training in the directory.

        The system releases the lock when the process ends, even if it is killed.

        The lock belongs to an open file, not to the process, so that it also keeps out other
        threads, and reading the run in this process does not release it.

        Raises:
            InputError: Another process or thread still holds the lock after ``timeout`` seconds.
        """
        lock = FileLock(self.lock, timeout=timeout)
        try:
            lock.acquire()
        except Timeout as error:
            raise InputError(
                f"--resume {self.path}: another process or thread is training in it; wait until "
                "it ends, or stop it."
            ) from error
        try:
            yield
        finally:
            lock.release()

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the record, which marks the run as finished."""
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        write_atomically(self.record, text.encode(), overwrite=True)

    def read_record(self) -> dict[str, Any]:
        """Return the record of a finished run.

        Raises:
            InputError: The record is damaged.
        """
        return read_record(self.record)

    def remove_shards(self, *, keep: Path | None = None) -> None:
        """Delete what the ranks have written for checkpoints, except one directory."""
        for directory in self.path.glob(SHARDS):
            if directory != keep:
                shutil.rmtree(directory, ignore_errors=True)  # another process may delete it too

    def remove_checkpoint(self) -> None:
        """Delete the checkpoint, if there is one."""
        self.checkpoint.unlink(missing_ok=True)
        self.remove_shards()

    def remove_leftovers(self) -> None:
        """Delete temporary files that a killed process left."""
        for leftover in self.path.glob(_TEMPORARY):
            leftover.unlink()

    def _has_files(self) -> bool:
        # A process that was killed while it wrote the configuration leaves a temporary file.
        return any(not path.match(_TEMPORARY) for path in self.path.iterdir())


def is_temporary(path: Path) -> bool:
    """Return whether a file in a run's directory is its lock, or is still being written."""
    return path.name == _LOCK or path.match(_TEMPORARY)


def untrusted_code(
    source: object,
    key: str,
    name: str,
    *,
    flag: str | None = None,
    in_python: str | None = None,
) -> str:
    """Return the error for a file that names code of somebody under a key of the configuration."""
    kind, usual = _CODE[key]
    return untrusted(source, name, kind=kind, flag=flag or usual, in_python=in_python)


def not_writable(path: Path, error: OSError) -> InputError | OSError:
    """Return the error for an output directory that cannot be written.

    It is an `InputError` if another directory would help, and ``error`` if the disk is full.
    """
    if is_failure(error):
        return error
    return InputError(
        f"--out {path}: cannot be created or written ({error.strerror}); choose a writable "
        "directory."
    )


def recorded_place(artifact: Path) -> str | None:
    """Return the data directory of the run that wrote an artifact, if the run is next to it."""
    directory = RunDirectory(artifact.parent)
    return directory.read_config().data_dir if directory.config.exists() else None


def unused_directory(stem: Path) -> Path:
    """Return the first of ``stem``, ``stem-2``, ``stem-3``, … that does not exist."""
    candidate, count = stem, 1
    while candidate.exists():
        count += 1
        candidate = stem.with_name(f"{stem.name}-{count}")
    return candidate


@dataclass(frozen=True)
class RunState:
    """State of a run, read from its directory.

    ``history`` has a line per finished epoch. ``damaged_lines`` is the number of lines of the log
    that cannot be read. A run is "stopped" if it has no record and no process trains it. ``twin``
    is the state of the dense twin, if its directory exists.
    """

    path: Path
    config: TrainConfig
    status: Literal["training", "stopped", "finished"]
    phases: tuple[Phase, ...]
    history: tuple[dict[str, Any], ...]
    damaged_lines: int
    record: dict[str, Any] | None
    twin: "RunState | None" = None

    @property
    def epochs(self) -> int:
        """Number of epochs of all phases."""
        return sum(phase.epochs for phase in self.phases)

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return int(self.history[-1]["epoch"]) if self.history else 0

    @property
    def phase(self) -> int:
        """Index of the phase of the next epoch, or of the last phase."""
        end = 0
        for index, phase in enumerate(self.phases):
            end += phase.epochs
            if self.epoch < end:
                return index
        return len(self.phases) - 1

    @property
    def owner(self) -> Path:
        """The directory to resume. A twin is resumed with the run that it belongs to."""
        return _owner(self.path)

    @property
    def at_work(self) -> "RunState":
        """The run that is training: first the twin, then the run itself."""
        waiting = self.record is None and not self.history
        return self.twin if waiting and self.twin is not None else self


def find_runs(path: Path) -> list[Path]:
    """Return the directory itself if it is a run, otherwise all runs below it, sorted.

    Twins are not listed; they belong to their runs.

    Raises:
        InputError: The directory does not exist, or contains no run.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such directory; pass the directory of a run, or of runs.")
    runs = [path] if (path / _CONFIG).exists() else sorted(_runs_below(path))
    if not runs:
        raise InputError(f"{path}: contains no run (no {_CONFIG}).")
    return runs


def _runs_below(path: Path) -> Iterator[Path]:
    for parent, directories, files in os.walk(path):
        if _CONFIG in files:
            directories.clear()
            yield Path(parent)


class RunReader:
    """Reads the states of runs repeatedly; files that have not changed are read once."""

    def __init__(self) -> None:
        self._cache: dict[Path, tuple[object, RunState]] = {}

    def read(self, path: Path) -> RunState:
        """Return the current state of a run."""
        # The lock first: a run writes its record before it releases the lock.
        busy = RunDirectory(_owner(path)).busy
        stamp = (busy, *(_stamp(path, part) for part in ("", _TWIN)))
        cached = self._cache.get(path)
        if cached is None or cached[0] != stamp:
            cached = stamp, _read_state(path, busy=busy)
            self._cache[path] = cached
        return cached[1]


def _stamp(path: Path, part: str) -> object:
    """Return a value that changes whenever a file of the run changes."""
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


def _read_state(path: Path, *, busy: bool) -> RunState:
    directory = RunDirectory(path)
    config = load_config(directory.config)
    record = directory.read_record() if directory.finished else None
    history, damaged = read_log(directory.metrics) if directory.metrics.exists() else ([], 0)
    twin = path / _TWIN
    return RunState(
        path=path,
        config=config,
        status="finished" if record is not None else "training" if busy else "stopped",
        phases=phases_of(config),
        history=tuple(history),
        damaged_lines=damaged,
        record=record,
        twin=_read_state(twin, busy=busy) if (twin / _CONFIG).exists() else None,
    )


def _owner(path: Path) -> Path:
    is_twin = path.absolute().name == _TWIN and (path.absolute().parent / _CONFIG).exists()
    return path.absolute().parent if is_twin else path
