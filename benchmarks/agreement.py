"""How far the engine's results are from PyTorch's, on whole networks: random masks or trained ones.

Prints, per network, sparsity, batch and number of threads, the largest difference relative to the
largest output of PyTorch's, with every layer on the sparse kernels; exits with 1 if one is above
what docs/performance.md promises.

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
from probmask.runtime.plan.choices import LANES, Choices, candidates, first_small
from probmask.runtime.plan.steps import steps_of
from probmask.runtime.run.engine import Engine
from probmask.runtime.speed import mask_at_random_

PROMISED = 2e-5
NETWORKS = ("conv4", "vgg19", "resnet32", "mobilenetv1", "resnet50")
# Images at once that the large networks are compared at unless asked otherwise: 64 take minutes.
LARGE_SIDE, LARGE_BATCH = 224, 3


def main() -> int:
    """Compare all that is asked for; 1 if anything is above the promise."""
    options = arguments()
    print("network                           kept   batch  threads  on kernels  difference")
    worst = 0.0
    for name, model, shape in networks(options):
        kept = share_of_weights(model)
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
    promise = "within" if worst <= PROMISED else "ABOVE"
    print(f"largest: {worst:.1e}, {promise} the {PROMISED:.0e} of docs/performance.md")
    return int(worst > PROMISED)


def networks(options: argparse.Namespace):
    """Each network with what to call it and the shape of its inputs."""
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
    """Let layers of small planes take images side by side where the batch has enough of them.

    Which layers do so is otherwise measured; all that may are those whose results can differ most.
    """
    steps = [s for s in steps_of(engine.network, candidates(engine.network)) if s.sparse]
    lone = {s.nodes[0].name: first_small(s.nodes) for s in steps} if batch >= LANES else {}
    engine.use(Choices(engine.choices.sparse, lone))


def difference(engine: Engine, model: nn.Module, x: Tensor) -> float:
    """The largest difference from PyTorch, relative to PyTorch's largest output.

    Infinite if one has a finite number where the other has none. A network whose random masks let
    nothing through gives zeros: then any difference counts as it is.
    """
    with torch.no_grad():
        expected = model.eval()(x)
    found, finite = engine(x), expected.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return math.inf
    largest = max([0.0, *expected[finite].abs().tolist()])
    return max([0.0, *(found - expected)[finite].abs().tolist()]) / (largest or 1.0)


def share_of_weights(model: nn.Module) -> float:
    """Of convolutions' and linear layers' weights, how many are not zero."""
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(int(w.count_nonzero()) for w in weights) / sum(w.numel() for w in weights)


def inputs(shape: tuple[int, ...], batch: int) -> Tensor:
    """Normal noise, the same each time."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))


def arguments() -> argparse.Namespace:
    """What to compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.98])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 3, 64])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--large",
        action="store_true",
        help=f"also batches above {LARGE_BATCH} of networks for {LARGE_SIDE} × {LARGE_SIDE}",
    )
    parser.add_argument(
        "--artifacts", nargs="+", type=Path, default=[], help="finished networks, instead"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
