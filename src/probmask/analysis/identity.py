"""Telling, before a run is trained, which records are of the same run."""

from probmask.analysis.deciding import deciding_settings, digest
from probmask.training.config import TrainConfig, make_method, to_table


def identity_of(config: TrainConfig) -> str:
    """The identity that the record of a run with this configuration will have.

    Everything counts that decides the result, with defaults filled in. What does not: where the
    data lies and how it is read, checkpoints and logs, the machine (accelerator, devices, strategy,
    threads), versions, and whether a dense twin was trained beside it. Of the user's own data
    ("folder", "npz") the last part of its path stands for it.
    """
    settings = {"name": config.method["name"], **make_method(config).full_settings()}
    return digest(deciding_settings(to_table(config), settings))
