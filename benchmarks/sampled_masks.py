"""Compare masks sampled from ProbMask's probabilities with the expected mask and the exact top-K.

    python benchmarks/sampled_masks.py measure paper_claims --data-dir DIR \
        --out docs/results/sampled_masks --records docs/results/paper_claims
    python benchmarks/sampled_masks.py table docs/results/sampled_masks

``measure`` trains ProbMask with the paper's recipe under the conditions of an experiment (`probmask
reproduce --list`, at laptop scale). After each fraction of the training in ``--at`` it measures the
network with these masks, always with re-estimated BatchNorm statistics:

top       the exact top-K of the probabilities s
expected  every weight times its probability, w s
sampled   ten masks m ~ Bernoulli(s)
relaxed   ten relaxed masks, as in training, of the same noise and the temperature at that update

It writes a JSON file per run to ``--out``, and the record of the run, which is the same as without
the measurements, to ``--records``. ``table`` prints the files as a table in Markdown.
"""

import argparse
import copy
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probmask.analysis.identity import method_label
from probmask.analysis.records import write_compact
from probmask.cli.arguments import add_assignments, assignments
from probmask.core.relaxation import bernoulli_mask, relaxed_mask
from probmask.data import DataSource
from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.masking.parametrization import masked_parameters
from probmask.methods.probmask.learned import ProbMasker
from probmask.training.config import TrainConfig
from probmask.training.run import TrainingRun, load_run_data
from watched_training import accuracy, plan, watch

_SAMPLES = 10
_METHOD = {"name": "probmask", "recipe": "paper", "select": "top"}
_HEADINGS = (
    "method",
    "sparsity",
    "updates",
    "undecided per kept",
    "top-K",
    "expected mask",
    "relaxed masks",
    "sampled masks",
    "sampled weights",
)


@torch.no_grad()
def measure_masks(run: TrainingRun, config: TrainConfig, data: DataSource) -> dict[str, Any]:
    """Measure the masks on copies of the current network."""
    masker = masker_of(run.model)
    probs = [prob.detach() for prob in masker.probs]

    def measured(multipliers: Sequence[Tensor]) -> float:
        return accuracy(multiplied(run.model, multipliers), config, data)

    noises = [noise_of(probs, number) for number in range(_SAMPLES)]
    samples = [list(map(bernoulli_mask, probs, noise)) for noise in noises]
    temperature = masker.masked[0].temperature
    return {
        "updates": run.loop.step + 1,
        **masker.metrics(),
        "keep": masker.keep,
        "adam": adam_steps(run, probs),
        "top": measured(masker.choose()),
        "expected": measured(probs),
        "relaxed": [
            measured([relaxed_mask(*pair, temperature) for pair in zip(probs, noise, strict=True)])
            for noise in noises
        ],
        "sampled": [measured(sample) for sample in samples],
        "sampled_weights": [sum(int(mask.sum()) for mask in sample) for sample in samples],
    }


def adam_steps(run: TrainingRun, probs: Sequence[Tensor]) -> dict[str, float]:
    """Return mean and RMS of Adam's steps of the undecided probabilities, per unit of its rate.

    The mean is the common drift, which the projection takes back. Independent gradients of mean
    zero have an RMS of √((1 - β₁) / (1 + β₁)) = 0.229.
    """
    (optimizer,) = run.loop.sparsifier.own_optimizers
    steps = []
    for parameter, prob in zip(optimizer.param_groups[0]["params"], probs, strict=True):
        state = optimizer.state[parameter]
        undecided = (prob > 0.05) & (prob < 0.95)
        steps.append((-state["exp_avg"] / state["exp_avg_sq"].sqrt().add(1e-8))[undecided])
    joined = torch.cat(steps)
    return {"mean": float(joined.mean()), "rms": float(joined.square().mean().sqrt())}


def noise_of(probs: Sequence[Tensor], number: int) -> list[Tensor]:
    """Return logistic noise of the shapes of the probabilities."""
    generator = torch.Generator().manual_seed(number)
    uniforms = [torch.rand(p.shape, generator=generator, dtype=torch.float64) for p in probs]
    return [torch.logit(u, eps=2**-53).float() for u in uniforms]


