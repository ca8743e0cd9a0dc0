"""Claim: integers make a trained sparse network more than twice as small, at the same accuracy.

Each finished network is saved with exact values, in fp16 and as integers, and its test accuracy is
measured on what is loaded from the file. Where rounding loses more than 0.3 points, a "tuned" row
follows: the network is first trained as integers (`probmask.quantize`) by SGD, with a learning rate
that falls from 0.01 to 0. More training alone improves a network, so the exact network is then
tuned the same way, with its zeros frozen. `--tune int8 int4 int3` chooses the rows.

The bound is, for each weight tensor of n entries with nnz kept ones, n H(nnz / n) bits for the
positions, nnz times the entropy of its integers, and the entropy of the codes of its scales; for
exact values 32 bits each. All other tensors count with their size in the file.

`--codes` prints what other codes would save in the files, in bytes: positions coded row by row (the
entropy of each row, and of the numbers of kept weights), one table of frequencies for the integers
of all layers and one for all scales, and entropy-coded high bytes of the fp16 numbers.

    python benchmarks/quantized_size.py runs/demo runs/lenet
    python benchmarks/quantized_size.py runs/demo runs/lenet --codes
"""

import argparse
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import probmask
from probmask.artifact import load_state
from probmask.core.integer_grid import grid_of, kept_places, round_to_grid
from probmask.data import DataSource
from probmask.storage.entropy_coding import encode_symbols
from probmask.storage.integers import INTEGERS
from probmask.storage.reader import open_artifact
from probmask.training.evaluation import evaluate_model
from probmask.training.run import load_run_data
from probmask.training.run_directory import RunDirectory

VALUES = ("fp32", "fp16", "int8", "int4")
# A network that loses more points than this by rounding is tuned.
MAX_LOSS = 0.3


def entropy(numbers: Tensor) -> float:
    """Return the number of bits of all numbers together at the entropy of their histogram."""
    counts = numbers.unique(return_counts=True)[1].double()
    return float(-(counts * (counts / counts.sum()).log2()).sum())


def bound(path: Path) -> float:
    """Return the bound in bytes."""
    state, bits = load_state(path), 0.0
    for row in probmask.read(path).tensors:
        if len(row.shape) < 2:
            bits += 8 * row.stored_bytes
            continue
        p = row.nnz / math.prod(row.shape)
        bits += math.prod(row.shape) * sum(-q * math.log2(q) for q in (p, 1 - p) if q > 0)
        bits += values_entropy(state[row.name], row.values)
    return bits / 8


def values_entropy(weight: Tensor, values: str) -> float:
    """Return the number of bits of the kept weights: their entropy if they are integers."""
    places, counts = kept_places(weight)
    if values not in INTEGERS:
        return places.numel() * {"F32": 32.0, "F16": 16.0}[values]
    kept = weight.flatten()[places]
    codes, _ = grid_of(kept, counts, INTEGERS[values])
    return entropy(round_to_grid(kept, codes, counts, INTEGERS[values])) + entropy(codes)


def tune(model: nn.Module, data: DataSource, values: str, epochs: int) -> None:
    """Train the network as integers, or exactly if `values` is "fp32", with the zeros kept."""
    model.train()
    exact = values not in INTEGERS
    frozen = (
        probmask.freeze_masks(model) if exact else probmask.quantize(model, bits=INTEGERS[values])
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    steps = epochs * data.steps_per_epoch(64)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(epochs):
        for batch in data.training(epoch, batch_size=64, seed=0):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch.inputs), batch.labels).backward()
            optimizer.step()
            schedule.step()
    frozen.finalize(data=(b.inputs for b in data.training(epochs, batch_size=64, seed=0)))
    model.eval()


