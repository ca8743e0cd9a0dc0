"""Claim: the exported C program reaches at least half of the engine's speed on x86.

Every network has random masks of the exact sparsity. The engine runs with all layers on the kernels
("sparse") and as it chooses ("measured"). The C program is compiled as a shared library and called
from this process. All take turns of 50 ms, on one thread; times are processor time of this process.
The script prints a Markdown table of the medians, and the largest difference between the outputs of
the C program and the engine, relative to the largest output.

    python benchmarks/c_export.py --networks resnet32 vgg19 mobilenetv1 minilm

`minilm` is the BERT of transformers with 6 layers of width 384 over 128 tokens, from the sum of the
embeddings on.
"""

import argparse
import ctypes
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn

import probmask
from probmask.models import MODELS
from probmask.runtime.speed import in_turn, mask_at_random_, random_inputs, turn_of
from probmask.training.record import cpu_name
from token_networks import MiniLM

FLAGS = ("-std=c99", "-O3", "-march=native", "-ffp-contract=fast", "-Wall", "-Wextra", "-Werror")


class MiniLMBody(nn.Module):
    """MiniLM on embeddings instead of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = MiniLM().bert

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return the hidden state of each token."""
        return self.bert(inputs_embeds=embeddings).last_hidden_state


def network(name: str, sparsity: float, batch: int) -> tuple[nn.Module, Tensor]:
    """Return the network with random masks, and an input."""
    torch.manual_seed(0)
    if name == "minilm":
        model: nn.Module = MiniLMBody().eval()
        mask_at_random_(model, sparsity, ())
        return model, random_inputs((128, 384), batch)
    model = MODELS[name].build()
    shape = MODELS[name].image_shape
    mask_at_random_(model, sparsity, shape)
    return model, random_inputs(shape, batch)


def compiled(directory: Path, compiler: str) -> Callable[[Tensor, Tensor], None]:
    """Compile the C program in a directory as a library; return its function."""
    library = directory / f"{compiler}.so"  # a name of its own: libraries are loaded once per name
    files = (directory / "network.c", directory / "kernels.c")
    subprocess.run([compiler, *FLAGS, "-shared", "-fPIC", "-o", library, *files], check=True)
    function = ctypes.CDLL(str(library)).run
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None
    return lambda x, y: function(x.data_ptr(), y.data_ptr())


def measure(options: argparse.Namespace, name: str, sparsity: float) -> tuple[list[str], float]:
    """Time one network; return the cells of its row and the largest difference."""
    model, x = network(name, sparsity, options.batch)
    sparse = probmask.runtime.compile(model, x, threads=1, layers="sparse")
    measured = probmask.runtime.compile(model, x, threads=1)
    expected = sparse(x)
    out = torch.empty_like(expected)
    with tempfile.TemporaryDirectory() as directory:
        probmask.runtime.export_c(model, directory, x)
        functions = {c: compiled(Path(directory), c) for c in options.compilers}
        size = (Path(directory) / f"{options.compilers[0]}.so").stat().st_size
    differences = []
    for function in functions.values():
        function(x, out)
        largest = max(float(expected.abs().max()), 1e-30)  # random masks can cut a network
        differences.append(float((out - expected).abs().max()) / largest)
    calls: dict[str, Callable[[], object]] = {
        "sparse": lambda: sparse(x),
        "measured": lambda: measured(x),
        **{c: lambda f=f: f(x, out) for c, f in functions.items()},  # type: ignore[misc]
    }
    turns = {key: turn_of(call, time.process_time) for key, call in calls.items()}
    times = in_turn(turns, seconds=options.seconds)
    ms = {key: 1e3 * statistics.median(taken) for key, taken in times.items()}
    best = min(ms["sparse"], ms["measured"])
    cells = [f"{name}, {100 * sparsity:g} %", f"{ms['sparse']:.2f}", f"{ms['measured']:.2f}"]
    cells += [f"{ms[c]:.2f} ({best / ms[c]:.2f}×)" for c in functions]
    return [*cells, f"{size / 1e6:.1f} MB", f"{max(differences):.1e}"], max(differences)


def main() -> None:
    """Measure all networks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*MODELS, "minilm"]
    parser.add_argument(
        "--networks",
        nargs="+",
        default=["resnet32", "vgg19", "mobilenetv1", "minilm"],
        choices=names,
    )
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.95, 0.98])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compilers", nargs="+", default=["gcc"])
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of calls per engine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    titles = ["network", "engine, sparse ms", "engine, measured ms"]
    titles += [f"C by {compiler} ms" for compiler in options.compilers]
    print("| " + " | ".join([*titles, "library", "difference"]) + " |")
    print("|---" + "|---:" * (len(titles) + 1) + "|")
    for name in options.networks:
        for sparsity in options.sparsities:
            cells, _ = measure(options, name, sparsity)
            print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\n{cpu_name() or platform.machine()}, {os.cpu_count()} cores, {date.today()}")


if __name__ == "__main__":
    main()
