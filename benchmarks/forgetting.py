"""Measure when fading out the initial values of the weights improves accuracy.

    python benchmarks/forgetting.py --sparsity 0.9
    python benchmarks/forgetting.py --data-dir DIR --seeds 0

Trains TiedProbMask with and without fading of the initial values (`forget_by` 0.5 and 0), at
learning rates and numbers of epochs that range from barely moving the weights to the usual ones. It
uses the embedded digits, with the demo's network and a tiny one with PyTorch's initialization; or,
with the directory of CIFAR-10, the leaderboard's network on 10,000 images. Accuracy is measured on
validation images and averaged over the seeds. *Travel* is updates · learning rate / (1 - momentum).
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import probmask
from probmask.errors import InputError, NonFiniteError
from probmask.training.config import load_config

_MOMENTUM = 0.9
_CIFAR10: dict[str, Any] = {
    "data_args": {"train_images": 10_000, "validation_images": 10_000},
    "model_args": {"stem_stride": 2},
    "batch_size": 128,
    "channels_last": True,
}


@dataclass(frozen=True)
class Condition:
    """Data set, network, learning rate and number of epochs of a run."""

    data: str
    model: str
    rate: float
    epochs: int

    def train(self, forget_by: float, seed: int, options: argparse.Namespace) -> tuple[int, float]:
        """Train; return the number of updates and the validation accuracy in percent."""
        given = {
            "data": self.data,
            "model": self.model,
            "epochs": self.epochs,
            "optimizer": {"lr": self.rate, "momentum": _MOMENTUM, "weight_decay": 5e-4},
            "method": {
                "name": "probmask-tied",
                "sparsity": options.sparsity,
                "forget_by": forget_by,
            },
            "seed": seed,
            "threads": 1,
            "tensorboard": False,
            "dense_twin": False,
        }
        if self.data == "cifar10":
            given |= {"data_dir": options.data_dir, **_CIFAR10}
        with tempfile.TemporaryDirectory() as folder:
            done = probmask.train(load_config(None, list(given.items())), out=Path(folder) / "run")
        return done.record["updates"], done.record["selection"]["accuracy"]


def tiny(classes: int, channels: int) -> nn.Sequential:
    """Three narrow convolutions with BatchNorm and a classifier, as PyTorch initializes them."""
    layers: list[nn.Module] = []
    for width, stride in ((16, 1), (32, 2), (32, 2)):
        convolution = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


ON_DIGITS = [
    Condition("digits", model, rate, epochs)
    for model in ("smallconv", "forgetting:tiny")
    for rate, epochs in ((0.003, 15), (0.01, 15), (0.1, 2), (0.1, 15))
]
ON_CIFAR10 = [
    Condition("cifar10", "resnet14", rate, epochs)
    for rate, epochs in ((0.02, 2), (0.01, 12), (0.1, 2), (0.1, 4))
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all conditions and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", metavar="DIR", help="directory of CIFAR-10 (default: train on the digits)"
    )
    parser.add_argument("--sparsity", type=float, default=0.98, metavar="S")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], metavar="N")
    options = parser.parse_args(arguments)
    print("| network | rate | updates | travel | forgetting, % | keeping, % |")
    print("|---|---:|---:|---:|---:|---:|")
    for condition in ON_CIFAR10 if options.data_dir else ON_DIGITS:
        found = []
        for forget_by in (0.5, 0.0):
            try:
                runs = [condition.train(forget_by, seed, options) for seed in options.seeds]
            except (InputError, NonFiniteError) as error:
                parser.error(str(error))
            updates = runs[0][0]
            found.append(statistics.fmean(accuracy for _, accuracy in runs))
        travel = updates * condition.rate / (1 - _MOMENTUM)
        cells = [condition.model.rpartition(":")[2], f"{condition.rate:g}", f"{updates:,}"]
        cells += [f"{travel:.0f}", *(f"{accuracy:.1f}" for accuracy in found)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
