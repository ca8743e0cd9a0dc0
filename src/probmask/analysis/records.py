"""Read the records of finished runs.

A run writes its record, a JSON file, when it finishes. Records are read from the directories of
runs or from committed copies; the content of a record identifies its run, not its path. Records of
earlier formats are converted by `record_upgrade`.
"""

import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from probmask.analysis.identity import digest, method_label, relevant_settings
from probmask.analysis.record_upgrade import upgrade_record
from probmask.errors import InputError
from probmask.files import read_bounded, write_atomically
from probmask.training.record_format import LARGEST_RECORD, damaged_record, parse_record

# Keys by which a record is recognized under any file name.
_RECORD_KEYS = {"format", "method", "test"}
_RECORD_NAME = "record.json"


@dataclass(frozen=True)
class Run:
    """A finished run: its record and the file from which it was read."""

    path: Path
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its directory, or of its record without suffix."""
        return self.path.parent.name if self.path.name == _RECORD_NAME else self.path.stem

    @property
    def data(self) -> str:
        """The name of the data set."""
        return str(self.record.get("data"))

    @property
    def model(self) -> str:
        """The name of the network."""
        return str(self.record.get("model"))

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.record["method"]["name"])

    @property
    def label(self) -> str:
        """The method and its non-default settings, without the sparsity."""
        return method_label(self.record["method"])

    @property
    def sparsity(self) -> float:
        """The target sparsity."""
        return float(self.record["sparsity"]["asked"])

    @property
    def reached(self) -> float:
        """The sparsity reached, in weights or MACs as the target."""
        return float(self.record["sparsity"]["reached"])

    @property
    def seed(self) -> int:
        """The seed of all random numbers."""
        return int(self.record["seed"])

    @property
    def accuracy(self) -> float:
        """Test accuracy of the finished network after the last epoch, in percent."""
        return float(self.record["test"]["accuracy"])

    @property
    def validation_accuracy(self) -> float | None:
        """Accuracy on the held-out training images, in percent; None if none were held out."""
        selection = self.record.get("selection")
        # A run that selects on the test images repeats their accuracy under this key.
        return float(selection["accuracy"]) if selection and selection["on"] == "val" else None

    @property
    def shown_accuracy(self) -> str:
        """The accuracy for progress messages: validation if available, otherwise test."""
        validation = self.validation_accuracy
        if validation is None:
            return f"{self.accuracy:.2f} %"
        return f"{validation:.2f} % (validation)"

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the run."""
        config: Mapping[str, Any] = self.record["config"]
        return config

    @property
    def history(self) -> list[Mapping[str, Any]]:
        """Lines of the metrics log, at most 100 of them."""
        return list(self.record.get("history", ()))

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that affect the result; settings at their defaults are omitted."""
        return relevant_settings(self.config, self.record["method"])

    @functools.cached_property
    def identity(self) -> str:
        """A hash that is equal for runs of equal configuration, on any machine."""
        return digest(self.settings)

    @functools.cached_property
    def series(self) -> str:
        """A hash that is equal for runs that differ only in their seeds."""
        return digest({key: value for key, value in self.settings.items() if key != "seed"})


def find_records(paths: Iterable[Path]) -> list[Run]:
    """Read the records at the given paths, in order, each run once.

    A path is the JSON file of a record, the directory of a run, or a directory that is searched
    recursively. Of several records of the same run, the first is returned. A directory without
    records adds nothing.

    Raises:
        InputError: If a path does not exist or is not a record, or if a record is damaged.
    """
    runs: dict[str, Run] = {}
    for path in paths:
        for run in _read_all(Path(path)):
            runs.setdefault(run.identity, run)
    return list(runs.values())


def filter_runs(
    runs: Iterable[Run], *, updates: int | None = None, methods: Collection[str] = ()
) -> list[Run]:
    """Return the runs with this number of updates and one of these methods.

    Args:
        runs: Finished runs.
        updates: The number of updates; None accepts any.
        methods: Patterns of labels, as tables show them: a method and its non-default settings.
            ``*`` matches any text. No patterns accept any method.

    Raises:
        InputError: If no run has them.
    """
    found = [
        run
        for run in runs
        if updates in (None, run.record.get("updates"))
        and (not methods or any(fnmatchcase(run.label, pattern) for pattern in methods))
    ]
    if not found:
        length = "" if updates is None else f" of {updates:,} updates"
        named = f" with the method {' or '.join(map(repr, methods))}" if methods else ""
        raise InputError(
            f"found no run{length}{named}; see the runs without --updates and --methods."
        )
    return found


def write_compact(record: Mapping[str, Any], path: Path) -> None:
    """Write a compact copy of a record for committing, without the paths of this machine.

    Each key is on its own line, so that diffs are readable.
    """
    config = _without_paths(record["config"], ("data_dir", "init"))
    copy = {**record, "config": config}
    for settings in (copy, config):
        if "data_args" in settings:
            settings["data_args"] = _without_paths(settings["data_args"], ("tokenizer",))
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for key, value in copy.items()
    ]
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), overwrite=True)


def _without_paths(settings: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return a copy of the settings in which these paths have only their last part."""
    return {
        key: Path(value).name if key in keys and isinstance(value, str) else value
        for key, value in settings.items()
    }


def _read_all(path: Path) -> Iterator[Run]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            run = _read(file) if file.is_file() or file.name == _RECORD_NAME else None
            if run is not None:
                yield run
        return
    if not path.exists():
        raise InputError(f"{path}: no such file or directory.")
    run = _read(path)
    if run is None:
        raise InputError(
            f"{path}: not the record of a run; pass a record.json or the directory of a run."
        )
    yield run


def _read(path: Path) -> Run | None:
    """Read the record in a file; return None if the file is other JSON."""
    other = path.name != _RECORD_NAME
    if other and path.is_file() and path.stat().st_size > LARGEST_RECORD:
        return None
    content = read_bounded(path, most=LARGEST_RECORD)
    if other and not _is_record(content):
        return None
    record = parse_record(content, path)
    try:
        return Run(path, upgrade_record(record))
    except InputError as error:
        raise damaged_record(path, str(error)) from error


def _is_record(content: bytes) -> bool:
    """Return whether JSON has the keys of a record. Damaged JSON can only start like one."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return b'"format":' in content[:40]
    return isinstance(value, dict) and value.keys() >= _RECORD_KEYS
