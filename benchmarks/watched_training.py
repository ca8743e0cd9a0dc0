"""Train as an experiment does, and measure the network after chosen updates.

The measurements do not change the training: they use copies of the network, and the random numbers
of a run are functions of its seed and the update.
"""

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from torch import nn

from probmask.analysis.experiments import find_experiment
from probmask.data import DataSource
from probmask.masking.batchnorm import reestimate_batchnorm
from probmask.sweeps.grid import PlannedRun, expand
from probmask.training.config import TrainConfig
from probmask.training.evaluation import evaluate_model
from probmask.training.progress import Quiet
from probmask.training.run import TrainingRun
from probmask.training.run_directory import RunDirectory

_IMAGES_FOR_BATCHNORM = 50_000  # as many as a run uses when it finishes


def plan(
    experiment: str, grid: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]
) -> list[PlannedRun]:
    """Return the runs of a grid under the conditions of an experiment at laptop scale."""
    common = find_experiment(experiment).sweep("laptop")["run"]
    return expand({"run": common, "grid": [dict(grid)]}, overrides, source=experiment)


def watch(
    config: TrainConfig,
    data: DataSource,
    updates: Collection[int],
    measure: Callable[[TrainingRun], None],
) -> dict[str, Any]:
    """Train; call ``measure`` after each of the given numbers of updates; return the record."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with tempfile.TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        run = TrainingRun(config, data)
        run.prepare(Fabric(accelerator="cpu", devices=1), data)

        def measure_if_due(*_: Any) -> None:
            if run.loop.step + 1 in updates:
                measure(run)

        run.loop.optimizer.register_step_post_hook(measure_if_due)
        run.train(directory, Quiet("", 0))
        return run.finish(directory)


def accuracy(model: nn.Module, config: TrainConfig, data: DataSource) -> float:
    """Return the accuracy in percent, with re-estimated BatchNorm statistics.

    Validation images are used if the run holds some out (``select_on = "val"``), else test images.
    """
    batches = data.training(config.epochs, batch_size=config.batch_size, seed=config.seed)
    some = islice(batches, max(1, _IMAGES_FOR_BATCHNORM // config.batch_size))
    reestimate_batchnorm(model, (batch.inputs for batch in some))
    part: Literal["val", "test"] = "val" if config.select_on == "val" else "test"
    return evaluate_model(model, data, part=part).accuracy
