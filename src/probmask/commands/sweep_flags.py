"""What commands that train many runs have in common: their flags, and what they print."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.commands.assignments import add_assignments, assignments_of
from probmask.commands.data_place import add_data_place, fetch
from probmask.commands.output import print_json, say, visible
from probmask.errors import FailedRunsError, InputError

if TYPE_CHECKING:
    from probmask.sweeps.grid import Planned
    from probmask.sweeps.sweep_directory import Plan


def add_sweep_flags(command: argparse.ArgumentParser) -> None:
    """Take how, where and on what the runs are trained."""
    command.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, which share the cores"
    )
    add_data_place(command)
    command.add_argument("--out", type=Path, metavar="DIR", help="directory of the sweep")
    command.add_argument(
        "--records",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="records from elsewhere: their runs are finished, and not repeated",
    )
    command.add_argument("--retry", action="store_true", help="also train what failed before")
    command.add_argument(
        "--ray", metavar="ADDRESS|local", help="train on a Ray cluster, or one on this machine"
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="only say what would be trained, what is there, and which data is not",
    )
    add_assignments(command)


def overrides_of(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """The keys that flags set for every run."""
    place = [] if options.data_dir is None else [("data_dir", options.data_dir)]
    return [*assignments_of(options), *place]


def carry_out(planned: Sequence["Planned"], out: Path, options: argparse.Namespace) -> "Plan":
    """Train what is left of the runs, or only look what that is."""
    from probmask.sweeps.runner import run_sweep
    from probmask.sweeps.sweep_directory import SweepDirectory, make_plan

    if options.jobs < 1:
        raise InputError(f"--jobs {options.jobs}: runs at a time, at least 1.")
    if options.dry_run:
        directory = SweepDirectory(out)
        return make_plan(planned, directory, records=options.records, retry=options.retry)
    if options.download:
        for data, place in dict.fromkeys((run.config.data, run.config.data_dir) for run in planned):
            fetch(data, place, options)
    try:
        return run_sweep(
            planned,
            out,
            jobs=options.jobs,
            records=options.records,
            retry=options.retry,
            ray=options.ray,
            live=visible(options),
            say=say,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "the same command goes on from the checkpoints, and repeats nothing that is finished"
        ) from None


def print_plan(plan: "Plan", out: Path, options: argparse.Namespace) -> None:
    """Show what has become of the runs, or what is still to come."""
    missing = _missing_data(plan, options)
    if options.json:
        more = {"missing_data": missing} if options.dry_run else {}
        print_json({"out": str(out), "runs": plan_rows(plan), **more})
        return
    from probmask.analysis.tables import print_rows

    rows = plan_rows(plan)
    told = {planned.name: run.told_accuracy for planned, run in plan.finished}
    print_rows(
        ("run", "state", "accuracy", "record"),
        [
            (row["name"], row["state"], told.get(row["name"], "–"), _elsewhere(row, out))
            for row in rows
        ],
        optional=("record",),
    )
    for row in rows:
        if row["reason"] is not None:
            print(f"{row['name']}: {row['reason']}")
    for line in missing:
        print(f"data: {line}")
    counts = f"{len(plan.finished)} finished, {len(plan.failed)} failed, {len(plan.jobs)} to do"
    print(f"{counts}; in {out}: runs/, and records/ to be committed")


def _missing_data(plan: "Plan", options: argparse.Namespace) -> list[str]:
    """What of the data a training would have refused, where only the plan is asked for."""
    if not options.dry_run or options.ray is not None:  # the nodes of a cluster have their own
        return []
    from probmask.sweeps.runner import missing_data

    return missing_data(plan.jobs, download=options.download)


def _elsewhere(row: Mapping[str, Any], out: Path) -> str:
    """Where the record is, if it came from outside the sweep."""
    record = row["record"]
    return "" if record is None or Path(record).is_relative_to(out) else record


def plan_rows(plan: "Plan") -> list[dict[str, Any]]:
    """Every run with what has become of it."""
    empty = {"accuracy": None, "validation_accuracy": None, "record": None, "reason": None}
    rows: list[dict[str, Any]] = [
        {
            **empty,
            "name": planned.name,
            "identity": planned.identity,
            "state": "finished",
            "accuracy": run.accuracy,
            "validation_accuracy": run.validation_accuracy,
            "record": str(run.path),
        }
        for planned, run in plan.finished
    ]
    rows += [
        {
            **empty,
            "name": planned.name,
            "identity": planned.identity,
            "state": "failed",
            "reason": reason,
        }
        for planned, reason in plan.failed
    ]
    rows += [
        {
            **empty,
            "name": job.planned.name,
            "identity": job.planned.identity,
            "state": "unfinished" if job.resume else "new",
        }
        for job in plan.jobs
    ]
    return rows


def refuse_failures(plan: "Plan", out: Path) -> None:
    """End with an error if runs have failed."""
    if plan.failed:
        count, total = len(plan.failed), len(plan.failed) + len(plan.finished) + len(plan.jobs)
        raise FailedRunsError(
            f"{count} of {total} runs failed (first: {plan.failed[0][1]}); logs are in "
            f"{out / 'logs'}; --retry trains them again."
        )
