"""Claim: sparse networks run many times faster than dense ones do on the best dense engine.

Masks are random, with the exact sparsity over the whole network, and BatchNorm statistics are
estimated on noise. The rivals compute all weights: PyTorch eager, `torch.compile`, ONNX Runtime and
OpenVINO (the last two from the ONNX file that `probmask export` writes). All engines take turns of
50 ms. The first call of a turn is not timed, because the caches hold the data of another engine.
The script prints Markdown tables of the median times and of the speedup over the fastest rival, and
the same for the fastest calls, which other programs on the machine disturb least.

    python benchmarks/inference.py --networks resnet32 vgg19 --batches 1 64 --out speed.json
    python benchmarks/inference.py --networks minilm vit encoder --batches 1 8 \\
        --sparsities 0.8 0.9 0.95 0.98 --clock cpu
    python benchmarks/inference.py --networks lstm --batches 1 16 \\
        --sparsities 0.8 0.9 0.95 0.98 --clock cpu
    python benchmarks/inference.py --networks unet convnext --batches 1 \\
        --sparsities 0.8 0.9 0.95 0.98 --clock cpu

`--clock cpu` measures the CPU time of this process instead of wall time, for one thread on a
machine that other programs use. `--against deepsparse --python VENV/bin/python` also times
DeepSparse on ONNX files with the same masks; it needs its own virtual environment
(deepsparse==1.8.0). `--plot` draws all rows in `--out`; `--networks` without names only prints and
draws them. `--sparsities 0 --engines eager` measures the overhead on a dense network, which the
engine runs in PyTorch.
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

from image_networks import IMAGE_NETWORKS
from probmask.artifact.onnx import to_onnx
from probmask.models import MODELS
from probmask.runtime.lower.export import export
from probmask.runtime.lower.lowering import lower
from probmask.runtime.run.engine import Engine
from probmask.runtime.run.threads import Threads
from probmask.runtime.speed import in_turn, mask_at_random_, random_inputs, turn_of
from probmask.training.record import cpu_name
from rival_engines import RIVALS, deepsparse_turns, dense_turns
from speed_tables import plot, print_all, print_times
from token_networks import TOKEN_NETWORKS, write_old_onnx, write_onnx

# Networks that are not a part of probmask.
OWN_NETWORKS = TOKEN_NETWORKS | IMAGE_NETWORKS
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def network(name: str, sparsity: float) -> nn.Module:
    """Return the network with random masks, in evaluation mode."""
    torch.manual_seed(0)
    if name in OWN_NETWORKS:
        model = OWN_NETWORKS[name].build().eval()
        shape = images(name, 1).shape[1:] if name in IMAGE_NETWORKS else ()
        mask_at_random_(model, sparsity, shape)
        return model
    model = MODELS[name].build()
    mask_at_random_(model, sparsity, MODELS[name].image_shape)
    return model


def onnx_file(model: nn.Module, name: str, x: Tensor, path: Path) -> Path:
    """Write the network as `probmask export` does, or for this batch size; return the path."""
    if name in OWN_NETWORKS:
        write_onnx(model, x, path)
        return path
    path.write_bytes(to_onnx(model, MODELS[name].image_shape, metadata={}))
    return path


def old_onnx_file(model: nn.Module, name: str, x: Tensor, path: Path) -> Path:
    """Write the network for DeepSparse; return the path."""
    if name not in OWN_NETWORKS:
        return onnx_file(model, name, x, path)
    write_old_onnx(model, x, path)
    return path


def summary(times: dict[str, list[float]], of: Callable[[list[float]], float]) -> dict[str, Any]:
    """Return the milliseconds of all engines, and our speedup over the fastest dense one."""
    found: dict[str, dict[str, float]] = {"dense": {}, "sparse": {}, "deepsparse": {}}
    for name, taken in times.items():
        kind, _, key = name.partition(" ")
        found[kind][key] = 1e3 * of(taken)
    best = min(found["dense"].values())
    faster = {key: best / value for key, value in found["sparse"].items()}
    tables = {f"{kind}_ms": table for kind, table in found.items() if table}
    return {**tables, "times_faster": faster}


def images(name: str, batch: int) -> Tensor:
    """Return noise of the network's image size, or random tokens."""
    if name in OWN_NETWORKS:
        return OWN_NETWORKS[name].inputs(batch, torch.Generator().manual_seed(0))
    return random_inputs(MODELS[name].image_shape, batch)


def engines(models: dict[float, nn.Module], x: Tensor, threads: int) -> dict[float, Engine]:
    """Compile networks that differ only in their weights; they are exported once."""
    exported = export(next(iter(models.values())), (x,))
    made = {}
    for sparsity, model in models.items():
        exported.program.state_dict.update(model.state_dict())
        made[sparsity] = Engine(lower(exported), (x,), Threads(threads), model)
    return made


def measure(
    options: argparse.Namespace,
    name: str,
    batch: int,
    models: dict[float, nn.Module],
    compiled: dict[float, Engine],
) -> dict[str, Any]:
    """Time every engine on one network at one batch size; return a row of the results."""
    x = images(name, batch)
    clock = CLOCKS[options.clock]
    with (
        tempfile.TemporaryDirectory() as directory,
        torch.no_grad(),
        contextlib.ExitStack() as open_,
    ):
        ours = {sparsity: engine.tuned_for(x) for sparsity, engine in compiled.items()}
        densest = min(models)
        dense = dense_turns(
            models[densest],
            onnx_file(models[densest], name, x, Path(directory) / "dense.onnx"),
            x,
            threads=options.threads,
            wanted=options.engines,
            clock=clock,
        )
        turns = {f"dense {key}": turn for key, turn in dense.items()}
        for sparsity, engine in ours.items():
            turns[f"sparse {sparsity}"] = turn_of(lambda engine=engine: engine(x), clock)
        if options.against == "deepsparse":
            files = {
                f"{sparsity}": old_onnx_file(model, name, x, Path(directory) / f"{sparsity}.onnx")
                for sparsity, model in models.items()
            }
            theirs = deepsparse_turns(
                options.python, files, x, threads=options.threads, clock=options.clock
            )
            turns |= {f"deepsparse {k}": turn for k, turn in open_.enter_context(theirs).items()}
        times = in_turn(turns, seconds=options.seconds)
    row = {"network": name, "batch": batch, "threads": options.threads}
    return row | summary(times, statistics.median) | {"fastest": summary(times, min)}


def main() -> None:
    """Time the engines, then print, save and plot the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--networks", nargs="*", default=["resnet32", "vgg19"], choices=[*MODELS, *OWN_NETWORKS]
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.95, 0.98, 0.99])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=list(RIVALS), choices=RIVALS)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of calls per engine")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--against", choices=("deepsparse",))
    parser.add_argument(
        "--python", default="python", help="Python of the environment with DeepSparse"
    )
    parser.add_argument("--out", type=Path, help="JSON file to which rows are added")
    parser.add_argument("--plot", type=Path, help="draw the rows of --out to this file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    rows = (
        json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    )
    processor = cpu_name() or platform.machine()
    machine = f"{processor}, {os.cpu_count()} cores, {date.today()}, {options.clock} time"
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
