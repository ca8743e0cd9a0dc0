"""Compare the accuracy of the soft mask of TiedProbMask with that of the hard mask.

    python benchmarks/soft_and_hard.py short_budget --data-dir DIR --sparsity 0.98 0.99 --seeds 0 1

Trains TiedProbMask under the conditions of an experiment (`probmask reproduce --list`, at
laptop scale) and measures the network three times: before the choice becomes final (`choose_at`),
before the mask is frozen (`freeze_at`), and at the end. Each time it computes once with w s, as in
training, and once with w wherever s > 0, with re-estimated BatchNorm statistics. Once the
probabilities have converged, the two agree. Validation images are used if the experiment holds some
out (`select_on = "val"`), else test images.
"""

import argparse
import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

from probmask.data import DataSource
from probmask.errors import InputError
from probmask.masking.parametrization import masked_parameters
from probmask.methods.probmask import TiedProbMask
from probmask.methods.probmask.tied_weight import TiedWeight
from probmask.training.config import TrainConfig, make_method
from probmask.training.run import TrainingRun, load_run_data
from watched_training import accuracy, plan, watch

_HARD = 1e9  # the power at which s is 1 as soon as a weight exceeds the threshold


class Measured(NamedTuple):
    """Accuracies with soft and hard mask, and undecided probabilities per kept weight, in %."""

    updates: int
    soft: float
    hard: float
    undecided: float


def measure(config: TrainConfig, data: DataSource) -> list[Measured]:
    """Train; measure before the final choice, before the masks are frozen, and at the end."""
    found: list[Measured] = []
    total = config.epochs * data.steps_per_epoch(config.batch_size)
    updates = steps_to_measure(config, total)
    watch(config, data, updates, lambda run: found.append(measure_now(run, config, data)))
    return found


def steps_to_measure(config: TrainConfig, total: int) -> set[int]:
    """Return the numbers of updates after which to measure."""
    method = make_method(config)
    assert isinstance(method, TiedProbMask)
    chosen, frozen = method.chosen_at * total, method.freeze_at * total
    return {math.ceil(chosen) - 1, math.ceil(frozen) - 1, total}


def measure_now(run: TrainingRun, config: TrainConfig, data: DataSource) -> Measured:
    """Measure both masks on copies of the current network."""
    undecided = 100 * run.loop.sparsifier.metrics()["undecided_per_kept"]
    soft, hard = copy.deepcopy(run.model), copy.deepcopy(run.model)
    for *_, masked in masked_parameters(hard):
        assert isinstance(masked, TiedWeight)
        masked.power.fill_(_HARD)
    accuracies = (accuracy(model, config, data) for model in (soft, hard))
    return Measured(run.loop.step + 1, *accuracies, undecided)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "experiment", help="the experiment that gives the conditions, such as short_budget"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="directory of its data")
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.98], metavar="S")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    options = parser.parse_args(arguments)
    grid = {"sparsity": options.sparsity, "seed": options.seeds, "method": "probmask-tied"}
    overrides = [] if options.data_dir is None else [("data_dir", options.data_dir)]
    try:
        runs = plan(options.experiment, grid, overrides)
        planned = [(run.config, load_run_data(run.config)) for run in runs]
    except InputError as error:
        parser.error(str(error))
    print("| sparsity | seed | updates | soft mask, % | hard mask, % | undecided per kept, % |")
    print("|---:|---:|---:|---:|---:|---:|")
    for config, data in planned:
        for found in measure(config, data):
            sparsity = config.method["sparsity"]
            cells = [f"{100 * sparsity:g}", str(config.seed), f"{found.updates:,}"]
            cells += [f"{x:.2f}" for x in (found.soft, found.hard, found.undecided)]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
