"""Cost of exact sparsity under FSDP2: a model for up to 10¹¹ weights on 4,096 ranks, and its check.

The model has three terms per update and rank:

    passes    bytes / memory bandwidth + operations · launch time
    messages  Σ all-reduces, each the faster of a ring and a tree, with latency α and bandwidth β
    waits     the host waits for the device for every message, and for every result whose
              size depends on the values (selected entries, histograms)

Bytes, operations, waits and messages are not estimated: `Traffic` counts them while the functions
of `probmask.core` run on PyTorch operations, which is what a GPU executes, and `OneOfTwo` records
what the rank would send. They are counted at small sizes and are linear in the number of weights
per rank, the number of layers, and the number of chunks.

    python benchmarks/scaling_model.py check          # counts, and predictions against measurements
    python benchmarks/scaling_model.py predict        # tables and docs/images/scaling.png

`check` measures the processor time of the passes on 1, 2 and 4 ranks, which are processes of this
machine, and the duration of gloo's all-reduces between them, always the least of several. One
factor per operation is fitted to small sizes on one rank, and α and β to two ranks. Larger sizes
and four ranks are predicted. The duration of whole operations is not compared: on a machine with
fewer cores than ranks, or with other work, it is mostly waiting.
"""

import argparse
import ctypes
import gc
import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from probmask.core import kernel_runner
from probmask.core.projection import project_
from probmask.core.selection.magnitude_cut import cut_by_magnitude
from probmask.core.selection.sharded_top_k import select_in_groups
from probmask.core.shards import Shards
from probmask.masking.distributed import RankShards

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
SPARSITY = 0.98
_CHUNK = 1 << 18  # entries per chunk of the selection (`sharded_top_k`)
_FITTED, _CHECKED = (1 << 18, 1 << 20, 1 << 22), (1 << 24,)  # numbers of weights


# What is counted


# Operations whose result, or its size, the host needs.
_WAITS = ("aten::bincount", "aten::nonzero", "aten::_local_scalar_dense")


class Traffic(TorchDispatchMode):
    """Counts the bytes that PyTorch operations read and write, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.launches = self.elements = self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute the operation and count it, unless it only makes a view."""
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.name() in ("aten::detach", "aten::empty.memory_format"):
            return result
        read = list(_tensors(args))
        written = list(_tensors(result))
        self.bytes += sum(map(_size, read)) + sum(map(_size, written))
        selects = func.name() == "aten::index.Tensor" and any(t.dtype == torch.bool for t in read)
        if selects:
            self.bytes += sum(16 * t.numel() for t in written)  # the places are written and read
        self.waits += selects or func.name() in _WAITS
        self.elements += sum(t.numel() for t in written)
        self.launches += 1
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class OneOfTwo(Shards):
    """Shards of which both ranks have the same entries; records what this rank sends."""

    index, count = 0, 2

    def __init__(self) -> None:
        self.sent: list[int] = []

    def total(self, values: Tensor) -> Tensor:
        """Record an all-reduce."""
        self.sent.append(_size(values))
        return 2 * values

    def gathered(self, values: Tensor) -> Tensor:
        """Record an all-gather."""
        self.sent.append(_size(values))
        return torch.stack([values, values])


@contextmanager
def plain_operations() -> Iterator[None]:
    """Use PyTorch operations in place of compiled kernels, as on a GPU."""
    found = kernel_runner._kernels
    kernel_runner._kernels = lambda name: None
    try:
        yield
    finally:
        kernel_runner._kernels = found


# The operations. Each returns a function that makes its inputs, n weights in some layers, and
# returns the call that is counted or timed.

Prepare = Callable[[], Callable[[], object]]
Operation = Callable[[int, int, Shards], Prepare]


