"""What `probmask sweep` does: find out what is left of a grid, and train it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from probmask.data import is_fetched
from probmask.errors import InputError
from probmask.sweeps.grid import Planned
from probmask.sweeps.local_processes import run_locally
from probmask.sweeps.sweep_directory import Job, Plan, SweepDirectory, make_plan
from probmask.sweeps.sweep_progress import Board, LiveBoard
from probmask.training.config import TrainConfig
from probmask.training.run import load_run_data

_RunJobs = Callable[[Sequence[Job], SweepDirectory, Board], None]


def run_sweep(
    planned: Sequence[Planned],
    out: Path,
    *,
    jobs: int = 1,
    records: Sequence[Path] = (),
    retry: bool = False,
    ray: str | None = None,
    live: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Train every run that is not finished, ``jobs`` at a time; return what has become of them.

    Records under ``records`` count as finished runs too. Runs that failed before are left alone
    without ``retry``. An interrupted sweep goes on when it is called again.
    """
    directory = SweepDirectory(out)
    wanted = make_plan(planned, directory, records=records, retry=retry).jobs
    # Before anything is made: what cannot be trained leaves nothing behind.
    with _workshop(wanted, jobs, ray) as run, directory.locked():
        plan = make_plan(planned, directory, records=records, retry=retry)
        directory.put_missing_records(planned)
        if plan.jobs:
            make = LiveBoard if live else Board
            board = make(len(planned), done=len(plan.finished), failed=len(plan.failed), say=say)
            with board:
                run(plan.jobs, directory, board)
        return make_plan(planned, directory, records=records)


@contextmanager
def _workshop(jobs: Sequence[Job], parallel: int, ray: str | None) -> Iterator[_RunJobs]:
    """What trains the jobs, as soon as it is known that it can."""
    if ray is None:
        check_data(jobs)
        yield partial(run_locally, parallel=parallel)
    else:
        from probmask.sweeps.ray_cluster import connected, run_on_ray

        with connected(ray) as cluster:
            shared = parallel if ray == "local" else None
            yield partial(run_on_ray, ray=cluster, parallel=shared)


def check_data(jobs: Sequence[Job]) -> None:
    """Load all data sets once, so that one that is not there is said once, before anything runs."""
    for config in _one_per_data_set(jobs):
        load_run_data(config)


def missing_data(jobs: Sequence[Job], *, download: bool) -> list[str]:
    """Say of each data set that the jobs could not be trained on now what is amiss.

    With ``download`` one that is not there would be fetched first.
    """
    said = []
    for config in _one_per_data_set(jobs):
        try:
            if download and not is_fetched(config.data, config.data_dir):
                said.append(f"--data {config.data}: is not there; --download fetches it first.")
            else:
                load_run_data(config)
        except InputError as error:
            said.append(str(error))
    return list(dict.fromkeys(said))


def _one_per_data_set(jobs: Sequence[Job]) -> Iterator[TrainConfig]:
    seen = []
    for job in jobs:
        config = job.planned.config
        key = (config.data, config.data_dir, dict(config.data_args), config.select_on)
        if key not in seen:
            seen.append(key)
            yield config
