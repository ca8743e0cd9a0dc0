"""The directory of a sweep, and the plan: which of its runs are finished, failed or left to train.

OUT/runs/NAME/          the directory of a run, as `probmask train` writes it
OUT/records/NAME.json   a compact copy of the record of every finished run, to be committed
OUT/failed/NAME.json    why a run failed
OUT/logs/NAME.log       standard error of the process that trained the run
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
from probmask.sweeps.grid import PlannedRun
from probmask.training.run_directory import RunDirectory, not_writable


class SweepDirectory:
    """Paths of the runs of a sweep, their records, failures and logs."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise InputError(f"--out {path}: is a file; choose a directory for the sweep.")
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
        """Create the directory and keep other sweeps out of it.

        Raises:
            InputError: Another sweep is running in it, or it cannot be written.
        """
        with ExitStack() as stack:
            try:
                for directory in (self.runs, self.records, self.failed, self.logs):
                    directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(RunDirectory(self.path).locked())
            except OSError as error:
                raise not_writable(self.path, error) from error
            except InputError as error:
                raise InputError(
                    f"--out {self.path}: another sweep is running in it; wait until it ends, or "
                    "stop it."
                ) from error
            yield

    def run(self, planned: PlannedRun) -> RunDirectory:
        """Return the directory of a run."""
        return RunDirectory(self.runs / planned.name)

    def failure_reason(self, planned: PlannedRun) -> str | None:
        """Return why the run failed, or None if it did not fail."""
        try:
            found = json.loads(self._failure(planned).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"unknown: {self._failure(planned)} cannot be read ({error})"
        return str(found["reason"]) if isinstance(found, dict) and "reason" in found else "unknown"

    def write_failure(self, planned: PlannedRun, reason: str) -> None:
        """Store that the run failed, and why."""
        text = json.dumps({"name": planned.name, "reason": reason}, indent=2) + "\n"
        write_atomically(self._failure(planned), text.encode(), overwrite=True)

    def remove_failure(self, planned: PlannedRun) -> None:
        """Remove the stored failure of a run that is trained again or has finished."""
        self._failure(planned).unlink(missing_ok=True)

    def write_record(self, planned: PlannedRun) -> Run:
        """Write the compact copy of a finished run's record; return the run."""
        directory = self.run(planned)
        run = Run(directory.record, directory.read_record())
        write_compact(run.record, self._record(planned))
        self.remove_failure(planned)
        return run

    def write_missing_records(self, planned: Iterable[PlannedRun]) -> None:
        """Write the copies for runs that finished after their sweep had been killed."""
        for each in planned:
            if self.run(each).finished and not self._record(each).exists():
                self.write_record(each)

    def _record(self, planned: PlannedRun) -> Path:
        return self.records / f"{planned.name}.json"

    def _failure(self, planned: PlannedRun) -> Path:
        return self.failed / f"{planned.name}.json"


def update_copy(run: RunDirectory, record: Mapping[str, Any]) -> None:
    """Update the compact copy of a record, if the run belongs to a sweep."""
    path = run.path.resolve()
    copy = path.parent.parent / "records" / f"{path.name}.json"
    if path.parent.name == "runs" and copy.exists():
        write_compact(record, copy)


@dataclass(frozen=True)
class Job:
    """A run to train: from the start, or from its checkpoint if ``resume`` is set."""

    planned: PlannedRun
    directory: Path
    resume: bool


@dataclass(frozen=True)
class Plan:
    """The runs of a sweep: finished with their records, failed with the reason, left to train."""

    finished: list[tuple[PlannedRun, Run]]
    failed: list[tuple[PlannedRun, str]]
    jobs: list[Job]


def make_plan(
    planned: Sequence[PlannedRun],
    directory: SweepDirectory,
    *,
    records: Iterable[Path] = (),
    retry: bool = False,
) -> Plan:
    """Sort the runs of a sweep into finished, failed and left to train.

    A run is finished if its record is in the directory of the sweep or under one of ``records``,
    under any name. With ``retry``, failed runs are trained again.
    """
    places = [place for place in (directory.runs, directory.records) if place.exists()]
    found = {run.identity: run for run in reversed(find_records([*places, *records]))}
    plan = Plan([], [], [])
    for each in planned:
        if each.identity in found:
            plan.finished.append((each, found[each.identity]))
            continue
        reason = None if retry else directory.failure_reason(each)
        if reason is not None:
            plan.failed.append((each, reason))
        else:
            run = directory.run(each)
            plan.jobs.append(Job(each, run.path, resume=run.config.exists()))
    return plan
