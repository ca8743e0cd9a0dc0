"""What `probmask sweep` does: find out what is left of a grid, and train it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from probmask.sweeps.board import Board, LiveBoard
from probmask.sweeps.data_check import check_data
from probmask.sweeps.grid import Planned
from probmask.sweeps.local import run_locally
from probmask.sweeps.plan import Job, Plan, SweepDirectory, make_plan

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
        from probmask.sweeps.on_ray import connected, run_on_ray

        with connected(ray) as cluster:
            shared = parallel if ray == "local" else None
            yield partial(run_on_ray, ray=cluster, parallel=shared)
