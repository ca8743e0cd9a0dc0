"""Aim: a ProbMask step costs at most 1.05 dense steps on resnet32:128, 1.10 on vgg19:64.

A step is forward, backward, the optimizers of weights and probabilities, and the projection or the
cut, with one draw, in the middle of a training: most probabilities at 0, some at 1, some between.
The ways are timed in turn, in one process: dense, both recipes of ours (tied, the default, and
learned), the way of the released code (`released_step.py`), and dense once more, which tells how
far the machine can be trusted. Peak memory is measured afterwards, each way in a process of its
own: how far the resident memory rises above what it was before the network was made.

    OMP_WAIT_POLICY=passive python benchmarks/step_overhead.py --threads 2

Two clocks run: that of the wall, and the processor's seconds of all threads, which other programs
disturb less; threads that spin while they wait count there too, hence OMP_WAIT_POLICY. A ratio is
the median over rounds of the ratio to the dense step of the same round, with its quartiles.
Denormal numbers are flushed to zero for all ways: the released one has many (tiny masks), and some
processors take many times as long for them.
``--ways`` also takes any other method of the registry; ``--progress`` is where in the training the
steps are: a learned mask is final from 0.6 on.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import probmask
from probmask.methods import METHODS
from probmask.models import MODELS, build_model
from released_step import ReleasedStep

OURS = ("tied", "learned")
AGAIN = "dense again"
WAYS = ("dense", *OURS, "released", AGAIN)
TOTAL = 10_000  # updates of the training that the steps are taken from

Step = Callable[[], None]


Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Measured:
    """One way on one case: its median step by either clock, and its peak memory above dense."""

    case: str
    weights: int
    way: str
    wall_milliseconds: float
    wall_ratio: Quartiles
    cpu_milliseconds: float
    cpu_ratio: Quartiles
    extra_bytes_per_weight: float | None


def make_step(way: str, case: str, options: argparse.Namespace) -> tuple[Step, int]:
    """A function that trains one step, and the number of weights that are masked."""
    name, batch = case.split(":")
    torch.manual_seed(0)
    order = torch.channels_last if options.channels_last else torch.contiguous_format
    model = build_model(name, {}).to(memory_format=order)
    sites = [p for p in model.parameters() if p.dim() > 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    finish = optimizer.step
    sparsifier = None
    if way == "released":
        released = ReleasedStep(model, optimizer, options.sparsity, 1 - 0.97 * options.progress)
        finish = released.after_backward
    elif way not in ("dense", AGAIN):
        settings = {"sparsity": options.sparsity}
        method = (
            probmask.ProbMask(recipe=way, **settings) if way in OURS else METHODS[way](**settings)
        )
        sparsifier = probmask.attach(
            model, method, optimizer=optimizer, total_steps=TOTAL, seed=1, steps_per_epoch=100
        )
    spread_probabilities_(model)
    images = torch.randn(int(batch), *MODELS[name].image_shape).contiguous(memory_format=order)
    labels = torch.randint(10, (int(batch),))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        finish()

    if sparsifier is not None:
        step()  # what is kept of the beginning is there
        now = {"step": round(options.progress * TOTAL)}
        sparsifier.load_state_dict(sparsifier.state_dict() | now)
    return step, sum(site.numel() for site in sites)


@torch.no_grad()
def spread_probabilities_(model: nn.Module) -> None:
    """Probabilities as in the middle of a training: 95 % at 0, 1 % at 1, the others between."""
    for name, prob in model.named_parameters():
        if name.endswith(".prob"):
            kind = torch.rand(prob.shape)
            between = torch.rand(prob.shape) ** 3
            prob.copy_(torch.where(kind < 0.01, 1.0, torch.where(kind < 0.05, between, 0.0)))


def time_ways(
    case: str, options: argparse.Namespace
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Milliseconds of each step of each way by both clocks; each round begins with another way."""
    steps = {way: make_step(way, case, options) for way in options.ways}
    for step, _ in steps.values():
        for _ in range(2):
            step()
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in steps}
    for turn in range(options.repeats):
        first = turn % len(options.ways)
        for way in options.ways[first:] + options.ways[:first]:
            wall, cpu = time.perf_counter(), time.process_time()
            steps[way][0]()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            times[way].append((1e3 * wall, 1e3 * cpu))
    return times, steps["dense"][1]


def measure_memory(way: str, case: str, options: argparse.Namespace) -> int:
    """By how many bytes three steps raise the resident memory, in a process of its own."""
    given = [
        f"--threads={options.threads}",
        f"--sparsity={options.sparsity}",
        f"--progress={options.progress}",
        *(["--channels-last"] if options.channels_last else []),
    ]
    command = [sys.executable, __file__, "--memory-of", way, "--cases", case, *given]
    # What is freed goes back at once, so that the peak is that of what is in use.
    quiet = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=quiet, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the memory of {way!r} could not be measured; --no-memory leaves it out")
    return int(done.stdout)


