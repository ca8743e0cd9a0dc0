"""`probmask sweep`: train a grid of runs. `probmask reproduce` shares its arguments and output."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.cli.arguments import (
    add_assignments,
    add_data_location,
    add_trust,
    assignments,
    download,
)
from probmask.cli.terminal import print_json, print_message, print_rows, print_text, shows_progress
from probmask.errors import FailedRunsError, InputError

if TYPE_CHECKING:
    from probmask.sweeps.grid import PlannedRun
    from probmask.sweeps.sweep_directory import Plan


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    sweep = commands.add_parser(
        "sweep",
        help="train a grid of runs in parallel",
        description="Train every unfinished run of a grid over methods, sparsities, seeds or any "
        "other keys, in parallel processes. After an interruption, the same command continues.",
    )
    sweep.add_argument(
        "grid", type=Path, metavar="FILE.toml", help="file with the tables [run] and [grid]"
    )
    add_trust(sweep, "the networks and optimizers that FILE.toml names")
    add_sweep_arguments(sweep)
    sweep.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Train the unfinished runs of the grid and print the state of all of them."""
    from probmask.sweeps.grid import load_grid

    planned = load_grid(options.grid, sweep_overrides(options))
    if not (options.trust or options.dry_run):
        _check_code_is_trusted(planned, options.grid, given=dict(assignments(options)))
    out = options.out or Path("runs") / options.grid.stem
    plan = execute_sweep(planned, out, options)
    print_plan(plan, out, options)
    raise_if_failed(plan, out)


def add_sweep_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of commands that train many runs."""
    command.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="number of runs to train in parallel; they share the cores (default: %(default)s)",
    )
    add_data_location(command)
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="directory of the sweep (default: in runs/)"
    )
    command.add_argument(
        "--records",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="existing records; their runs count as finished",
    )
    command.add_argument("--retry", action="store_true", help="train failed runs again")
    command.add_argument(
        "--ray",
        metavar="ADDRESS|local",
        help="train on a Ray cluster, or on one started on this machine",
    )
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing; print which runs are finished, which remain, and which data is "
        "missing",
    )
    add_assignments(command)


def sweep_overrides(options: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the keys that the command line sets for every run."""
    directory = [] if options.data_dir is None else [("data_dir", options.data_dir)]
    return [*assignments(options), *directory]


def execute_sweep(
    planned: Sequence["PlannedRun"], out: Path, options: argparse.Namespace
) -> "Plan":
    """Train the unfinished runs, or only plan them with ``--dry-run``, and return the plan."""
    from probmask.sweeps.runner import run_sweep
    from probmask.sweeps.sweep_directory import SweepDirectory, make_plan

    if options.jobs < 1:
        raise InputError(f"--jobs {options.jobs}: the number of parallel runs must be at least 1.")
    if options.dry_run:
        directory = SweepDirectory(out)
        return make_plan(planned, directory, records=options.records, retry=options.retry)
    if options.download:
        needed = dict.fromkeys((run.config.data, run.config.data_dir) for run in planned)
        for data, data_dir in needed:
            download(data, data_dir, options)
    try:
        return run_sweep(
            planned,
            out,
            jobs=options.jobs,
            records=options.records,
            retry=options.retry,
            ray=options.ray,
            live=shows_progress(options),
            print_line=print_message,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "the same command continues from the checkpoints and keeps finished runs"
        ) from None


def print_plan(plan: "Plan", out: Path, options: argparse.Namespace) -> None:
    """Print the state of every run."""
    missing = _missing_data(plan, options)
    rows = plan_rows(plan)
    if options.json:
        more = {"missing_data": missing} if options.dry_run else {}
        print_json({"out": str(out), "runs": rows, **more})
        return
    accuracies = {planned.name: run.shown_accuracy for planned, run in plan.finished}
    print_rows(
        ("run", "state", "accuracy", "record"),
        [
            (row["name"], row["state"], accuracies.get(row["name"], "–"), _outside(row, out))
            for row in rows
        ],
        optional=("record",),
    )
    for row in rows:
        if row["reason"] is not None:
            print_text(f"{row['name']}: {row['reason']}")
    for line in missing:
        print_text(f"data: {line}")
    counts = f"{len(plan.finished)} finished, {len(plan.failed)} failed, {len(plan.jobs)} to do"
    print_text(f"{counts}; runs are in {out / 'runs'}, records to commit in {out / 'records'}")


def plan_rows(plan: "Plan") -> list[dict[str, Any]]:
    """Return name, identity, state and result of every run."""
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


def raise_if_failed(plan: "Plan", out: Path) -> None:
    """Raise `FailedRunsError` if runs have failed."""
    if plan.failed:
        count, total = len(plan.failed), len(plan.failed) + len(plan.finished) + len(plan.jobs)
        raise FailedRunsError(
            f"{count} of {total} runs failed (first: {plan.failed[0][1]}); the logs are in "
            f"{out / 'logs'}; --retry trains them again."
        )


def _check_code_is_trusted(
    planned: Sequence["PlannedRun"], grid: Path, *, given: Collection[str]
) -> None:
    """Raise if the file of the sweep names code that would have to be imported."""
    from probmask.training.config import own_code
    from probmask.training.run_directory import untrusted_code

    for run in planned:
        for key, name in own_code(run.config, given=given).items():
            raise InputError(untrusted_code(grid, key, name, flag=f"--set {key}=…"))


def _missing_data(plan: "Plan", options: argparse.Namespace) -> list[str]:
    """Return messages about missing data sets, which a dry run reports instead of raising."""
    if not options.dry_run or options.ray is not None:  # nodes of a cluster have their own data
        return []
    from probmask.sweeps.runner import missing_data

    return missing_data(plan.jobs, download=options.download)


def _outside(row: Mapping[str, Any], out: Path) -> str:
    """Return the path of a record that is not in the directory of the sweep."""
    record = row["record"]
    return "" if record is None or Path(record).is_relative_to(out) else record
