"""Claim: a compiled network is never slower than PyTorch by more than 5 %.

Twenty networks (`twenty_networks.py`), dense and with random masks, at batch 1 and a larger batch,
on one thread: `probmask.runtime.compile` with its defaults against the module itself under
`torch.no_grad()`. Times are processor time, so other programs on the machine count little; the two
take turns of 20 ms, a turn repeats calls without reading the clock in between, and the table has
medians over turns. A cell above the limit is measured again, four times as long; the second
measurement counts. Cells have the engine's time as a fraction of PyTorch's: 0.5 is twice as fast.

    python benchmarks/never_slower.py
    python benchmarks/never_slower.py --networks resnet20 ViT --sparsities 0 0.9 --batches 1

The script exits with 1 if a cell is above 1.05.
"""

import argparse
import gc
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from probmask.runtime.lower.export import export
from probmask.runtime.lower.lowering import lower
from probmask.runtime.run.engine import Engine
from probmask.runtime.run.threads import Threads
from probmask.runtime.speed import mask_at_random_
from probmask.training.record import cpu_name
from twenty_networks import TWENTY_NETWORKS

LIMIT = 1.05
_TURN = 0.02


Clock = Callable[[], float]


def ratio(
    engine: Callable[[], Any],
    model: Callable[[], Any],
    seconds: float,
    clock: Clock = time.process_time,
) -> float:
    """Return the engine's time as a fraction of the model's: the median over pairs of turns."""
    pair = (engine, model)
    calls = [_calls_per_turn(function, clock) for function in pair]
    ratios: list[float] = []
    started = clock()
    while len(ratios) < 5 or clock() - started < seconds:
        mine, theirs = (
            _turn(function, count, clock) for function, count in zip(pair, calls, strict=True)
        )
        ratios.append(mine / theirs)
    return statistics.median(ratios)


def _calls_per_turn(function: Callable[[], Any], clock: Clock) -> int:
    taken = min(_turn(function, 2, clock) for _ in range(3))
    return max(1, round(_TURN / taken))


def _turn(function: Callable[[], Any], calls: int, clock: Clock) -> float:
    """Return the seconds of one call; the first call is not timed, because its caches are cold."""
    function()
    started = clock()
    for _ in range(calls):
        function()
    return (clock() - started) / calls


def masked(name: str, sparsity: float) -> nn.Module:
    """Return a network with random masks, in evaluation mode."""
    torch.manual_seed(0)
    model = TWENTY_NETWORKS[name].build().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers that lose all weights
        x = inputs(name, 1)
        mask_at_random_(model, sparsity, x.shape[1:] if x.is_floating_point() else ())
    return model.requires_grad_(False)


def inputs(name: str, batch: int) -> Tensor:
    """Return random inputs, the same at each call."""
    return TWENTY_NETWORKS[name].inputs(batch, torch.Generator().manual_seed(0))


def measure(options: argparse.Namespace, name: str) -> dict[tuple[int, float], float]:
    """Return the ratios of a network by batch size and sparsity, and print a line for each."""
    found = {}
    exported = None
    for sparsity in options.sparsities:
        model = masked(name, sparsity)
        if exported is None:
            exported = export(model, (inputs(name, 2),))
        exported.program.state_dict.update(model.state_dict())
        for batch in options.batches:
            x = inputs(name, batch)
            engine = Engine(lower(exported), (x,), Threads(1), model)
            engine.use_fastest()
            pair = (lambda e=engine, x=x: e(x)), (lambda m=model, x=x: m(x))
            value = ratio(*pair, options.seconds)
            if value > LIMIT:
                value = ratio(*pair, 4 * options.seconds)
            found[batch, sparsity] = value
            used = _places(engine)
            print(f"{name}, batch {batch}, {100 * sparsity:g} %: {value:.3f}, {used}", flush=True)
        gc.collect()
    return found


def _places(engine: Engine) -> str:
    if engine.choices.model:
        return "the model"
    return f"{len(engine.choices.sparse)} of {len(engine.network.nodes)} nodes on the kernels"


def print_table(rows: dict[str, dict[tuple[int, float], float]], sparsities: list[float]) -> None:
    """Print a Markdown table: for each network the larger ratio of both batches, and the worst."""
    shares = [f"{100 * sparsity:g} %" if sparsity else "dense" for sparsity in sparsities]
    print(f"\n| network | {' | '.join(shares)} | worst |")
    print(f"|---|{'---:|' * (len(shares) + 1)}")
    for name, found in rows.items():
        cells = [
            max(value for (_, sparsity), value in found.items() if sparsity == wanted)
            for wanted in sparsities
        ]
        batch, sparsity = max(found, key=lambda key: found[key])
        worst = f"{found[batch, sparsity]:.2f} (batch {batch}, {100 * sparsity:g} %)"
        print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {worst} |")


def finish(
    rows: dict[str, dict[tuple[int, float], float]], sparsities: list[float], clock: str
) -> NoReturn:
    """Print the table and the number of cells above the limit; exit with 1 if there are any."""
    print(f"\n{cpu_name() or platform.machine()}, {os.cpu_count()} cores, {date.today()}, {clock}")
    print_table(rows, sparsities)
    slow = sum(value > LIMIT for found in rows.values() for value in found.values())
    count = sum(len(found) for found in rows.values())
    print(f"\n{slow} of {count} cells are above {LIMIT}.")
    sys.exit(1 if slow else 0)


def main() -> None:
    """Measure the networks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(TWENTY_NETWORKS)
    parser.add_argument("--networks", nargs="+", default=names, choices=names)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument(
        "--sparsities", nargs="+", type=float, default=[0, 0.5, 0.8, 0.9, 0.95, 0.98]
    )
    parser.add_argument("--seconds", type=float, default=0.6, help="seconds per cell")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = {name: measure(options, name) for name in options.networks}
    finish(rows, options.sparsities, "processor time, one thread")


if __name__ == "__main__":
    main()