def weights(n: int, layers: int) -> list[Tensor]:
    """Return normal weights."""
    generator = torch.Generator().manual_seed(0)
    return [0.02 * torch.randn(n // layers, generator=generator) for _ in range(layers)]


def cut(n: int, layers: int, shards: Shards) -> Prepare:
    """The magnitude cut of probmask-tied, feather and st3."""
    tensors, scales = weights(n, layers), [1.0] * layers
    names = [str(i) for i in range(layers)]
    keep = round((1 - SPARSITY) * n) * shards.count
    return lambda: lambda: cut_by_magnitude(tensors, scales, keep, names, shards=shards)


def project(n: int, layers: int, shards: Shards) -> Prepare:
    """The projection of probmask, from probabilities that an optimizer has moved."""
    generator = torch.Generator().manual_seed(0)
    probs = []
    for tensor in weights(n, layers):
        kind = torch.rand(len(tensor), generator=generator)
        between = torch.rand(len(tensor), generator=generator) ** 3
        s = torch.where(kind < 0.01, 1.0, torch.where(kind < 0.05, between, 0.0))
        probs.append(s + 0.15 * tensor)
    keep = (1 - SPARSITY) * n * shards.count

    def prepare() -> Callable[[], object]:
        copies = [prob.clone() for prob in probs]
        return lambda: project_(copies, keep, shards=shards)

    return prepare


def exchange(n: int, layers: int, shards: Shards) -> Prepare:
    """The selections of rigl's exchange: two top-k and a count per layer."""
    tensors = weights(n, layers)
    keep = [round((1 - SPARSITY) * len(tensor)) * shards.count for tensor in tensors]

    def run() -> None:
        for tensor, k in zip(tensors, keep, strict=True):
            for _ in range(2):
                masks = select_in_groups("exchange", [tensor], [0], [k], shards)
            shards.counts(masks)

    return lambda: run


OPERATIONS: dict[str, Operation] = {
    "magnitude cut": cut,
    "projection": project,
    "rigl exchange": exchange,
}
_DEVICE_CHUNKS = {"projection": 1 << 19}  # the others read whole tensors on a GPU
_JOINED = {"magnitude cut"}  # reads all layers as one tensor


class Cost(NamedTuple):
    """Cost of an operation on a rank; the operations are ``fixed + per_layer·T + per_chunk·c``."""

    bytes_per_weight: float
    elements_per_weight: float
    fixed: float
    per_layer: float
    per_chunk: float
    waits_per_layer: float
    messages: Callable[[int], list[int]]  # bytes of each message, by the number of layers
    device_chunk: float  # entries per chunk on a GPU
    joined: bool  # whether all layers are read as one tensor

    def launches(self, layers: int, chunks: float) -> float:
        """Return the number of operations for tensors that are read in so many chunks."""
        return self.fixed + self.per_layer * layers + self.per_chunk * chunks


def count(name: str) -> Cost:
    """Count bytes, operations and messages at several sizes, and fit the linear model."""
    operation = OPERATIONS[name]
    rows, launches, waits, per_weight, elements, sent = [], [], [], [], [], {}
    for n in (1 << 20, 1 << 22):
        for layers in (4, 16):
            shards = OneOfTwo()
            run = operation(n, layers, shards)()
            with plain_operations(), Traffic() as traffic:
                run()
            rows.append([1, layers, chunks_of(n, 1 if name in _JOINED else layers, _CHUNK)])
            launches.append(traffic.launches)
            waits.append(traffic.waits)
            per_weight.append(traffic.bytes / n)
            elements.append(traffic.elements / n)
            sent[layers] = shards.sent
    fixed, per_layer, per_chunk = np.linalg.lstsq(np.array(rows), np.array(launches), rcond=None)[0]
    _, each, more = np.linalg.lstsq(np.array(rows), np.array(waits), rcond=None)[0]
    return Cost(
        per_weight[-1],
        elements[-1],
        fixed,
        per_layer,
        per_chunk,
        each + (0 if name in _JOINED else more),  # on a GPU, a tensor is one chunk
        _messages_by_layers(sent),
        _DEVICE_CHUNKS.get(name, math.inf),
        name in _JOINED,
    )


def chunks_of(n: float, tensors: int, chunk: float) -> float:
    """Return the number of chunks of n weights in tensors of equal size."""
    return tensors * max(1, math.ceil(n / tensors / chunk))


def _messages_by_layers(sent: dict[int, list[int]]) -> Callable[[int], list[int]]:
    """Return the messages for any number of layers, from those of two numbers."""
    (few, first), (many, second) = sent.items()

    def messages(layers: int) -> list[int]:
        if len(second) >= 2 * len(first):  # those of every layer are the same
            return first[: len(first) // few] * layers
        if len(first) != len(second):  # a search that took one more pass
            return max(first, second, key=len)
        share = (layers - few) / (many - few)
        return [round(a + share * (b - a)) for a, b in zip(first, second, strict=True)]

    return messages


def extra_memory(operation: Operation) -> float:
    """Return the bytes per weight that the operation allocates at its peak."""
    n = 1 << 24
    run = operation(n, 16, OneOfTwo())()
    with plain_operations():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory
        before = _memory("VmRSS")
        run()
        return (_memory("VmHWM") - before) / n


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(field)))


# The model


@dataclass(frozen=True)
class Machine:
    """A device and its connections. Bandwidths are bytes per second, times are seconds."""

    memory: float
    launch: float
    alpha: float
    beta: float
    wait: float = 0.0
    flops: float = 0.0  # per second in the matrix products of the network, as measured, not peak
    capacity: float = math.inf  # bytes of memory
    chunk: int | None = None  # entries per chunk on a CPU

    def passes(self, cost: Cost, n: float, layers: int) -> float:
        """Return the seconds of the passes over n weights on a rank."""
        moving = cost.bytes_per_weight * n / self.memory
        tensors = 1 if cost.joined else layers
        chunks = chunks_of(n, tensors, self.chunk or cost.device_chunk)
        return moving + cost.launches(layers, chunks) * self.launch

    def all_reduce(self, size: float, ranks: int) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes: a ring, or a tree up and down."""
        if ranks == 1:
            return 0.0
        share = (ranks - 1) / ranks
        ring = 2 * (ranks - 1) * self.alpha + 2 * share * size / self.beta
        tree = 2 * math.ceil(math.log2(ranks)) * (self.alpha + size / self.beta)
        return min(ring, tree)

    def messages(self, cost: Cost, ranks: int, layers: int) -> float:
        """Return the seconds of all messages."""
        sizes = cost.messages(layers) if ranks > 1 else []
        return sum(self.all_reduce(size, ranks) for size in sizes)

    def waits(self, cost: Cost, layers: int) -> float:
        """Return the seconds in which the host waits for the device."""
        return self.wait * (cost.waits_per_layer * layers + len(cost.messages(layers)))

    def dense_step(self, n: float, ranks: int, layers: int, tokens: int) -> float:
        """Return the seconds of a dense step: the slower of its products and its messages.

        FSDP2 gathers the weights twice and scatters the gradients once, block by block, in bf16.
        """
        products = 6 * n * tokens / self.flops
        blocks = max(1, layers // 7)
        share = (ranks - 1) / ranks
        sent = 3 * (2 * n * share / self.beta + blocks * math.log2(max(2, ranks)) * self.alpha)
        return max(products, sent if ranks > 1 else 0.0)


# An A100 with 80 GB in nodes of eight, one 200 Gb/s network card per device.
DEVICE = Machine(
    memory=0.8 * 2.0e12,
    launch=5e-6,
    alpha=15e-6,
    beta=0.8 * 25e9,
    wait=20e-6,
    flops=0.4 * 312e12,
    capacity=80e9,
)
TOKENS = 8192  # per device and update
STATE = 16 + 1  # bytes per weight: fp32 weight, gradient and both moments of Adam, and the mask


def layers_of(n: float) -> int:
    """Return the number of masked matrices of a transformer of n weights: 7 per block.

    32 blocks have 7 billion weights; depth grows with the cube root.
    """
    return 7 * round(32 * (n / 7e9) ** (1 / 3)) + 1


# The check


def seconds_of(prepare: Prepare, repeats: int = 5) -> float:
    """Return the processor time of a call, the least of several."""
    times = []
    for _ in range(repeats):
        run = prepare()
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


def measured_machine() -> Machine:
    """Measure the memory bandwidth and the time to start an operation, on one thread."""
    a, b = torch.rand(1 << 24), torch.rand(1 << 24)
    out = torch.empty_like(a)
    bandwidth = 3 * _size(a) / seconds_of(lambda: lambda: torch.add(a, b, out=out))
    tiny = torch.rand(8)

    def start() -> None:
        for _ in range(1000):
            tiny.add(1.0)

    return Machine(
        memory=bandwidth,
        launch=seconds_of(lambda: start) / 1000,
        alpha=0,
        beta=math.inf,
        chunk=_CHUNK,
    )


def check_passes(costs: dict[str, Cost], machine: Machine) -> dict[str, float]:
    """Print measured and predicted seconds; return the fitted factor of each operation."""
    print_heading("operation", "weights", "measured s", "predicted s", "error")
    factors = {}
    with plain_operations():
        for name, operation in OPERATIONS.items():
            cost, ratios = costs[name], []
            for n in (*_FITTED, *_CHECKED):
                found = seconds_of(operation(n, 16, OneOfTwo()))
                raw = machine.passes(cost, n, 16)
                if n in _FITTED[1:]:
                    ratios.append(found / raw)
                factor = statistics.fmean(ratios) if ratios else math.nan
                factors[name] = factor
                held_out = "" if n in _FITTED else " (held out)"
                if ratios:
                    error = factor * raw / found - 1
                    print_row(
                        name,
                        f"{n:,}{held_out}",
                        f"{found:.4f}",
                        f"{factor * raw:.4f}",
                        f"{error:+.0%}",
                    )
    for name, factor in factors.items():
        print(f"{name}: {factor:.1f} times the time of its bytes and operations at full bandwidth")
    return factors


SIZES = (16, 1800, 16 << 10, 1 << 18, 1 << 22)  # bytes of the all-reduces that are measured


def rank_main(rank: int, ranks: int, port: int, results: Any, n: int) -> None:
    """Measure all-reduces and the operations as one of several ranks."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    times = {}
    for size in SIZES:
        values = torch.zeros(size // 8, dtype=torch.float64)
        repeats = 300 if size < 1 << 20 else 50
        for _ in range(10):
            distributed.all_reduce(values)
        found = []
        for _ in range(repeats):
            distributed.barrier()
            began = time.perf_counter()
            distributed.all_reduce(values)
            found.append(time.perf_counter() - began)
        times[size] = min(found)
    operations = {}
    with plain_operations():
        for name, operation in OPERATIONS.items():
            shards = RankShards(distributed.group.WORLD)
            operations[name] = seconds_of(operation(n // ranks, 16, shards))
    if rank == 0:
        results.put((times, operations))
    distributed.barrier()
    distributed.destroy_process_group()


def measure_ranks(ranks: int, n: int) -> tuple[dict[int, float], dict[str, float]]:
    """Start the ranks; return the seconds of all-reduces by size, and of operations by name."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=rank_main, args=(rank, ranks, port, results, n))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: tuple[dict[int, float], dict[str, float]] = results.get()
    for process in processes:
        process.join()
    return found


def fit_messages(times: dict[int, float]) -> tuple[float, float]:
    """Return α and β of two ranks, for which both algorithms take 2α + size/β."""
    design = np.array([[2.0, size] for size in times])
    scale = 1 / np.array(list(times.values()))  # relative errors
    alpha, inverse = np.linalg.lstsq(design * scale[:, None], np.ones(len(times)), rcond=None)[0]
    return float(alpha), 1 / float(inverse)


def check() -> None:
    """Print what is counted, and predictions against measurements."""
    torch.set_num_threads(1)
    costs = {name: count(name) for name in OPERATIONS}
    print_costs(costs)
    machine = measured_machine()
    print(f"\nmemory {machine.memory / 1e9:.1f} GB/s, {machine.launch * 1e6:.2f} µs per operation")
    factors = check_passes(costs, machine)
    n = 1 << 23
    found = {ranks: measure_ranks(ranks, n) for ranks in (2, 4)}
    alpha, beta = fit_messages(found[2][0])
    print(f"\ngloo on this machine: α = {alpha * 1e6:.0f} µs, β = {beta / 1e9:.2f} GB/s")
    machine = replace(machine, alpha=alpha, beta=beta)
    print_heading("all-reduce", "ranks", "measured ms", "predicted ms", "error")
    for ranks, (times, _) in found.items():
        for size, measured in times.items():
            predicted = machine.all_reduce(size, ranks)
            milliseconds = [f"{1e3 * each:.2f}" for each in (measured, predicted)]
            error = f"{predicted / measured - 1:+.0%}"
            print_row(f"{size:,} bytes", str(ranks), *milliseconds, error)
    print_heading("operation", "ranks", "measured s", "predicted s", "error")
    for ranks, (_, operations) in found.items():
        for name, measured in operations.items():
            predicted = factors[name] * machine.passes(costs[name], n / ranks, 16)
            error = f"{predicted / measured - 1:+.0%}"
            print_row(name, str(ranks), f"{measured:.3f}", f"{predicted:.3f}", error)


def print_costs(costs: dict[str, Cost]) -> None:
    """Print what an operation costs a rank."""
    print_heading(
        "operation",
        "bytes moved per weight",
        "elements computed per weight",
        "extra memory, bytes per weight",
        "kernels",
        "waits",
        "messages",
    )
    for name, cost in costs.items():
        few, many = cost.messages(10), cost.messages(20)
        grows = len(many) - len(few)
        print_row(
            name,
            f"{cost.bytes_per_weight:.0f}",
            f"{cost.elements_per_weight:.0f}",
            f"{extra_memory(OPERATIONS[name]):.0f}",
            f"{abs(cost.fixed):.0f} + {cost.per_layer:.0f} T + {cost.per_chunk:.0f} c",
            f"{cost.waits_per_layer:.0f} T",
            f"{grows // 10} T" if grows else f"{len(few)}",
        )


def print_heading(*cells: str) -> None:
    """Print an empty line and the first lines of a table."""
    print()
    print_row(*cells)
    print("|" + "---|" * len(cells))


def print_row(*cells: str) -> None:
    """Print a line of a table."""
    print("| " + " | ".join(cells) + " |")


# The prediction


def predict() -> None:
    """Print the tables of the prediction and draw the picture."""
    torch.set_num_threads(1)
    costs = {name: count(name) for name in OPERATIONS}
    print_seven_billion(costs)
    print_sizes(costs)
    draw(costs)


def seconds(cost: Cost, n: float, ranks: int) -> tuple[float, float, float]:
    """Return the seconds of passes, waits and messages on the assumed device."""
    layers = layers_of(n)
    passes = DEVICE.passes(cost, n / ranks, layers)
    return passes, DEVICE.waits(cost, layers), DEVICE.messages(cost, ranks, layers)


def print_seven_billion(costs: dict[str, Cost]) -> None:
    """Print the prediction for 7 billion weights on 64 devices."""
    n, ranks = 7e9, 64
    dense = DEVICE.dense_step(n, ranks, layers_of(n), TOKENS)
    print(f"dense step: {1e3 * dense:.0f} ms; T = {layers_of(n)}; {n / ranks:.3g} weights per rank")
    print_heading(
        "operation",
        "memory ms",
        "kernels ms",
        "waits ms",
        "messages ms",
        "sum ms",
        "of a dense step",
    )
    for name, cost in costs.items():
        passes, waits, messages = seconds(cost, n, ranks)
        memory = cost.bytes_per_weight * n / ranks / DEVICE.memory
        whole = passes + waits + messages
        parts = (memory, passes - memory, waits, messages, whole)
        print_row(name, *(f"{1e3 * part:.1f}" for part in parts), f"{whole / dense:.1%}")


def print_sizes(costs: dict[str, Cost]) -> None:
    """Print the share of the dense step over sizes and ranks."""
    print_heading("weights", "ranks", "state, GB per rank", "dense step s", *costs)
    for n in (1e9, 1e10, 1e11):
        for ranks in (8, 64, 512, 4096):
            state = STATE * n / ranks
            if state > DEVICE.capacity:
                continue
            dense = DEVICE.dense_step(n, ranks, layers_of(n), TOKENS)
            shares = [f"{sum(seconds(cost, n, ranks)) / dense:.1%}" for cost in costs.values()]
            power = "⁰¹²³⁴⁵⁶⁷⁸⁹"
            size = "10" + "".join(power[int(d)] for d in str(round(math.log10(n))))
            print_row(size, f"{ranks:,}", f"{state / 1e9:.2f}", f"{dense:.2f}", *shares)


def draw(costs: dict[str, Cost]) -> None:
    """Draw seconds over ranks for three sizes, and the share of the dense step for 7 billion."""
    from matplotlib import pyplot as plt

    from line_plot import INK

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    ranks = [2**k for k in range(1, 13)]
    colors = {1e9: "#2a9d8f", 1e10: "#2f6fb7", 1e11: "#d1495b"}
    for n, color in colors.items():
        fits = [p for p in ranks if STATE * n / p <= DEVICE.capacity]
        label = f"10$^{{{round(math.log10(n))}}}$ weights"
        dense = [DEVICE.dense_step(n, p, layers_of(n), TOKENS) for p in fits]
        ours = [sum(seconds(costs["magnitude cut"], n, p)) for p in fits]
        left.plot(fits, dense, color=color, linestyle="--", linewidth=1.3)
        left.plot(fits, ours, color=color, linewidth=2.4, label=label)
    left.plot([], [], color=INK, linewidth=2.4, label="magnitude cut")
    left.plot([], [], color=INK, linestyle="--", linewidth=1.3, label="dense step")
    left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="predicted seconds per update")
    left.legend(frameon=False, fontsize=9)
    fits = [p for p in ranks if STATE * 7e9 / p <= DEVICE.capacity]
    dense = [DEVICE.dense_step(7e9, p, layers_of(7e9), TOKENS) for p in fits]
    for (name, cost), color in zip(costs.items(), ("#d1495b", "#2f6fb7", "#c77d0a"), strict=True):
        shares = [100 * sum(seconds(cost, 7e9, p)) / d for p, d in zip(fits, dense, strict=True)]
        right.plot(fits, shares, color=color, linewidth=2.2, label=name)
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="% of a dense step, 7·10⁹ weights")
    right.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    right.yaxis.minorticks_off()
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.grid(color="#e6e9ef")
        axes.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4,096"])
        axes.xaxis.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(IMAGE, dpi=150)
    print(f"\nwrote {IMAGE}")


def main() -> None:
    """Check the model, or predict with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["check", "predict"])
    {"check": check, "predict": predict}[parser.parse_args().command]()


if __name__ == "__main__":
    main()
