"""The engines that `inference.py` compares with: dense ones, and DeepSparse in its own process."""

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from probmask.runtime.speed import Turn, turn_of

RIVALS = ("eager", "torch.compile", "onnxruntime", "openvino")

# Script for the environment with DeepSparse. It compiles the given files. Each line of its input
# contains the index of a file and a number of seconds: it runs that file for this long, and prints
# the seconds of each call.
_DEEPSPARSE = """
import json, sys, time
import numpy as np, onnx, deepsparse
paths, inputs, threads, clock = json.loads(sys.argv[1])
clock = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
for path in paths:
    # DeepSparse is fast only up to opset 13, so convert the file. The networks use newer features
    # only in the inputs of ReduceMean (those over images) and in the attributes of Reshape.
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type == "ReduceMean" and len(node.input) > 1:
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]
        elif node.op_type == "Reshape":
            del node.attribute[:]
    model.ir_version = 8
    model.opset_import[0].version = 13
    onnx.checker.check_model(model)
    onnx.save(model, path)
inputs = [np.load(inputs)]
engines = [
    deepsparse.compile_model(p, batch_size=len(inputs[0]), num_cores=threads) for p in paths
]
print("ready", flush=True)
for line in sys.stdin:
    which, seconds = json.loads(line)
    engines[which].run(inputs)
    times = []
    while not times or sum(times) < seconds:
        started = clock()
        engines[which].run(inputs)
        times.append(clock() - started)
    print(json.dumps(times), flush=True)
"""


def dense_turns(
    model: nn.Module,
    onnx: Path,
    x: Tensor,
    *,
    threads: int,
    wanted: list[str],
    clock: Callable[[], float],
) -> dict[str, Turn]:
    """Return the turns of the dense engines; engines that fail to start are left out."""
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "eager": lambda: lambda: model(x),
        "torch.compile": lambda: _inductor(model, x),
        "onnxruntime": lambda: _onnxruntime(onnx, x, threads),
        "openvino": lambda: _openvino(onnx, x, threads),
    }
    turns = {}
    for name in wanted:
        try:
            turns[name] = turn_of(makers[name](), clock)
        except Exception as error:  # torch.compile needs a C++ compiler
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
    return turns


def _inductor(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    torch._dynamo.reset()  # otherwise a second batch size would compile for dynamic shapes
    compiled = torch.compile(model)
    compiled(x)
    return lambda: compiled(x)


def _onnxruntime(onnx: Path, x: Tensor, threads: int) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, feed)


def _openvino(onnx: Path, x: Tensor, threads: int) -> Callable[[], Any]:
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
    return lambda: request.infer([x.numpy()])


@contextlib.contextmanager
def deepsparse_turns(
    python: str, files: dict[str, Path], x: Tensor, *, threads: int, clock: str
) -> Iterator[dict[str, Turn]]:
    """Yield the turns of DeepSparse on each file, in a process of its own environment.

    There are none if it fails to start; its output says why.
    """
    paths = [str(path) for path in files.values()]
    inputs = f"{paths[0]}.npy"
    np.save(inputs, x.numpy())
    with subprocess.Popen(
        [python, "-c", _DEEPSPARSE, json.dumps([paths, inputs, threads, clock])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NM_DISABLE_ANALYTICS": "True", "PYTHONPATH": ""},
    ) as process:
        ready = _until_ready(process)
        if not ready:
            print("deepsparse is left out: it did not start; its output is above.")
        yield {name: _remote_turn(process, i) for i, name in enumerate(files) if ready}
        assert process.stdin is not None
        process.stdin.close()


def _until_ready(process: subprocess.Popen[str]) -> bool:
    assert process.stdout is not None
    return any(line.strip() == "ready" for line in process.stdout)


def _remote_turn(process: subprocess.Popen[str], which: int) -> Turn:
    def turn(seconds: float) -> list[float]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([which, seconds]) + "\n")
        process.stdin.flush()
        times: list[float] = json.loads(process.stdout.readline())
        return times

    return turn
