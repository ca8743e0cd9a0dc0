"""How fast a network runs: the engine and PyTorch in turn, so that both see the same machine."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probmask.runtime.engine import Engine
from probmask.runtime.engine import compile as compile_engine

# So long each is measured, and at least so often.
_SECONDS, _LEAST = 1.0, 5


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


def in_turn(
    functions: Mapping[str, Callable[[], Any]], *, seconds: float = _SECONDS, least: int = _LEAST
) -> dict[str, list[float]]:
    """Seconds of each call; the functions take turns until each has run ``seconds``."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    while any(sum(taken) < seconds or len(taken) < least for taken in times.values()):
        for name, function in functions.items():
            if sum(times[name]) >= seconds and len(times[name]) >= least:
                continue
            started = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - started)
    return times


def measure_speed(
    model: nn.Module, input_shape: Sequence[int], *, batch: int, threads: int
) -> tuple[Speed, Engine]:
    """Compile the network for a batch of random inputs and time it against PyTorch."""
    example = random_inputs(input_shape, batch)
    engine = compile_engine(model, example, threads=threads)
    model = model.eval()
    with torch.no_grad():
        times = in_turn({"pytorch": lambda: model(example), "engine": lambda: engine(example)})
    pytorch, ours = (1e3 * statistics.median(times[name]) for name in ("pytorch", "engine"))
    with_weights = [node for node in engine.describe() if node["density"] is not None]
    sparse = sum(node["runs"] == "kernels" for node in with_weights)
    speed = Speed(batch, threads, pytorch, ours, engine.compile_seconds, sparse, len(with_weights))
    return speed, engine


def random_inputs(shape: Sequence[int], batch: int) -> Tensor:
    """A batch of normal noise, the same each time."""
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))
