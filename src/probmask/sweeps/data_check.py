"""Whether the data of a sweep's runs is there, before any of them is trained."""

from collections.abc import Iterator, Sequence

from probmask.data import is_fetched
from probmask.errors import InputError
from probmask.sweeps.plan import Job
from probmask.training.config import TrainConfig
from probmask.training.preparation import load_run_data


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
