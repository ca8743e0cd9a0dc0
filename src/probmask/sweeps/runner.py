"""Running a sweep: find the unfinished runs of a grid, and train them here or on Ray."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from probmask.data import is_downloaded
from probmask.errors import InputError
from probmask.sweeps.grid import PlannedRun
from probmask.sweeps.local_processes import run_locally
from probmask.sweeps.ray_cluster import run_on_ray
from probmask.sweeps.sweep_directory import Job, Plan, SweepDirectory, make_plan
from probmask.sweeps.sweep_progress import SweepProgress, live_table
from probmask.training.config import TrainConfig
from probmask.training.initial_weights import check_digest
from probmask.training.ray_connection import connected
from probmask.training.run import load_run_data

_RunJobs = Callable[[Sequence[Job], SweepDirectory, SweepProgress], None]


def run_sweep(
    planned: Sequence[PlannedRun],
    out: Path,
    *,
    jobs: int = 1,
    records: Sequence[Path] = (),
    retry: bool = False,
    ray: str | None = None,
    live: bool = False,
    print_line: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Train every run that is not finished.

    After an interruption, calling it again continues the sweep.

    Args:
        planned: The runs, as `probmask.sweeps.grid.load_grid` returns them.
        out: Directory of the sweep.
        jobs: Number of runs to train in parallel.
        records: Files and directories with records of runs that count as finished.
        retry: Train runs again that failed before.
        ray: Address of a Ray cluster, or "local"; None trains in processes of this machine.
        live: Show a live table in the terminal.
        print_line: Function that prints a line about every event.

    Returns:
        The finished, failed and remaining runs.

    Raises:
        InputError: A data set is missing, ``out`` cannot be used, or Ray cannot be reached.
    """
    directory = SweepDirectory(out)
    remaining = make_plan(planned, directory, records=records, retry=retry).jobs
    # Check data or cluster first, so that a sweep that cannot run creates nothing.
    with _backend(remaining, jobs, ray) as run_jobs, directory.locked():
        plan = make_plan(planned, directory, records=records, retry=retry)
        directory.write_missing_records(planned)
        if plan.jobs:
            progress = SweepProgress(
                len(planned),
                done=len(plan.finished),
                failed=len(plan.failed),
                print_line=print_line,
            )
            with live_table(progress) if live else nullcontext():
                run_jobs(plan.jobs, directory, progress)
        return make_plan(planned, directory, records=records)


@contextmanager
def _backend(jobs: Sequence[Job], parallel: int, ray: str | None) -> Iterator[_RunJobs]:
    """Yield the function that trains jobs, after checking that it can."""
    if ray is None:
        for config in _one_per_data_set(jobs):
            load_run_data(config)
        for config in _one_per_start(jobs):
            _check_start(config)
        yield partial(run_locally, parallel=parallel)
    else:
        with connected(ray) as cluster:
            shared = parallel if ray == "local" else None
            yield partial(run_on_ray, ray=cluster, parallel=shared)


def missing_data(jobs: Sequence[Job], *, download: bool) -> list[str]:
    """Return a message for every data set and file of initial weights that the jobs lack.

    With ``download``, a missing data set is listed as one that would be downloaded first.
    """
    messages = []
    for config in _one_per_data_set(jobs):
        try:
            if download and not is_downloaded(config.data, config.data_dir):
                messages.append(f"--data {config.data}: is missing; --download fetches it first.")
            else:
                load_run_data(config)
        except InputError as error:
            messages.append(str(error))
    for config in _one_per_start(jobs):
        try:
            _check_start(config)
        except InputError as error:
            messages.append(str(error))
    return list(dict.fromkeys(messages))


def _one_per_data_set(jobs: Sequence[Job]) -> Iterator[TrainConfig]:
    seen = []
    for job in jobs:
        config = job.planned.config
        key = (config.data, config.data_dir, dict(config.data_args), config.select_on)
        if key not in seen:
            seen.append(key)
            yield config


def _one_per_start(jobs: Sequence[Job]) -> Iterator[TrainConfig]:
    """Yield a configuration for each file of initial weights; resumed runs need none."""
    configs = [job.planned.config for job in jobs if not job.resume]
    yield from {(each.init, each.init_sha256): each for each in configs if each.init}.values()


def _check_start(config: TrainConfig) -> None:
    assert config.init is not None
    check_digest(config.init, config.init_sha256)
