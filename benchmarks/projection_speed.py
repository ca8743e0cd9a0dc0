"""Claim: `project_` is at least 4 times as fast as 21 plain bisection passes, and exact to 1e-6.

The baseline is the projection of the ProbMask release, which it runs after every step: 21 passes of
Σ clip(z - v, 0, 1) in fp32, tensor by tensor, then sub_ and clamp_. Both are timed alternately in
one process, on the layer shapes of ResNet50 (54 tensors, 25.5 million entries) and of ResNet32-2x
(34 tensors, 1.86 million entries). "passes" is the number of times that our projection reads all
entries before it writes.

    python benchmarks/projection_speed.py --repeats 11
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from probmask.core.projection import project_
from probmask.core.projection.passes import CompiledPasses, PlainPasses
from probmask.masking.sites import find_sites
from probmask.models import build_model


def layer_shapes(network: str) -> list[tuple[int, ...]]:
    """Return the shapes of the weights that can be masked."""
    with torch.device("meta"):
        return [tuple(site.weight.shape) for site in find_sites(build_model(network, {}))]


def inputs(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[str, list[Tensor], float]]:
    """Yield the name, the tensors and the budget of each case. The budget is 2 % unless noted."""
    n = sum(torch.Size(shape).numel() for shape in shapes)
    yield "after an Adam step", [after_adam(shape) for shape in shapes], 0.02 * n
    yield "all ones", [torch.ones(shape) for shape in shapes], 0.02 * n
    yield "uniform", [torch.rand(shape) for shape in shapes], 0.02 * n
    few = [torch.rand(shape) * (torch.rand(shape) < 0.002) for shape in shapes]
    yield "few active", few, 0.0005 * n


def after_adam(shape: tuple[int, ...]) -> Tensor:
    """Return mid-training probabilities (95 % at 0, 1 % at 1) after a noisy step of up to 6e-3."""
    kind = torch.rand(shape)
    s = torch.where(kind < 0.01, 1.0, torch.where(kind < 0.05, torch.rand(shape) ** 3, 0.0))
    return s.add_((3e-3 * torch.randn(shape)).clamp_(-6e-3, 6e-3))


def bisect_(probs: Sequence[Tensor], keep: float) -> float:
    """Project as the release does: 21 halvings of [0, max z], with sums in fp32."""
    lo, hi = 0.0, float(max(z.max() for z in probs))
    for _ in range(21):
        v = (lo + hi) / 2
        kept = sum((z - v).clamp(0, 1).sum() for z in probs)
        lo, hi = (v, hi) if kept > keep else (lo, v)
    v = (lo + hi) / 2
    for z in probs:
        z.sub_(v).clamp_(0, 1)
    return v


def count_passes(probs: Sequence[Tensor], keep: float) -> int:
    """Return the number of times that `project_` evaluates the budget over all entries."""
    passes, kinds = 0, (PlainPasses, CompiledPasses)
    originals = [kind.weighted_sum for kind in kinds]

    def counted(weighted_sum: Callable[..., float]) -> Callable[..., float]:
        def counting(*args: object, **kwargs: object) -> float:
            nonlocal passes
            passes += 1
            return weighted_sum(*args, **kwargs)

        return counting

    for kind, weighted_sum in zip(kinds, originals, strict=True):
        kind.weighted_sum = counted(weighted_sum)
    try:
        project_([z.clone() for z in probs], keep)
    finally:
        for kind, weighted_sum in zip(kinds, originals, strict=True):
            kind.weighted_sum = weighted_sum
    return passes


def timed(
    projector: Callable[[Sequence[Tensor], float], float], probs: Sequence[Tensor], keep: float
) -> tuple[float, float]:
    """Return the time in milliseconds, and |Σ s - keep| / keep with the sum in fp64."""
    copies = [z.clone() for z in probs]
    start = time.perf_counter()
    projector(copies, keep)
    elapsed = time.perf_counter() - start
    return 1e3 * elapsed, abs(float(sum(z.double().sum() for z in copies)) - keep) / keep


def main() -> None:
    """Print one row for each network and input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    repeats = options.repeats
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"medians of {repeats}; errors are |Σs - keep| / keep\n")
    print("| network | input | bisection ms | ours ms | ratio | passes ", end="")
    print("| bisection error | our error |")
    print("|---|---|---|---|---|---|---|---|")
    for network in ("resnet50", "resnet32"):
        for name, probs, keep in inputs(layer_shapes(network)):
            passes = count_passes(probs, keep)  # also the warm-up
            theirs, ours = zip(
                *(
                    (timed(bisect_, probs, keep), timed(project_, probs, keep))
                    for _ in range(repeats)
                ),
                strict=True,
            )
            (slow, off), (fast, exact) = (
                (statistics.median(t for t, _ in runs), max(e for _, e in runs))
                for runs in (theirs, ours)
            )
            print(
                f"| {network} | {name} | {slow:.1f} | {fast:.1f} | {slow / fast:.1f} "
                f"| {passes} | {off:.1e} | {exact:.1e} |"
            )


if __name__ == "__main__":
    main()
