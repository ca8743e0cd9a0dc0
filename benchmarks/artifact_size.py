"""Claim: an artifact is within 5 % of the entropy bound, and is saved and loaded in under a second.

For each weight tensor with n entries and nnz kept ones, the bound is 4 bytes for each value plus
n H(nnz / n) bits for the positions. All other tensors count with their size. There are two kinds of
masks. "even" masks keep each weight of each layer with the same probability. "magnitude" masks keep
the largest weights of all layers together, so layers and rows differ in density. The numbers of
BatchNorm are random, as after training. "ours" is the whole file, "data" the file without table and
header. The other columns are multiples of ours. --trained adds trained networks.

docs/results/artifact_size.md shows both tables.

    python benchmarks/artifact_size.py             # sizes and times
    python benchmarks/artifact_size.py --table times --values int8
    python benchmarks/artifact_size.py --table sizes --trained runs/demo/model.safetensors
"""

import argparse
import gzip
import io
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import scipy.sparse
import torch
import zstandard
from safetensors.torch import load_file
from safetensors.torch import save as dense_bytes
from torch import Tensor, nn

from probmask import artifact
from probmask.core.selection import select_top
from probmask.models import build_model

SPARSITIES = (0.9, 0.95, 0.98, 0.99, 0.999)


def network(name: str, sparsity: float, masks: str) -> nn.Module:
    """Return an untrained network of this sparsity, with tensors like those of a trained one."""
    torch.manual_seed(0)
    model = build_model(name, {})
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                tensor.uniform_(0.1, 1)
        if masks == "even":
            kept = [torch.rand_like(weight) >= sparsity for weight in weights]
        else:
            total = sum(weight.numel() for weight in weights)
            kept = select_top([w.abs() for w in weights], total - round(sparsity * total))
        for weight, mask in zip(weights, kept, strict=True):
            weight.masked_fill_(~mask, 0.0)
    return model


def bound(state: dict[str, Tensor]) -> float:
    """Return the bound in bytes: exact values, and positions that follow no pattern."""
    return sum(entropy(t) if t.dim() > 1 else t.nbytes for t in state.values())


def entropy(tensor: Tensor) -> float:
    """Return nnz * 4 + n H(nnz / n) / 8 bytes."""
    n, nnz = tensor.numel(), int(tensor.count_nonzero())
    p = nnz / n
    spread = sum(-q * math.log2(q) for q in (p, 1 - p) if q > 0)
    return nnz * tensor.itemsize + n * spread / 8


def csr_npz(state: dict[str, Tensor]) -> int:
    """Return the bytes of scipy's compressed CSR files, with all other tensors dense."""
    size = 0
    for tensor in state.values():
        if tensor.dim() > 1:
            buffer = io.BytesIO()
            scipy.sparse.save_npz(buffer, scipy.sparse.csr_matrix(tensor.flatten(1).numpy()))
            size += buffer.tell()
        else:
            size += tensor.nbytes
    return size


def print_sizes(path: Path, trained: Sequence[Path]) -> None:
    """Print one row for each network, kind of masks and sparsity."""
    print("| network | masks | sparsity | ours, bytes | / bound | data / bound |", end="")
    print(" dense | dense, zstd | dense, gzip | scipy CSR |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in ("vgg19", "resnet32"):
        for masks in ("even", "magnitude"):
            for sparsity in SPARSITIES:
                print_row(path, network(name, sparsity, masks), f"{name} | {masks}")
    for file in trained:
        method = artifact.read(file).metadata.get("method", {}).get("name", "?")
        print_row(path, artifact.load(file), f"{file.parent.name} | {method}, trained")


def print_row(path: Path, model: nn.Module, label: str) -> None:
    """Print our size in bytes and relative to the bound, and the others as multiples of ours."""
    state = model.state_dict()
    info = artifact.save(model, path, overwrite=True)
    data = sum(row.stored_bytes for row in info.tensors)
    least, dense = bound(state), dense_bytes(state)
    others = (
        len(dense),
        len(zstandard.ZstdCompressor(level=9).compress(dense)),
        len(gzip.compress(dense, 6)),
        csr_npz(state),
    )
    weights = [tensor for tensor in state.values() if tensor.dim() > 1]
    kept = sum(int(w.count_nonzero()) for w in weights) / sum(w.numel() for w in weights)
    multiples = " | ".join(f"{size / info.file_bytes:.1f} ×" for size in others)
    print(
        f"| {label} | {100 * (1 - kept):.4g} % | {info.file_bytes:,} "
        f"| {info.file_bytes / least:.3f} | {data / least:.3f} | {multiples} |",
        flush=True,
    )


def print_times(path: Path, repeats: int, values: str | None) -> None:
    """Print the median elapsed and CPU times for vgg19 (20 million weights)."""
    print("| vgg19 at | save | load_state | load_into | load | read | dense save | dense load |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    dense, other = path.with_name("dense"), build_model("vgg19", {})
    for sparsity in SPARSITIES:
        model = network("vgg19", sparsity, "even")
        actions: list[Callable[[nn.Module], object]] = [
            lambda m: artifact.save(
                m, path, overwrite=True, metadata={"model": "vgg19"}, values=values
            ),
            lambda _: artifact.load_state(path),
            lambda _: artifact.load_into(other, path),
            lambda _: artifact.load(path),
            lambda _: artifact.read(path),
            lambda m: dense.write_bytes(dense_bytes(m.state_dict())),
            lambda _: other.load_state_dict(load_file(dense)),
        ]
        runs = [[timed(action, model) for action in actions] for _ in range(repeats)]
        cells = []
        for column in zip(*runs, strict=True):
            elapsed, cpu = (1e3 * statistics.median(clock) for clock in zip(*column, strict=True))
            cells.append(f"{elapsed:.0f} ({cpu:.0f}) ms")
        print(f"| {100 * sparsity:g} % | {' | '.join(cells)} |", flush=True)


def timed(action: Callable[[nn.Module], object], model: nn.Module) -> tuple[float, float]:
    """Return the elapsed seconds and the CPU seconds of this process."""
    start, cpu = time.perf_counter(), time.process_time()
    action(model)
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", choices=["sizes", "times", "both"], default="both")
    parser.add_argument("--trained", type=Path, nargs="*", default=[], help="artifacts to add")
    parser.add_argument("--values", help="as for save, such as int8; for the times")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    threads = f"{options.threads} thread{'s' if options.threads > 1 else ''}"
    print(f"torch {torch.__version__}, {threads}, {platform.machine()}\n")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        if options.table != "times":
            print_sizes(path, options.trained)
            print()
        if options.table != "sizes":
            print_times(path, options.repeats, options.values)


if __name__ == "__main__":
    main()