def masker_of(model: nn.Module) -> ProbMasker:
    """Return the masker of the model's weights."""
    *_, masked = next(iter(masked_parameters(model)))
    assert isinstance(masked.source, ProbMasker)
    return masked.source


def multiplied(model: nn.Module, multipliers: Sequence[Tensor]) -> nn.Module:
    """Return a copy of a model whose weights are multiplied instead of masked."""
    copied = copy.deepcopy(model)
    masker = masker_of(copied)
    masker.keep_everything()
    for weight, multiplier in zip(masker.weights, multipliers, strict=True):
        weight.mul_(multiplier)
    return copied


def measure(options: argparse.Namespace) -> None:
    """Train the runs and write their measurements and records."""
    grid = {"sparsity": options.sparsity, "seed": options.seeds, "method": _METHOD}
    directory = [] if options.data_dir is None else [("data_dir", options.data_dir)]
    for planned in plan(options.experiment, grid, [*assignments(options), *directory]):
        config, found = planned.config, list[dict[str, Any]]()
        data = load_run_data(config)
        total = config.epochs * data.steps_per_epoch(config.batch_size)

        def keep_measurement(
            run: TrainingRun,
            config: TrainConfig = config,
            data: DataSource = data,
            found: list[dict[str, Any]] = found,
        ) -> None:
            found.append(measure_masks(run, config, data))
            print(json.dumps(found[-1]), flush=True)

        record = watch(
            config, data, {math.ceil(fraction * total) for fraction in options.at}, keep_measurement
        )
        result = {
            "model": config.model,
            "data": config.data,
            "label": method_label(record["method"]),
            "sparsity": record["sparsity"]["asked"],
            "seed": config.seed,
            "total_updates": total,
            "measured": found,
        }
        for folder in (options.out, options.records):
            folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1) + "\n"
        write_atomically(options.out / f"{planned.name}.json", text.encode(), overwrite=True)
        write_compact(record, options.records / f"{planned.name}.json")


def print_table(options: argparse.Namespace) -> None:
    """Print the measurements in a directory as a table."""
    print(f"| {' | '.join(_HEADINGS)} |")
    print(f"|---|{'---:|' * (len(_HEADINGS) - 1)}")
    results = [json.loads(path.read_text()) for path in sorted(options.results.glob("*.json"))]
    results.sort(key=lambda result: (result["sparsity"], result["label"], result["seed"]))
    for result in results:
        for found in result["measured"]:
            print(f"| {' | '.join(_cells(result, found))} |")


def _cells(result: dict[str, Any], found: dict[str, Any]) -> list[str]:
    return [
        result["label"],
        f"{100 * result['sparsity']:g} %",
        f"{found['updates']:,}",
        f"{found['undecided_per_kept']:.2f}",
        f"{found['top']:.2f}",
        f"{found['expected']:.2f}",
        _mean_and_deviation(found["relaxed"], 2),
        _mean_and_deviation(found["sampled"], 2),
        _mean_and_deviation(found["sampled_weights"], 0),
    ]


def _mean_and_deviation(values: Sequence[float], digits: int) -> str:
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return f"{mean:,.{digits}f} ± {deviation:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure", help="train and measure")
    measuring.add_argument("experiment", help="the experiment that gives the conditions")
    measuring.add_argument("--data-dir", metavar="DIR", help="directory of its data")
    measuring.add_argument("--sparsity", type=float, nargs="+", default=[0.98], metavar="S")
    measuring.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N")
    measuring.add_argument("--at", type=float, nargs="+", default=[0.6, 0.8, 1.0], metavar="F")
    measuring.add_argument("--out", type=Path, required=True, metavar="DIR")
    measuring.add_argument("--records", type=Path, required=True, metavar="DIR")
    add_assignments(measuring)
    measuring.set_defaults(command=measure)
    table = commands.add_parser("table", help="print the results as a table")
    table.add_argument("results", type=Path, metavar="DIR")
    table.set_defaults(command=print_table)
    options = parser.parse_args(arguments)
    try:
        options.command(options)
    except InputError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
