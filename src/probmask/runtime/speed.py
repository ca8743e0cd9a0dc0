"""How fast a network runs: the engine and PyTorch in turn, so that both see the same machine."""

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
from probmask.runtime.compile import compile as compile_engine
from probmask.runtime.run.engine import Engine

# So long each is measured, and at least so often.
_SECONDS, _LEAST = 1.0, 5


# Seconds of a turn.
_TURN = 0.05


@dataclass(frozen=True)
class Speed:
    """Medians, in milliseconds for the whole batch."""

    batch: int
    threads: int
    pytorch_ms: float
    engine_ms: float
    compile_seconds: float
    layers_on_kernels: int
    layers: int

    @property
    def ratio(self) -> float:
        """How many times faster the engine is."""
        return self.pytorch_ms / self.engine_ms

    def as_table(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "images_per_second": self.images_per_second}

    @property
    def images_per_second(self) -> float:
        """On the engine."""
        return 1e3 * self.batch / self.engine_ms


# Runs something for so many seconds, and says what each call took.
Turn = Callable[[float], list[float]]


def turn_of(function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> Turn:
    """Turns of a function; the first call of each does not count, for others had the caches."""

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
    turns: Mapping[str, Turn], *, seconds: float = _SECONDS, least: int = _LEAST
) -> dict[str, list[float]]:
    """Seconds of each call; each has its turn until it has run ``seconds`` and ``least`` calls.

    So all see the same machine, and none is measured by whose weights the others left in the
    caches, as it would be if single calls took turns.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    while waiting := [
        n for n, taken in times.items() if sum(taken) < seconds or len(taken) < least
    ]:
        for name in waiting:
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
    """A batch of normal noise, the same each time."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))


def mask_at_random_(
    model: nn.Module, sparsity: float, input_shape: Sequence[int], *, seed: int = 0
) -> tuple[int, int]:
    """Remove exactly the sparsity of all weights, each as likely; return how many stay of how many.

    Statistics of BatchNorm are then those of noise as input, so that activations neither vanish nor
    explode: numbers too small for their format would make every engine look slow.
    """
    generator = torch.Generator().manual_seed(seed)
    sites = find_sites(model)
    total = sum(site.size for site in sites)
    keep = total - round(sparsity * total)
    order = [torch.rand(site.shape, generator=generator, dtype=torch.float64) for site in sites]
    with torch.no_grad():
        for site, mask in zip(sites, select_top(order, keep), strict=True):
            site.weight.masked_fill_(~mask.bool(), 0.0)  # a product could be -0
    noise = torch.randn(8, *input_shape, generator=generator)
    reestimate_batchnorm(model, [noise])
    model.eval()
    return keep, total