def print_row(label: str, model: nn.Module, data: DataSource, values: str) -> float:
    """Print one row, and return the accuracy of the network that is loaded from the file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        exact = probmask.save(model, path)
        if values != "fp32":
            probmask.save(model, path, values=values, overwrite=True)
        info, summary, least = probmask.read(path), probmask.inspect(path), bound(path)
        probmask.load_into(model, path)
    stored = sum(row.stored_bytes for row in info.tensors)
    accuracy = evaluate_model(model, data).as_table()["accuracy"]
    smaller = exact.file_bytes / info.file_bytes
    print(
        f"| {label} | {accuracy:.2f} % | {info.dense_bytes:,} | {info.file_bytes:,} "
        f"| {least:,.0f} | {info.dense_bytes / info.file_bytes:.1f} × | {smaller:.2f} × "
        f"| {summary.total.bits_per_weight:.1f} | {stored / least:.3f} |",
        flush=True,
    )
    return float(accuracy)


def print_network(run: Path, tuned: Sequence[str] | None, epochs: int) -> None:
    """Print the rows of the network of a run. `tuned` are the values to tune, None for losses."""
    path = run / "model.safetensors"
    metadata = probmask.read(path).metadata
    # As in the run: images held out there are not trained on here.
    data = load_run_data(RunDirectory(run).read_config()).to(torch.device("cpu"), workers=0)
    sparsity = 100 * probmask.inspect(path).sparsity
    name = f"{metadata['model']} ({metadata['data']}), {sparsity:.0f} %"
    found = {v: print_row(f"{name} | {v}", probmask.load(path), data, v) for v in VALUES}
    if tuned is None:
        tuned = [values for values in VALUES if found["fp32"] - found[values] > MAX_LOSS]
    for values in ["fp32", *tuned] if tuned else ():
        model = probmask.load(path)
        tune(model, data, values, epochs)
        print_row(f"{name} | {values}, tuned", model, data, values)


def print_codes(run: Path, values: str) -> None:
    """Print the number of bytes that other codes would save in the file of a run."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        info = probmask.save(probmask.load(run / "model.safetensors"), path, values=values)
        state = load_state(path)
        with open_artifact(path) as artifact:
            entries = artifact.entries.values()
            positions = sum(entry.positions for entry in entries if len(entry.shape) > 1)
    weights = [tensor for tensor in state.values() if tensor.dim() > 1]
    pairs = [integers_of(weight, INTEGERS[values]) for weight in weights]
    joint = sum(saved_by_one_table(numbers) for numbers in zip(*pairs, strict=True))
    others = [t.flatten() for t in state.values() if t.dim() < 2 and t.is_floating_point()]
    halves = torch.cat(others).half().numpy()
    halves = halves[halves != 0]
    coded = encode_symbols((halves.view(np.uint16) >> 8).astype(np.uint8)).size
    by_row = positions - sum(map(row_entropy, weights)) / 8
    print(
        f"| {run.name} | {values} | {info.file_bytes:,} "
        f"| {by_row:,.0f} | {joint:,} | {halves.size - coded:,} |",
        flush=True,
    )


def row_entropy(weight: Tensor) -> float:
    """Return the number of bits of the positions, each row with its own density."""
    kept = weight.flatten(1).count_nonzero(1)
    columns = weight[0].numel()
    p = torch.stack([kept, columns - kept]).double() / columns
    return float(columns * torch.special.entr(p).sum() / math.log(2)) + entropy(kept)


def integers_of(weight: Tensor, bits: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the symbols of the integers and of the scales of a weight that lies on a grid."""
    places, counts = kept_places(weight)
    kept = weight.flatten()[places]
    codes, _ = grid_of(kept, counts, bits)
    sizes = round_to_grid(kept, codes, counts, bits).abs() - 1
    return sizes.numpy().astype(np.uint8), (codes - codes.min()).numpy().astype(np.uint8)


def saved_by_one_table(layers: Sequence[NDArray[np.uint8]]) -> int:
    """Return the number of bytes that one block for all layers saves."""
    together = encode_symbols(np.concatenate(layers)).size
    return int(sum(encode_symbols(layer).size for layer in layers) - together)


def main() -> None:
    """Print a table with the rows of each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="directories of finished runs")
    parser.add_argument("--tune", nargs="*", choices=list(INTEGERS), help="rows to tune")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of the tuned rows")
    parser.add_argument("--codes", action="store_true", help="print what other codes would save")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.codes:
        print("| network | values | file, bytes | rows | joint tables | coded fp16 |")
        print("|---|---|---:|---:|---:|---:|")
        for run, values in itertools.product(options.runs, ("int8", "int4")):
            print_codes(run, values)
        return
    print(
        "| network | values | test accuracy | dense, bytes | file, bytes | bound, bytes |", end=""
    )
    print(" dense / file | fp32 / file | bits per kept weight | data / bound |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for run in options.runs:
        print_network(run, options.tune, options.epochs)


if __name__ == "__main__":
    main()
