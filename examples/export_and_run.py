"""Run a finished sparse network: in PyTorch, on the sparse engine for CPUs, and in ONNX Runtime.

python examples/export_and_run.py [--quick]
"""

import sys
import time
from pathlib import Path

import onnxruntime
import torch

import probmask
from probmask import runtime
from probmask.artifact import export
from probmask.data import load_data

QUICK = "--quick" in sys.argv
SETTINGS = {
    "data": "digits",
    "epochs": 1 if QUICK else 5,
    "model_args.width": 8 if QUICK else 64,
    "batch_size": 256 if QUICK else 64,
    "method.sparsity": 0.95,
    "dense_twin": False,
    "tensorboard": False,
    "threads": 1,
}


def milliseconds(run, repeat=3 if QUICK else 30):
    """Return the shortest time of several calls."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def main():
    """Train a network, export its file, and compare answers and times."""
    outcome = probmask.train(probmask.load_config(None, list(SETTINGS.items())))
    artifact = outcome.directory / "model.safetensors"
    export(artifact, "model.onnx", overwrite=True)
    for file in (artifact, Path("model.onnx")):
        print(f"{file}: {file.stat().st_size:,} bytes")

    torch.set_num_threads(1)
    (batch,) = load_data("digits", settings={"test_images": 64}).testing(batch_size=64)
    model = probmask.load(artifact)
    engine = runtime.compile(model, batch.inputs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession("model.onnx", options)
    feed = {session.get_inputs()[0].name: batch.inputs.numpy()}

    with torch.no_grad():
        runs = {
            "PyTorch": lambda: model(batch.inputs),
            "sparse engine": lambda: engine(batch.inputs),
            "ONNX Runtime": lambda: torch.from_numpy(session.run(None, feed)[0]),
        }
        for name, run in runs.items():
            correct = (run().argmax(1) == batch.labels).sum().item()
            print(f"{name}: {correct} of 64 correct, {milliseconds(run):.2f} ms for 64 images")


if __name__ == "__main__":
    main()
