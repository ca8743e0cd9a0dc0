"""What the directory of a run tells from outside: how far it is, and whether anybody trains it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from probmask.errors import InputError
from probmask.masking.protocol import Phase
from probmask.training.config import TrainConfig, load_config, make_method
from probmask.training.metrics import read_log
from probmask.training.preparation import total_epochs
from probmask.training.run_directory import RunDirectory

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
        return total_epochs(self.phases)

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
