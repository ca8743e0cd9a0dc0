"""Compare the results of the sparse engine with PyTorch's, on whole networks.

The masks are random, or those of trained artifacts. For each network, sparsity, batch and number of
threads it prints the largest difference relative to the largest output of PyTorch, with every layer
on the sparse kernels. It exits with 1 if a difference exceeds the bound of docs/performance.md.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --artifacts runs/*/model.safetensors
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from probmask import models, runtime
from probmask.artifact import load, read
from probmask.artifact.export import input_shape_of
from probmask.models import MODELS
from probmask.runtime.plan.partition import LANES, Choices, candidates, first_small, steps_of
from probmask.runtime.run.engine import Engine
from probmask.runtime.speed import mask_at_random_

BOUND = 2e-5
NETWORKS = ("conv4", "vgg19", "resnet32", "mobilenetv1", "resnet50")
# Large networks use at most this batch, except with --large: a batch of 64 takes minutes.
LARGE_SIDE, LARGE_BATCH = 224, 3


def main() -> int:
    """Compare all networks; return 1 if a difference exceeds the bound."""
    options = arguments()
    print("network                           kept   batch  threads  on kernels  difference")
    worst = 0.0
    for name, model, shape in networks(options):
        kept = kept_fraction(model)
        for threads in options.threads:
            example = inputs(shape, 2)
            engine = runtime.compile(model, example, threads=threads, layers="sparse")
            for batch in options.batches:
                if not options.large and max(shape) >= LARGE_SIDE and batch > LARGE_BATCH:
                    continue
                in_groups(engine, batch)
                found = difference(engine, model, inputs(shape, batch))
                worst = max(worst, found)
                on = f"{len(engine.choices.sparse)} of {len(engine.network.nodes)}"
                where = f"{batch:6d}  {threads:7d}  {on:>10}"
                print(f"{name:32s}  {kept:5.1%}  {where}  {found:10.1e}", flush=True)
    position = "within" if worst <= BOUND else "ABOVE"
    print(f"largest: {worst:.1e}, {position} the bound of {BOUND:.0e} in docs/performance.md")
    return int(worst > BOUND)


def networks(options: argparse.Namespace):
    """Yield the name, the model and the input shape of each network."""
    for path in options.artifacts:
        shape = input_shape_of(path, read(path), None, None)
        yield f"{path.parent.name}/{path.name}", load(path), shape
    for name in () if options.artifacts else options.networks:
        for sparsity in options.sparsities:
            torch.manual_seed(0)
            model = getattr(models, name)()
            shape = MODELS[name].image_shape
            mask_at_random_(model, sparsity, shape)
            yield f"{name} at {'×'.join(map(str, shape))}", model, shape


def in_groups(engine: Engine, batch: int) -> None:
    """Let all layers with small planes compute several images together, if the batch allows it.

    Otherwise measurements decide which layers do so. These layers can differ most from PyTorch.
    """
    steps = [s for s in steps_of(engine.network, candidates(engine.network)) if s.sparse]
    lone = {s.nodes[0].name: first_small(s.nodes) for s in steps} if batch >= LANES else {}
    engine.use(Choices(engine.choices.sparse, lone))


def difference(engine: Engine, model: nn.Module, x: Tensor) -> float:
    """Return the largest difference from PyTorch, relative to PyTorch's largest output.

    It is infinite if one result is finite where the other is not. If all outputs are zero, because
    random masks disconnected the network, it is the absolute difference.
    """
    with torch.no_grad():
        expected = model.eval()(x)
    found, finite = engine(x), expected.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return math.inf
    largest = max([0.0, *expected[finite].abs().tolist()])
    return max([0.0, *(found - expected)[finite].abs().tolist()]) / (largest or 1.0)


def kept_fraction(model: nn.Module) -> float:
    """Return the fraction of nonzero weights of convolutions and linear layers."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(int(w.count_nonzero()) for w in weights) / sum(w.numel() for w in weights)


def inputs(shape: tuple[int, ...], batch: int) -> Tensor:
    """Return normal noise, the same for the same batch."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.98])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 3, 64])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--large",
        action="store_true",
        help=f"also use batches above {LARGE_BATCH} for images of {LARGE_SIDE} × {LARGE_SIDE}",
    )
    parser.add_argument(
        "--artifacts", nargs="+", type=Path, default=[], help="compare these artifacts instead"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
