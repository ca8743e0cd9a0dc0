"""Claim: sparse networks run many times faster than dense ones do on the best dense engine.

Random masks of the given sparsities (exact over the whole network, each weight as likely),
BatchNorm estimated on noise. The rivals compute all weights: PyTorch eager, `torch.compile`, ONNX
Runtime and OpenVINO (the last two from the ONNX file that `probmask export` writes). All take turns
of 50 ms, whose first call does not count: the caches were the others'. Printed, as Markdown, are
medians, and how many times faster ours is than the fastest rival; then the same for the fastest
call of each, which others on the machine disturbed least.

    python benchmarks/inference.py --networks resnet32 vgg19 --batches 1 64 --out speed.json

`--clock cpu` counts the processor time of this process instead of the time on the wall: for one
thread on a machine that others use as well. `--against deepsparse --python VENV/bin/python` also
times DeepSparse, which needs a virtual environment of its own (deepsparse==1.8.0), on ONNX files
with the same masks, taking turns with the others. `--plot` draws all that `--out` holds;
`--networks` without names only prints and draws it. `--sparsities 0 --engines eager` tells what a
dense network loses against PyTorch: nothing much, the engine then runs it there.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probmask.artifact.onnx import to_onnx
from probmask.models import MODELS
from probmask.runtime.lower.lowering import export, lower
from probmask.runtime.run.engine import Engine
from probmask.runtime.run.threads import Threads
from probmask.runtime.speed import in_turn, mask_at_random_, turn_of
from rival_engines import RIVALS, deepsparse_turns, dense_turns
from speed_tables import plot, print_all, print_times

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def network(name: str, sparsity: float) -> nn.Module:
    """The network with random masks, in evaluation mode."""
    torch.manual_seed(0)
    model = MODELS[name].build()
    mask_at_random_(model, sparsity, MODELS[name].image_shape)
    return model


def onnx_file(model: nn.Module, name: str, path: Path) -> Path:
    """The network as `probmask export` writes it."""
    path.write_bytes(to_onnx(model, MODELS[name].image_shape, metadata={}))
    return path


def summary(times: dict[str, list[float]], of: Callable[[list[float]], float]) -> dict[str, Any]:
    """Milliseconds of the rivals and ours, and how many times faster ours is."""
    found: dict[str, dict[str, float]] = {"dense": {}, "sparse": {}, "deepsparse": {}}
    for name, taken in times.items():
        kind, _, key = name.partition(" ")
        found[kind][key] = 1e3 * of(taken)
    best = min(found["dense"].values())
    faster = {key: best / value for key, value in found["sparse"].items()}
    tables = {f"{kind}_ms": table for kind, table in found.items() if table}
    return {**tables, "times_faster": faster}


def images(name: str, batch: int) -> Tensor:
    """Noise of the network's image size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, *MODELS[name].image_shape, generator=generator)


def engines(models: dict[float, nn.Module], x: Tensor, threads: int) -> dict[float, Engine]:
    """Ours, of networks that differ in their numbers only: they are exported once."""
    program = export(next(iter(models.values())), (x,))
    made = {}
    for sparsity, model in models.items():
        program.state_dict.update(model.state_dict())
        made[sparsity] = Engine(lower(program), (x,), Threads(threads))
    return made


def measure(
    options: argparse.Namespace,
    name: str,
    batch: int,
    models: dict[float, nn.Module],
    compiled: dict[float, Engine],
) -> dict[str, Any]:
    """One row: every engine on one network at one batch size."""
    x = images(name, batch)
    clock = CLOCKS[options.clock]
    with (
        tempfile.TemporaryDirectory() as directory,
        torch.no_grad(),
        contextlib.ExitStack() as open_,
    ):
        ours = {sparsity: engine.tuned_for(x) for sparsity, engine in compiled.items()}
        files = {
            f"{sparsity}": onnx_file(model, name, Path(directory) / f"{sparsity}.onnx")
            for sparsity, model in models.items()
        }
        densest = min(models)
        dense = dense_turns(
            models[densest],
            files[f"{densest}"],
            x,
            threads=options.threads,
            wanted=options.engines,
            clock=clock,
        )
        turns = {f"dense {key}": turn for key, turn in dense.items()}
        for sparsity, engine in ours.items():
            turns[f"sparse {sparsity}"] = turn_of(lambda engine=engine: engine(x), clock)
        if options.against == "deepsparse":
            theirs = deepsparse_turns(
                options.python, files, x, threads=options.threads, clock=options.clock
            )
            turns |= {f"deepsparse {k}": turn for k, turn in open_.enter_context(theirs).items()}
        times = in_turn(turns, seconds=options.seconds)
    row = {"network": name, "batch": batch, "threads": options.threads}
    return row | summary(times, statistics.median) | {"fastest": summary(times, min)}


def processor() -> str:
    """The processor by the name its maker gave it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", default=["resnet32", "vgg19"], choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.95, 0.98, 0.99])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=list(RIVALS), choices=RIVALS)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each engine")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--against", choices=("deepsparse",))
    parser.add_argument("--python", default="python", help="of DeepSparse's environment")
    parser.add_argument("--out", type=Path, help="JSON; rows are added to what it holds")
    parser.add_argument("--plot", type=Path, help="draw the rows of --out to this file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    rows = (
        json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    )
    machine = f"{processor()}, {os.cpu_count()} cores, {date.today()}, {options.clock} time"
    for name in options.networks:
        models = {sparsity: network(name, sparsity) for sparsity in options.sparsities}
        compiled = engines(models, images(name, 1), options.threads)
        for batch in options.batches:
            rows.append(measure(options, name, batch, models, compiled))
            if options.out:
                options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))
            print_times(rows[-1:])
    print(f"\n{machine}")
    print_all(rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
