"""Measure the cost of a ProbMask step, in dense steps.

Goals: 1.05 on resnet32:128, 1.10 on vgg19:64 and on minilm:32, 1.25 on mlp1024:128.

A step is forward, backward, the optimizers of weights and probabilities, and the projection or the
cut, with one draw, in the middle of a training: most probabilities are 0, some are 1, some between.
The ways take turns in one process: dense, tied and learned probabilities, the released code
(`released_step.py`), and dense again, whose ratio shows the noise of the machine. Peak memory is
measured afterwards, each way in its own process: the increase of the resident memory since before
the network was built.

    OMP_WAIT_POLICY=passive python benchmarks/step_overhead.py --threads 2
    OMP_WAIT_POLICY=passive python benchmarks/step_overhead.py --threads 2 \\
        --cases minilm:32 mlp1024:128 --optimizer adamw

The networks are those of `probmask list models`, a BERT of 6 layers and width 384 on 64 tokens with
random weights (`minilm`, needs transformers), and three linear layers of 1024 × 1024 (`mlp1024`).

Two clocks are used: wall time, and CPU time of all threads, which other programs disturb less.
Threads that spin while they wait count as CPU time, hence OMP_WAIT_POLICY. A ratio is the median
over rounds of the ratio to the dense step of the same round, with its quartiles. Denormal numbers
are flushed to zero for all ways: the released way has many (tiny masks), and they are many times
slower on some processors. ``--ways`` also accepts every other registered method. ``--progress`` is
the point of the training at which steps are measured; a learned mask is final from 0.6 on.
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
from torch import Tensor, nn

import probmask
from probmask.masking.parametrization import masked_parameters
from probmask.methods import METHODS
from probmask.models import MODELS, build_model
from released_step import ReleasedStep

OURS = {"tied": "probmask-tied", "learned": "probmask"}  # the names in the tables
AGAIN = "dense again"
WAYS = ("dense", *OURS, "released", AGAIN)
TOTAL = 10_000  # updates of the training

Step = Callable[[], None]
Case = tuple[nn.Module, Callable[[], Tensor]]  # a network, and the loss of a batch
Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Measured:
    """Result for one way and case: median times, ratios to dense, and peak memory above dense."""

    case: str
    weights: int
    way: str
    wall_milliseconds: float
    wall_ratio: Quartiles
    cpu_milliseconds: float
    cpu_ratio: Quartiles
    extra_bytes_per_weight: float | None


def make_step(way: str, case: str, options: argparse.Namespace) -> tuple[Step, int]:
    """Return a function that trains one step, and the number of maskable weights."""
    name, batch = case.split(":")
    torch.manual_seed(0)
    order = torch.channels_last if options.channels_last else torch.contiguous_format
    model, loss = (OTHER_CASES.get(name) or usual_case(name, order))(int(batch))
    exclude = [name for name, p in model.named_parameters() if "embedding" in name and p.dim() > 1]
    weights = sum(site.size for site in probmask.find_sites(model, exclude=exclude))
    parameters = model.parameters()
    optimizer: torch.optim.Optimizer
    if options.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)
    finish = optimizer.step
    sparsifier = None
    if way == "released":
        released = ReleasedStep(model, optimizer, options.sparsity, 1 - 0.97 * options.progress)
        finish = released.after_backward
    elif way not in ("dense", AGAIN):
        sparsifier = probmask.attach(
            model,
            METHODS[OURS.get(way, way)](sparsity=options.sparsity),
            optimizer=optimizer,
            total_steps=TOTAL,
            seed=1,
            steps_per_epoch=100,
            exclude=exclude,
        )
    spread_probabilities_(model)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        finish()

    if sparsifier is not None:
        step()  # creates the state that the first update creates
        now = {"step": round(options.progress * TOTAL)}
        sparsifier.load_state_dict(sparsifier.state_dict() | now)
    return step, weights


def usual_case(name: str, order: torch.memory_format) -> Callable[[int], Case]:
    """Return a function that builds a network of the library for a batch size."""

    def build(batch: int) -> Case:
        model = build_model(name, {}).to(memory_format=order)
        images = torch.randn(batch, *MODELS[name].image_shape).contiguous(memory_format=order)
        labels = torch.randint(10, (batch,))
        return model, lambda: nn.functional.cross_entropy(model(images), labels)

    return build


def mlp1024(batch: int) -> Case:
    """Build three linear layers of 1024 × 1024 and a random batch."""
    layers = [each for _ in range(3) for each in (nn.Linear(1024, 1024), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    x, y = torch.randn(2, batch, 1024)
    return model, lambda: nn.functional.mse_loss(model(x), y)


def minilm(batch: int) -> Case:
    """Build a BERT classifier of 6 layers and width 384, and sentences of 64 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    model = BertForSequenceClassification(config)
    tokens = torch.randint(config.vocab_size, (batch, 64))
    labels = torch.randint(2, (batch,))
    return model, lambda: model(input_ids=tokens, labels=labels).loss