def print_memory(way: str, case: str, options: argparse.Namespace) -> None:
    """Print by how many bytes three steps raise the resident memory."""
    small, _ = make_step(way, "resnet20:2", options)  # libraries and compiled code are not counted
    small()
    small()
    del small
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    step, _ = make_step(way, case, options)
    for _ in range(3):
        step()
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Bytes of resident memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(case: str, options: argparse.Namespace) -> list[Measured]:
    """All ways on one case."""
    times, weights = time_ways(case, options)
    dense_wall, dense_cpu = zip(*times["dense"], strict=True)
    extra: dict[str, float | None] = dict.fromkeys(times)
    if options.memory:
        peaks = {way: measure_memory(way, case, options) for way in times if way != AGAIN}
        extra |= {way: (peak - peaks["dense"]) / weights for way, peak in peaks.items()}
    found = []
    for way, pairs in times.items():
        wall, cpu = zip(*pairs, strict=True)
        medians = statistics.median(wall), statistics.median(cpu)
        ratios = quartiles(wall, dense_wall), quartiles(cpu, dense_cpu)
        clocks = (medians[0], ratios[0], medians[1], ratios[1])
        found.append(Measured(case, weights, way, *clocks, extra[way]))
    return found


def quartiles(mine: Sequence[float], dense: Sequence[float]) -> Quartiles:
    """Of the ratios of neighbours in time, which share whatever disturbs the machine."""
    low, middle, high = statistics.quantiles(
        (one / other for one, other in zip(mine, dense, strict=True)), method="inclusive"
    )
    return low, middle, high


def as_line(row: Measured) -> str:
    """A row of the table."""
    cells = [row.case, row.way]
    for milliseconds, ratio in (
        (row.wall_milliseconds, row.wall_ratio),
        (row.cpu_milliseconds, row.cpu_ratio),
    ):
        low, middle, high = ratio
        cells += [f"{milliseconds:.0f}", f"{middle:.2f} ({low:.2f}–{high:.2f})"]
    extra = row.extra_bytes_per_weight
    cells.append("" if extra is None or row.way == "dense" else f"{extra:.1f}")
    return f"| {' | '.join(cells)} |"


def read_options() -> argparse.Namespace:
    """What was asked for, refused in one line where that makes no sense."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases, ways = ["resnet32:128", "vgg19:64", "vgg19:16"], list(WAYS)
    known = [*WAYS, *sorted(set(METHODS) - {"dense"})]

    def add(flag: str, told: str, **settings: Any) -> None:
        parser.add_argument(flag, help=told, **settings)

    told = f"networks of `probmask list models` and their batches ({' '.join(cases)})"
    add("--cases", told, nargs="+", metavar="NETWORK:BATCH", default=cases)
    told = f"what to time ({' '.join(ways)}); any method's name is one, too"
    add("--ways", told, nargs="+", metavar="WAY", default=ways, choices=known)
    add("--sparsity", "at the end of the training (0.98)", type=float, metavar="S", default=0.98)
    told = "where in the training the steps are, from 0 to 1 (0.45)"
    add("--progress", told, type=float, metavar="P", default=0.45)
    add("--repeats", "rounds, 2 or more (11)", type=int, metavar="N", default=11)
    told = "of PyTorch and of the kernels (PyTorch's)"
    add("--threads", told, type=int, metavar="N", default=torch.get_num_threads())
    told = "images and weights in PyTorch's channels_last order"
    add("--channels-last", told, action="store_true")
    add("--no-memory", "measure no memory", dest="memory", action="store_false")
    add("--out", "a JSON file for the figures", type=Path, metavar="FILE")
    add("--memory-of", argparse.SUPPRESS, choices=known)
    options = parser.parse_args()
    for case in options.cases:
        name, _, batch = case.partition(":")
        if name not in MODELS or not batch.isdigit() or int(batch) < 2:
            parser.error(f"--cases {case}: expected NETWORK:BATCH, of {', '.join(MODELS)}.")
    if options.repeats < 2:
        parser.error(f"--repeats {options.repeats}: quartiles need 2 rounds or more.")
    if not 0 <= options.progress < 1:
        parser.error(f"--progress {options.progress:g}: a part of the training, in [0, 1).")
    options.ways = ["dense", *(way for way in options.ways if way != "dense")]
    return options


def main() -> None:
    """Print one row per case and way."""
    options = read_options()
    torch.set_flush_denormal(True)  # before there are threads, which inherit it
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print_memory(options.memory_of, options.cases[0], options)
        return
    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.machine()}, "
        f"medians of {options.repeats} (and quartiles)\n"
    )
    print(
        "| network:batch | way | wall ms | times dense | CPU ms | times dense | "
        "bytes per weight above dense |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    found = []
    for case in options.cases:
        for row in measure(case, options):
            found.append(asdict(row))
            print(as_line(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
