"""What a sweep has still to do: which of its runs are finished, failed, begun or new.

OUT/runs/NAME/          the directory of a run, as `probmask train` makes it
OUT/records/NAME.json   a compact copy of the record of every finished run, to be committed
OUT/failed/NAME.json    why a run failed
OUT/logs/NAME.log       what a run had to say
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probmask.analysis.records import Run, find_records, write_compact
from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.sweeps.grid import Planned
from probmask.training.run_directory import RunDirectory


class SweepDirectory:
    """Where the runs of a sweep, their records and their failures lie."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise InputError(f"--out {path}: is a file; choose the directory of a sweep.")
        if RunDirectory(path).config.exists():
            raise InputError(
                f"--out {path}: is the directory of a run, not of a sweep; choose another."
            )
        self.path = path
        self.runs = path / "runs"
        self.records = path / "records"
        self.failed = path / "failed"
        self.logs = path / "logs"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the directory, and keep other sweeps out of it."""
        with ExitStack() as stack:
            try:
                for directory in (self.runs, self.records, self.failed, self.logs):
                    directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(RunDirectory(self.path).locked())
            except OSError as error:
                raise InputError(
                    f"--out {self.path}: cannot be made or written ({error.strerror}); choose a "
                    "writable directory."
                ) from error
            except InputError as error:
                raise InputError(
                    f"--out {self.path}: another sweep is running in it; wait for it, or end it."
                ) from error
            yield

    def run(self, planned: Planned) -> RunDirectory:
        """The directory of a run."""
        return RunDirectory(self.runs / planned.name)

    def reason(self, planned: Planned) -> str | None:
        """Why the run failed, if it did."""
        try:
            found = json.loads(self._failure(planned).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"unknown: {self._failure(planned)} cannot be read ({error})"
        return str(found["reason"]) if isinstance(found, dict) and "reason" in found else "unknown"

    def put_failure(self, planned: Planned, reason: str) -> None:
        """Remember that the run failed, and why."""
        text = json.dumps({"name": planned.name, "reason": reason}, indent=2) + "\n"
        write_atomically(self._failure(planned), text.encode(), overwrite=True)

    def forget_failure(self, planned: Planned) -> None:
        """The run is to be tried again, or has come to its end."""
        self._failure(planned).unlink(missing_ok=True)

    def put_record(self, planned: Planned) -> Run:
        """Copy the record of a finished run to where it can be committed from."""
        directory = self.run(planned)
        run = Run(directory.record, directory.read_record())
        write_compact(run.record, self._record(planned))
        self.forget_failure(planned)
        return run

    def put_missing_records(self, planned: Iterable[Planned]) -> None:
        """Copy the records of runs that came to their end when the sweep was gone already."""
        for each in planned:
            if self.run(each).finished and not self._record(each).exists():
                self.put_record(each)

    def _record(self, planned: Planned) -> Path:
        return self.records / f"{planned.name}.json"

    def _failure(self, planned: Planned) -> Path:
        return self.failed / f"{planned.name}.json"


def update_copy(run: RunDirectory, record: Mapping[str, Any]) -> None:
    """Bring the copy of a record that is to be committed up to date, if the run is a sweep's."""
    place = run.path.resolve()
    copy = place.parent.parent / "records" / f"{place.name}.json"
    if place.parent.name == "runs" and copy.exists():
        write_compact(record, copy)


@dataclass(frozen=True)
class Job:
    """A run that is to be trained: from the beginning, or on from where it was left."""

    planned: Planned
    directory: Path
    resume: bool


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep by what has become of them."""

    finished: list[tuple[Planned, Run]]
    failed: list[tuple[Planned, str]]
    jobs: list[Job]


def make_plan(
    planned: Sequence[Planned],
    directory: SweepDirectory,
    *,
    records: Iterable[Path] = (),
    retry: bool = False,
) -> Plan:
    """Find out what is still to do.

    A run is finished if its record lies in the sweep's directory or under one of ``records``,
    whatever its name there; a failed one counts as to do only with ``retry``.
    """
    places = [place for place in (directory.runs, directory.records) if place.exists()]
    found = {run.identity: run for run in reversed(find_records([*places, *records]))}
    plan = Plan([], [], [])
    for each in planned:
        if each.identity in found:
            plan.finished.append((each, found[each.identity]))
            continue
        reason = None if retry else directory.reason(each)
        if reason is not None:
            plan.failed.append((each, reason))
        else:
            run = directory.run(each)
            plan.jobs.append(Job(each, run.path, resume=run.config.exists()))
    return plan