OTHER_CASES: dict[str, Callable[[int], Case]] = {"mlp1024": mlp1024, "minilm": minilm}


@torch.no_grad()
def spread_probabilities_(model: nn.Module) -> None:
    """Set probabilities as in the middle of a training: 95 % are 0, 1 % are 1, the rest between."""
    for *_, masked in masked_parameters(model):
        for prob in masked.parameters():
            kind = torch.rand(prob.shape)
            between = torch.rand(prob.shape) ** 3
            prob.copy_(torch.where(kind < 0.01, 1.0, torch.where(kind < 0.05, between, 0.0)))


def time_ways(
    case: str, options: argparse.Namespace
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """Return wall and CPU milliseconds of each step; each round begins with another way."""
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
    """Return by how many bytes three steps increase the resident memory of a new process."""
    given = [
        f"--threads={options.threads}",
        f"--sparsity={options.sparsity}",
        f"--progress={options.progress}",
        f"--optimizer={options.optimizer}",
        *(["--channels-last"] if options.channels_last else []),
    ]
    command = [sys.executable, __file__, "--memory-of", way, "--cases", case, *given]
    # Freed memory is returned at once, so that the peak counts only memory in use.
    quiet = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=quiet, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"Measuring the memory of {way!r} failed; pass --no-memory to skip it.")
    return int(done.stdout)


def print_memory(way: str, case: str, options: argparse.Namespace) -> None:
    """Print by how many bytes three steps increase the resident memory."""
    small, _ = make_step(way, "resnet20:2", options)  # loads libraries and kernels
    small()
    small()
    del small
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    step, _ = make_step(way, case, options)
    for _ in range(3):
        step()
    print(resident("VmHWM") - before)


def resident(field: str) -> int:
    """Return the bytes of resident memory: current (VmRSS) or peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(case: str, options: argparse.Namespace) -> list[Measured]:
    """Measure all ways on one case."""
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
    """Return the quartiles of the ratios within rounds, which share the noise of the machine."""
    low, middle, high = statistics.quantiles(
        (one / other for one, other in zip(mine, dense, strict=True)), method="inclusive"
    )
    return low, middle, high


def as_line(row: Measured) -> str:
    """Format a row of the table."""
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
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases, ways = ["resnet32:128", "vgg19:64", "vgg19:16"], list(WAYS)
    known = [*WAYS, *sorted(set(METHODS) - {"dense"})]

    def add(flag: str, text: str, **settings: Any) -> None:
        parser.add_argument(flag, help=text, **settings)

    text = f"networks and batch sizes (default: {' '.join(cases)})"
    add("--cases", text, nargs="+", metavar="NETWORK:BATCH", default=cases)
    text = f"ways to measure (default: {' '.join(ways)}); names of methods are also accepted"
    add("--ways", text, nargs="+", metavar="WAY", default=ways, choices=known)
    add("--sparsity", "final sparsity (default: 0.98)", type=float, metavar="S", default=0.98)
    text = "point of the training at which steps are measured, in [0, 1) (default: 0.45)"
    add("--progress", text, type=float, metavar="P", default=0.45)
    add("--repeats", "rounds, at least 2 (default: 11)", type=int, metavar="N", default=11)
    text = "threads of PyTorch and of the kernels (default: PyTorch's)"
    add("--threads", text, type=int, metavar="N", default=torch.get_num_threads())
    text = "optimizer of the weights (default: sgd)"
    add("--optimizer", text, choices=("sgd", "adamw"), default="sgd")
    text = "use the channels_last memory format for images and weights"
    add("--channels-last", text, action="store_true")
    add("--no-memory", "do not measure memory", dest="memory", action="store_false")
    add("--out", "also write the results to this JSON file", type=Path, metavar="FILE")
    add("--memory-of", argparse.SUPPRESS, choices=known)
    options = parser.parse_args()
    for case in options.cases:
        name, _, batch = case.partition(":")
        if name not in (*MODELS, *OTHER_CASES) or not batch.isdigit() or int(batch) < 2:
            parser.error(
                f"--cases {case}: expected NETWORK:BATCH with a batch of at least 2 and a network "
                f"of {', '.join((*MODELS, *OTHER_CASES))}."
            )
    if options.repeats < 2:
        parser.error(f"--repeats {options.repeats}: quartiles need at least 2 rounds.")
    if not 0 <= options.progress < 1:
        parser.error(
            f"--progress {options.progress:g}: progress is a fraction of the training, in [0, 1)."
        )
    options.ways = ["dense", *(way for way in options.ways if way != "dense")]
    return options


def main() -> None:
    """Print one row per case and way."""
    options = read_options()
    torch.set_flush_denormal(True)  # before threads start, which inherit it
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
