"""Claim: two threads are never slower than one, at batch 1.

Twenty networks (`twenty_networks.py`), dense and with random masks, compiled with
`probmask.runtime.compile(threads=1)` and with `threads=2`. PyTorch, which runs the operations
without a kernel, has one thread in both. Times are wall-clock time, so run it on a machine that
runs nothing else. The two take turns of 20 ms, and the table has medians over turns. A cell above
the limit is measured again, four times as long; the second measurement counts. Cells have the time
with two threads as a fraction of that with one: 0.5 is twice as fast.

    python benchmarks/two_threads.py
    python benchmarks/two_threads.py --networks resnet20 ViT --sparsities 0.9

The script exits with 1 if a cell is above 1.05.
"""

import argparse
import gc
import logging
import time

import torch

from never_slower import LIMIT, finish, inputs, masked, ratio
from probmask.runtime.lower.export import export
from probmask.runtime.lower.lowering import lower
from probmask.runtime.run.engine import Engine
from probmask.runtime.run.threads import Threads
from twenty_networks import TWENTY_NETWORKS


def measure(name: str, sparsities: list[float], seconds: float) -> dict[tuple[int, float], float]:
    """Return the ratios of a network by batch size, which is 1, and sparsity."""
    found = {}
    exported = export(masked(name, 0.0), (inputs(name, 2),))
    x = inputs(name, 1)
    for sparsity in sparsities:
        model = masked(name, sparsity)
        exported.program.state_dict.update(model.state_dict())
        one, two = (Engine(lower(exported), (x,), Threads(count), model) for count in (1, 2))
        for engine in (one, two):
            engine.use_fastest()
        pair = (lambda e=two: e(x)), (lambda e=one: e(x))
        value = ratio(*pair, seconds, time.perf_counter)
        if value > LIMIT:
            value = ratio(*pair, 4 * seconds, time.perf_counter)
        found[1, sparsity] = value
        print(f"{name}, {100 * sparsity:g} %: {value:.3f}", flush=True)
        gc.collect()
    return found


def main() -> None:
    """Measure the networks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(TWENTY_NETWORKS)
    parser.add_argument("--networks", nargs="+", default=names, choices=names)
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0, 0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--seconds", type=float, default=0.6, help="seconds per cell")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = {
            name: measure(name, options.sparsities, options.seconds) for name in options.networks
        }
    finish(rows, options.sparsities, "wall-clock time, batch 1")


if __name__ == "__main__":
    main()
