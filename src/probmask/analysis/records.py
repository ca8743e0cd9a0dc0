"""Reading the records of finished runs, and telling which of them are the same run.

A record is the JSON that a run ends with. It is read from the run's directory, or from a copy of
it that was committed elsewhere: what a run is follows from its content, not from its place. One of
an earlier format is read as `record_upgrade` says.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probmask.analysis.deciding import deciding_settings, digest, label_of
from probmask.analysis.record_upgrade import upgraded
from probmask.checks import is_number
from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.training.record_format import RECORD_FORMAT

# What a record must hold to be read at all, and as what.
_REQUIRED: dict[str, type] = {
    "format": int,
    "method": dict,
    "test": dict,
    "sparsity": dict,
    "config": dict,
    "seed": int,
    "layers": list,
}
_RECORD_KEYS = {"format", "method", "test"}


@dataclass(frozen=True)
class Run:
    """A finished run: its record, and the file that it was read from."""

    path: Path
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What its directory, or the file of its record, is called."""
        return self.path.parent.name if self.path.name == "record.json" else self.path.stem

    @property
    def data(self) -> str:
        """The data set."""
        return str(self.record.get("data"))

    @property
    def model(self) -> str:
        """The network."""
        return str(self.record.get("model"))

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.record["method"]["name"])

    @property
    def label(self) -> str:
        """The method and those of its settings that are not the defaults, but for the sparsity."""
        return label_of(self.record["method"])

    @property
    def sparsity(self) -> float:
        """The sparsity that was asked for."""
        return float(self.record["sparsity"]["asked"])

    @property
    def reached(self) -> float:
        """The sparsity that came out, in the currency that was asked for."""
        return float(self.record["sparsity"]["reached"])

    @property
    def seed(self) -> int:
        """What decided all randomness."""
        return int(self.record["seed"])

    @property
    def accuracy(self) -> float:
        """Test accuracy of the finished network after the last epoch, in percent."""
        return float(self.record["test"]["accuracy"])

    @property
    def validation_accuracy(self) -> float | None:
        """The same on the training images that were held out; None if none were."""
        selection = self.record.get("selection")
        # One that selects on the test images has their accuracy once more under this key.
        if not isinstance(selection, Mapping) or selection.get("on") != "val":
            return None
        accuracy: Any = selection.get("accuracy")
        return float(accuracy) if is_number(accuracy) else None

    @property
    def told_accuracy(self) -> str:
        """The accuracy to show in passing: not that on test images where others are to judge."""
        held_out = self.validation_accuracy
        return f"{self.accuracy:.2f} %" if held_out is None else f"{held_out:.2f} % (validation)"

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the run."""
        config: Mapping[str, Any] = self.record["config"]
        return config

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """The lines of the metrics log, at most 100 of them."""
        return list(self.record.get("history", ()))

    @functools.cached_property
    def deciding(self) -> dict[str, Any]:
        """What decided the result, by key; what is not there has its default."""
        return deciding_settings(self.config, self.record["method"])

    @functools.cached_property
    def identity(self) -> str:
        """The same for every run of the same configuration, wherever and whenever it ran."""
        return digest(self.deciding)

    @functools.cached_property
    def series(self) -> str:
        """The same for runs that differ in their seeds only."""
        return digest({key: value for key, value in self.deciding.items() if key != "seed"})


def find_records(paths: Iterable[Path]) -> list[Run]:
    """Read the records that the paths stand for, in order, each run once.

    A path is the JSON file of a record, the directory of a run, or any directory, which is searched
    to its bottom. Of several records of the same run the first one counts. A directory without
    records adds nothing; a damaged record is refused.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        for run in _read_all(Path(path)):
            runs.setdefault(run.identity, run)
    return list(runs.values())


def write_compact(record: Mapping[str, Any], path: Path) -> None:
    """Write a copy of a record that is small, and says nothing of the directories of the machine.

    One line per key, so that a difference between two of them can be read.
    """
    config = dict(record["config"])
    if "data_dir" in config:
        config["data_dir"] = Path(str(config["data_dir"])).name
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for key, value in {**record, "config": config}.items()
    ]
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), overwrite=True)


def _read_all(path: Path) -> Iterator[Run]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            run = _read(file)
            if run is not None:
                yield run
        return
    if not path.exists():
        raise InputError(f"{path}: there is no such file or directory.")
    run = _read(path)
    if run is None:
        raise InputError(
            f"{path}: is not the record of a run; pass a record.json, or a run's directory."
        )
    yield run


def _read(path: Path) -> Run | None:
    """The run whose record the file holds; None if it is JSON of something else."""
    try:
        text = path.read_text(encoding="utf-8")
        record = json.loads(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        if path.name != "record.json" and not _seems_a_record(path):
            return None
        raise _damaged(path, str(error)) from error
    if not isinstance(record, dict) or not record.keys() >= _RECORD_KEYS:
        if path.name == "record.json":
            raise _damaged(path, f"it lacks {', '.join(sorted(_RECORD_KEYS))}")
        return None
    _check(record, path)
    return Run(path, upgraded(record))


def _check(record: Mapping[str, Any], path: Path) -> None:
    for key, kind in _REQUIRED.items():
        if not isinstance(record.get(key), kind):
            raise _damaged(path, f"{key!r} is missing or of another kind")
    if record["format"] > RECORD_FORMAT:
        raise InputError(
            f"{path}: is a record of format {record['format']}, of a newer probmask; this one "
            f"reads up to {RECORD_FORMAT}; upgrade it."
        )
    figures = {
        "test.accuracy": record["test"].get("accuracy"),
        "sparsity.asked": record["sparsity"].get("asked"),
        "sparsity.reached": record["sparsity"].get("reached"),
    }
    for key, value in figures.items():
        if not is_number(value):
            raise _damaged(path, f"{key} = {value!r} is not a number")
    if not isinstance(record["method"].get("name"), str):
        raise _damaged(path, "its method has no name")


def _seems_a_record(path: Path) -> bool:
    """Whether broken JSON begins as records do."""
    with path.open("rb") as file:
        return b'"format":' in file.read(40)


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(
        f"{path}: is a damaged record ({reason}); delete it, or bring it back from where it "
        "came from."
    )
