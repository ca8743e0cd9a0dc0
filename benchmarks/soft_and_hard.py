"""Accuracy with the probabilities as they are, and with the hard mask instead of them.

    python benchmarks/soft_and_hard.py RUN.toml --sparsity 0.98 0.99 --seeds 0 1

Trains ProbMask's default recipe to the last update and measures the network twice, BatchNorm
estimated anew both times: computing with w s, as it was trained, and with w wherever s > 0. Once
the probabilities have converged there is no difference. On validation images if the configuration
holds some out (`select_on = "val"`), else on test images.
"""

import argparse
import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from lightning_fabric import Fabric
from torch import nn

from probmask.data import DataSource
from probmask.masking.batchnorm import reestimate_batchnorm
from probmask.methods.tied import TiedWeight
from probmask.training.config import TrainConfig, load_config
from probmask.training.evaluate import evaluate_model
from probmask.training.loop import Training
from probmask.training.preparation import load_run_data
from probmask.training.progress import Quiet
from probmask.training.run_directory import RunDirectory

_HARD = 1e9  # the power at which s is 1 as soon as a weight exceeds the threshold


def measure(config: TrainConfig, data: DataSource) -> tuple[float, float, float]:
    """Accuracy with soft and hard mask in percent, and the undecided in percent of the kept."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    fabric = Fabric(accelerator="cpu", devices=1)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(config, data, RunDirectory(Path(folder)), fabric)
        training.run(Quiet("", 0))
    undecided = 100 * training.sparsifier.metrics()["undecided_per_kept"]
    soft, hard = training.model, copy.deepcopy(training.model)
    for module in hard.modules():
        if isinstance(module, TiedWeight):
            module.power.fill_(_HARD)
    batches = list(data.training(config.epochs, batch_size=config.batch_size, seed=config.seed))

    def accuracy(model: nn.Module) -> float:
        reestimate_batchnorm(model, (batch.images for batch in batches))
        part: Literal["val", "test"] = "val" if config.select_on == "val" else "test"
        return evaluate_model(model, data, part=part).accuracy

    return accuracy(soft), accuracy(hard), undecided


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the configuration of a run, TOML")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.98])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args(arguments)
    print("| sparsity | seed | soft mask, % | hard mask, % | undecided per kept, % |")
    print("|---:|---:|---:|---:|---:|")
    for sparsity in options.sparsity:
        for seed in options.seeds:
            method = {"name": "probmask", "sparsity": sparsity}
            config = load_config(options.run, [("method", method), ("seed", seed)])
            soft, hard, undecided = measure(config, load_run_data(config))
            row = f"| {100 * sparsity:g} | {seed} | {soft:.2f} | {hard:.2f} | {undecided:.2f} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
