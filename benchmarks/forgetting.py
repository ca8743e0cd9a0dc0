"""When it pays to forget what the weights began with, and when not.

    python benchmarks/forgetting.py
    python benchmarks/forgetting.py --data-dir DIR

Trains ProbMask's default recipe with and without forgetting (`forget_by` 0.5 and 0), at learning
rates and lengths between those that hardly move a weight and the usual ones: the demo's network on
the embedded digits, and with the directory of CIFAR-10 the network of the leaderboard on 10,000 of
its images, at 98 % sparsity. Accuracy is on validation images, the mean over seeds. What decides
by default is the column *travel*: updates · learning rate / (1 - momentum).
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import probmask
from probmask.errors import InputError
from probmask.training.config import load_config

DIGITS: dict[str, Any] = {"data": "digits", "model": "smallconv", "batch_size": 64}
CIFAR10: dict[str, Any] = {
    "data": "cifar10",
    "data_args": {"train_images": 10_000, "validation_images": 10_000},
    "model": "resnet14",
    "model_args": {"stem_stride": 2},
    "batch_size": 128,
    "channels_last": True,
}


@dataclass(frozen=True)
class Condition:
    """How to train: on what, at which rate, for how long."""

    common: dict[str, Any]
    updates_per_epoch: int
    rate: float
    momentum: float
    epochs: int

    @property
    def updates(self) -> int:
        """Of the whole training."""
        return self.epochs * self.updates_per_epoch

    @property
    def travel(self) -> float:
        """How far a gradient of one would carry a weight."""
        return self.updates * self.rate / (1 - self.momentum)

    def accuracy(self, forget_by: float, options: argparse.Namespace, seed: int) -> float:
        """On validation images, in percent."""
        given = {
            **self.common,
            "epochs": self.epochs,
            "optimizer": {"lr": self.rate, "momentum": self.momentum, "weight_decay": 5e-4},
            "method": {"name": "probmask", "sparsity": options.sparsity, "forget_by": forget_by},
            "seed": seed,
            "threads": options.threads,
            "tensorboard": False,
            "dense_twin": False,
        }
        if self.common is CIFAR10:
            given["data_dir"] = options.data_dir
        with tempfile.TemporaryDirectory() as folder:
            done = probmask.train(load_config(None, list(given.items())), out=Path(folder) / "run")
        return float(done.record["selection"]["accuracy"])


ON_DIGITS = [
    Condition(DIGITS, 20, rate, momentum, epochs)
    for rate, momentum, epochs in (
        (0.003, 0.9, 15),
        (0.01, 0.0, 50),
        (0.1, 0.9, 2),
        (0.01, 0.9, 15),
        (0.03, 0.9, 15),
        (0.1, 0.9, 15),
    )
]
ON_CIFAR10 = [
    Condition(CIFAR10, 78, rate, 0.9, epochs)
    for rate, epochs in ((0.02, 2), (0.01, 12), (0.1, 2), (0.1, 4))
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", metavar="DIR", help="of CIFAR-10; without it, digits only")
    parser.add_argument("--sparsity", type=float, default=0.98, metavar="S")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    options = parser.parse_args(arguments)
    print("| data | rate | momentum | updates | travel | forgetting, % | keeping, % |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for condition in ON_CIFAR10 if options.data_dir else ON_DIGITS:
        try:
            found = [
                statistics.fmean(condition.accuracy(by, options, seed) for seed in options.seeds)
                for by in (0.5, 0.0)
            ]
        except InputError as error:
            parser.error(str(error))
        cells = [condition.common["data"], f"{condition.rate:g}", f"{condition.momentum:g}"]
        cells += [f"{condition.updates:,}", f"{condition.travel:.0f}"]
        print(f"| {' | '.join([*cells, *(f'{x:.1f}' for x in found)])} |", flush=True)


if __name__ == "__main__":
    main()
