"""Claim: sparse networks run many times faster than dense ones do on the best dense engine.

Random masks of the given sparsities (exact over the whole network, each weight as likely),
BatchNorm estimated on noise. The rivals compute all weights: PyTorch eager, `torch.compile`, ONNX
Runtime and OpenVINO (the last two from the ONNX file that `probmask export` writes), all in one
process and in turn. Printed are medians, and how many times faster ours is than the fastest rival;
then the same for the fastest call of each, which others on the machine disturbed least.

    python benchmarks/inference.py --networks resnet32 vgg19 --batches 1 64 --out speed.json

`--clock cpu` counts the processor time of this process instead of the time on the wall: for one
thread on a machine that others use as well. `--against deepsparse --python VENV/bin/python` also
times DeepSparse, which needs a virtual environment of its own (deepsparse==1.8.0), on the same
ONNX files with the same masks. `--plot` draws what `--out` holds.
"""

import argparse
import contextlib
import json
import logging
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probmask.artifact.onnx import to_onnx
from probmask.models import MODELS
from probmask.runtime.engine import Engine
from probmask.runtime.exporting import export
from probmask.runtime.lower import lower
from probmask.runtime.native import Threads
from probmask.runtime.rehearsal import mask_at_random_

RIVALS = ("eager", "torch.compile", "onnxruntime", "openvino")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

DEEPSPARSE = """
import json, os, sys, time
os.environ["NM_DISABLE_ANALYTICS"] = "True"
import numpy as np, deepsparse
path, batch, threads, shape, seconds = json.loads(sys.argv[1])
engine = deepsparse.compile_model(path, batch_size=batch, num_cores=threads)
inputs = [np.random.default_rng(0).standard_normal((batch, *shape)).astype(np.float32)]
engine.run(inputs)
times = []
while sum(times) < seconds or len(times) < 5:
    started = time.perf_counter()
    engine.run(inputs)
    times.append(time.perf_counter() - started)
print(json.dumps(sorted(times)[len(times) // 2]))
"""


def network(name: str, sparsity: float) -> nn.Module:
    """The network with random masks, in evaluation mode."""
    torch.manual_seed(0)
    model = MODELS[name].build()
    mask_at_random_(model, sparsity, MODELS[name].image_shape)
    return model


def onnx_file(model: nn.Module, name: str, directory: Path) -> Path:
    """The network as `probmask export` writes it."""
    path = directory / "model.onnx"
    path.write_bytes(to_onnx(model, MODELS[name].image_shape, metadata={}))
    return path


def rivals(
    model: nn.Module, onnx: Path, x: Tensor, threads: int, wanted: list[str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The dense engines, each ready to run."""
    if "eager" in wanted:
        yield "eager", lambda: model(x)
    if "torch.compile" in wanted:
        compiled = torch.compile(model)
        try:
            compiled(x)
            yield "torch.compile", lambda: compiled(x)
        except Exception as error:  # it needs a C++ compiler
            print(f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0]}")
    if "onnxruntime" in wanted:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: x.numpy()}
        yield "onnxruntime", lambda: session.run(None, feed)
    if "openvino" in wanted:
        import openvino

        core = openvino.Core()
        settings = {
            "INFERENCE_NUM_THREADS": threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        read = core.read_model(onnx)
        read.reshape([len(x), *x.shape[1:]])
        request = core.compile_model(read, "CPU", settings).create_infer_request()
        yield "openvino", lambda: request.infer([x.numpy()])


def timed(
    functions: dict[str, Callable[[], Any]], seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of each call; the functions take turns until each has run long enough."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    while any(sum(taken) < seconds or len(taken) < 5 for taken in times.values()):
        for name, function in functions.items():
            if sum(times[name]) < seconds or len(times[name]) < 5:
                started = clock()
                function()
                times[name].append(clock() - started)
    return {name: [1e3 * value for value in taken] for name, taken in times.items()}


def summary(times: dict[str, list[float]], of: Callable[[list[float]], float]) -> dict[str, Any]:
    """Milliseconds of the rivals and ours, and how many times faster ours is."""
    found = {name: of(taken) for name, taken in times.items()}
    dense = {key: value for key, value in found.items() if key in RIVALS}
    sparse = {key: value for key, value in found.items() if key not in RIVALS}
    faster = {key: min(dense.values()) / value for key, value in sparse.items()}
    return {"dense_ms": dense, "sparse_ms": sparse, "times_faster": faster}


def deepsparse(python: str, onnx: Path, x: Tensor, threads: int, seconds: float) -> float:
    """Milliseconds of DeepSparse, in its own environment."""
    given = json.dumps([str(onnx), len(x), threads, list(x.shape[1:]), seconds])
    done = subprocess.run(
        [python, "-c", DEEPSPARSE, given],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "NM_DISABLE_ANALYTICS": "True"},
    )
    return 1e3 * float(done.stdout.splitlines()[-1])


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
    row: dict[str, Any] = {"network": name, "batch": batch, "threads": options.threads}
    theirs: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        ours = {sparsity: engine.tuned_for(x) for sparsity, engine in compiled.items()}
        densest = models[min(models)]
        onnx = onnx_file(densest, name, Path(directory))
        functions = dict(rivals(densest, onnx, x, options.threads, options.engines))
        for sparsity, engine in ours.items():
            functions[f"{sparsity}"] = lambda engine=engine: engine(x)
        times = timed(functions, options.seconds, clock)
        if options.against == "deepsparse":
            for sparsity, model in models.items():
                file = onnx_file(model, name, Path(directory))
                theirs[f"{sparsity}"] = deepsparse(
                    options.python, file, x, options.threads, options.seconds
                )
    row |= summary(times, statistics.median) | {"fastest": summary(times, min)}
    if theirs:
        row["deepsparse_ms"] = theirs
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as Markdown."""
    dense = list(dict.fromkeys(key for row in rows for key in row["dense_ms"]))
    sparse = list(dict.fromkeys(key for row in rows for key in row["sparse_ms"]))
    heads = [*(f"{key} ms" for key in dense), *(f"{100 * float(key):g} %" for key in sparse)]
    print(f"| network, batch | {' | '.join(heads)} |")
    print(f"|---|{'---:|' * len(heads)}")
    for row in rows:
        cells = [f"{row['dense_ms'][key]:.2f}" if key in row["dense_ms"] else "" for key in dense]
        cells += [f"{row['sparse_ms'][k]:.2f} ({row['times_faster'][k]:.1f}×)" for k in sparse]
        print(f"| {row['network']}, {row['batch']} | {' | '.join(cells)} |")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw how many times faster ours is, against sparsity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for row in rows:
        points = sorted((float(key), value) for key, value in row["times_faster"].items())
        places = [f"{100 * sparsity:g} %" for sparsity, _ in points]
        label = f"{row['network']}, batch {row['batch']}"
        axes.plot(places, [value for _, value in points], marker="o", label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(yscale="log", xlabel="sparsity", ylabel="times faster than the best dense engine")
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150, bbox_inches="tight")


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
    parser.add_argument("--networks", nargs="+", default=["resnet32", "vgg19"], choices=MODELS)
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
            show(rows[-1:])
    print(f"\n{machine}\n\nmedians:\n")
    show(rows)
    print("\nthe fastest call of each:\n")
    show([{**row, **row["fastest"]} for row in rows])
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
