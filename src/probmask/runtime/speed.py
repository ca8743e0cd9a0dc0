"""Measure how fast a network runs: the engine and PyTorch, in alternating turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probmask.core.selection import select_top
from probmask.masking.batchnorm import reestimate_batchnorm
from probmask.masking.sites import find_sites
from probmask.runtime.compilation import compile as compile_engine
from probmask.runtime.run.engine import Engine

# Each function runs for at least this long, and at least this often.
_SECONDS, _MIN_CALLS = 1.0, 5
# Seconds of one turn.
_TURN = 0.05


@dataclass(frozen=True)
class Speed:
    """Median times of PyTorch and the engine, in milliseconds for the whole batch."""

    batch: int
    threads: int
    pytorch_ms: float
    engine_ms: float
    compile_seconds: float
    layers_on_kernels: int
    layers: int

    @property
    def ratio(self) -> float:
        """Speedup of the engine over PyTorch."""
        return self.pytorch_ms / self.engine_ms

    def as_table(self) -> dict[str, Any]:
        """Return the fields and the derived figures as a dictionary for JSON."""
        return {**asdict(self), "ratio": self.ratio, "images_per_second": self.images_per_second}

    @property
    def images_per_second(self) -> float:
        """Number of images that the engine processes per second."""
        return 1e3 * self.batch / self.engine_ms


# Runs a function for a number of seconds; returns the seconds of each call.
Turn = Callable[[float], list[float]]


def turn_of(function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> Turn:
    """Return turns of a function. The first call of a turn is not timed: its caches are cold."""

    def turn(seconds: float) -> list[float]:
        function()
        times: list[float] = []
        while not times or sum(times) < seconds:
            started = clock()
            function()
            times.append(clock() - started)
        return times

    return turn


def in_turn(
    turns: Mapping[str, Turn], *, seconds: float = _SECONDS, least: int = _MIN_CALLS
) -> dict[str, list[float]]:
    """Alternate turns until each function has run for ``seconds`` and ``least`` calls.

    Turns expose all functions to the same state of the machine. If single calls alternated, each
    would be slowed down by the others' data in the caches.

    Returns:
        The seconds of each call, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    while unfinished := [
        n for n, taken in times.items() if sum(taken) < seconds or len(taken) < least
    ]:
        for name in unfinished:
            times[name] += turns[name](_TURN)
    return times


def measure_speed(
    model: nn.Module, input_shape: Sequence[int], *, batch: int, threads: int
) -> tuple[Speed, Engine]:
    """Compile the network for a batch of random inputs and time it against PyTorch."""
    example = random_inputs(input_shape, batch)
    engine = compile_engine(model, example, threads=threads)
    model = model.eval()
    with torch.no_grad():
        times = in_turn(
            {"pytorch": turn_of(lambda: model(example)), "engine": turn_of(lambda: engine(example))}
        )
    pytorch, ours = (1e3 * statistics.median(times[name]) for name in ("pytorch", "engine"))
    with_weights = [node for node in engine.describe() if node["density"] is not None]
    sparse = sum(node["runs"] == "kernels" for node in with_weights)
    speed = Speed(batch, threads, pytorch, ours, engine.compile_seconds, sparse, len(with_weights))
    return speed, engine


def random_inputs(shape: Sequence[int], batch: int) -> Tensor:
    """Return a batch of normal noise, the same at each call."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


def mask_at_random_(
    model: nn.Module, sparsity: float, input_shape: Sequence[int], *, seed: int = 0
) -> tuple[int, int]:
    """Prune weights at random to exactly the sparsity, to measure speed before training.

    BatchNorm statistics are re-estimated on noise, so that activations neither vanish nor explode:
    denormal numbers would make every engine look slow.

    Returns:
        The number of kept weights and the number of all weights.
    """
    generator = torch.Generator().manual_seed(seed)
    sites = find_sites(model)
    total = sum(site.size for site in sites)
    keep = total - round(sparsity * total)
    order = [torch.rand(site.shape, generator=generator, dtype=torch.float64) for site in sites]
    with torch.no_grad():
        for site, mask in zip(sites, select_top(order, keep), strict=True):
            site.weight.masked_fill_(~mask.bool(), 0.0)  # multiplying by the mask could give -0.0
    noise = torch.randn(8, *input_shape, generator=generator)
    reestimate_batchnorm(model, [noise])
    model.eval()
    return keep, total
