"""Claim: the kernels run close to what the processor can do, and what bounds each is known.

For each class of kernels, one layer is timed alone, on one thread, with its tensors in the cache
(`Engine.describe`). Its rate counts multiply-adds with weights that are not zero, at positions of
the image. It is compared with rates that small kernels measure here: multiply-adds on registers
(the peak), and multiply-adds that each load a vector from the L1 or the L2 cache. A sparse weight
is used for one vector after the other, so each of its multiply-adds needs such a load; loads that
cross a cache line are slower. Attention keeps its sums and factors in registers.

    python benchmarks/kernel_limits.py
    python benchmarks/kernel_limits.py --sparsity 0.95

Times are processor time; run it on a machine whose clock rate is steady.
"""

import argparse
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor, nn
from torch.nn import functional

import probmask
from probmask.runtime.kernels.vectors import (
    INT,
    LONG,
    VECTOR,
    WIDTH,
    ZERO,
    load,
    loop,
    multiply_add,
    total,
)
from probmask.runtime.speed import mask_at_random_
from probmask.training.record import cpu_name

# Independent sums, enough to hide the latency of a multiply-add.
_SUMS = 12
# Chunks of one vector per sum that are read again and again: 12 kB of an L1 cache, or 192 kB of an
# L2 cache, with vectors of 64 bytes. Powers of two.
_L1_CHUNKS, _L2_CHUNKS = 16, 256


def _emit(
    builder: ir.IRBuilder, rounds: ir.Value, address: ir.Value, chunks: ir.Value, *, loads: bool
) -> ir.Value:
    """Emit ``rounds`` times as many multiply-adds as there are sums; return one of the results."""
    factor = load(builder, address, 0, VECTOR)

    def body(index: ir.Value, sums: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
        chunk = builder.and_(index, builder.sub(chunks, ir.Constant(LONG, 1)))
        at = builder.add(address, builder.mul(chunk, ir.Constant(LONG, 4 * WIDTH * _SUMS)))
        inputs = [load(builder, at, j, VECTOR) if loads else factor for j in range(_SUMS)]
        pairs = zip(inputs, sums, strict=True)
        return tuple(multiply_add(builder, factor, x, summed) for x, summed in pairs)

    sums = loop(builder, ir.Constant(LONG, 0), rounds, 1, (ZERO,) * _SUMS, body)
    return builder.extract_element(total(builder, sums), ir.Constant(INT, 0))


@intrinsic
def _on_registers(typing_context: Any, rounds: Any, address: Any, chunks: Any) -> Any:  # noqa: ARG001
    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        return _emit(builder, *given, loads=False)

    return types.float32(*[types.int64] * 3), generate


@intrinsic
def _from_cache(typing_context: Any, rounds: Any, address: Any, chunks: Any) -> Any:  # noqa: ARG001
    def generate(_: Any, builder: ir.IRBuilder, __: Any, given: Any) -> Any:
        return _emit(builder, *given, loads=True)

    return types.float32(*[types.int64] * 3), generate


@njit
def _registers(rounds: int, address: int, chunks: int) -> float:
    return _on_registers(rounds, address, chunks)


@njit
def _cache(rounds: int, address: int, chunks: int) -> float:
    return _from_cache(rounds, address, chunks)


def rate(
    kernel: Callable[[int, int, int], float], *, chunks: int = _L1_CHUNKS, skipped: int = 0
) -> float:
    """Return the multiply-adds per second of a kernel whose data starts ``skipped`` floats late."""
    buffer = np.zeros((chunks + 2) * _SUMS * WIDTH, np.float32)
    address = buffer.ctypes.data + -buffer.ctypes.data % 64 + 4 * skipped
    kernel(1, address, chunks)
    rounds, best = 1_000_000, float("inf")
    for _ in range(7):
        started = time.process_time()
        kernel(rounds, address, chunks)
        best = min(best, time.process_time() - started)
    return rounds * _SUMS * WIDTH / best


class _Attention(nn.Module):
    """Attention of three heads over 64 features each, as in ViT-tiny."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.reshape(len(x), -1, 3, 3, 64).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(len(x), -1, 192)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(512, 512, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)[0]
        return hidden


@dataclass(frozen=True)
class Kernel:
    """A layer that stands for a class of kernels.

    Attributes:
        build: Creates the layer.
        shape: Shape of the input.
        uses: Multiply-adds per weight that is kept, or in all for a layer without weights.
        limit: The measured rate that bounds the class.
        bound: What bounds it, for the table.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    uses: int
    limit: str
    bound: str


PEAK, ALIGNED, CROSSING = "multiply-adds", "L1 loads", "L1 loads across lines"
FROM_L2 = "L2 loads"
KERNELS = {
    "3 × 3, 32 × 32": Kernel(
        lambda: nn.Conv2d(64, 64, 3, padding=1), (1, 64, 32, 32), 1024, CROSSING,
        "one load per multiply-add; many loads cross cache lines",
    ),
    "3 × 3, 14 × 14": Kernel(
        lambda: nn.Conv2d(256, 256, 3, padding=1), (1, 256, 14, 14), 196, CROSSING,
        "as above, and the padding between the rows of the run",
    ),
    "1 × 1, 14 × 14": Kernel(
        lambda: nn.Conv2d(256, 1024, 1), (1, 256, 14, 14), 196, FROM_L2,
        "one load per multiply-add; blocks of the input are in L1, the whole is in L2",
    ),
    "depthwise 3 × 3, 28 × 28": Kernel(
        lambda: nn.Conv2d(256, 256, 3, padding=1, groups=256), (1, 256, 28, 28), 784, CROSSING,
        "nine weights at most per result: loading and storing planes",
    ),
    "tokens, 128": Kernel(
        lambda: nn.Linear(384, 1536), (1, 128, 384), 128, FROM_L2,
        "as 1 × 1",
    ),
    "vectors, groups of 16": Kernel(
        lambda: nn.Linear(512, 512), (16, 512), 16, ALIGNED,
        "one vector per weight: its offset and value are loaded for one multiply-add",
    ),
    "vector, batch 1": Kernel(
        lambda: nn.Linear(512, 512), (1, 512), 1, ALIGNED,
        "three scalar loads per multiply-add; no vectors",
    ),
    "attention, 197 tokens": Kernel(
        _Attention, (1, 197, 576), 2 * 3 * 197 * 197 * 64, PEAK,
        "multiply-adds on registers; the softmax, and 197 tokens in vectors of 16",
    ),
    "LSTM, batch 1": Kernel(
        _Recurrent, (1, 100, 512), 100, ALIGNED,
        "one permutation, one load of indices and one of values per sixteen weights",
    ),
    "LSTM, groups of 16": Kernel(
        _Recurrent, (16, 100, 512), 1600, ALIGNED,
        "as vectors in groups; the gates' curves",
    ),
}  # fmt: skip


def measure(kernel: Kernel, sparsity: float) -> tuple[float, float]:
    """Return the multiply-adds of a layer, and its seconds on the kernels."""
    torch.manual_seed(0)
    model = kernel.build().eval().requires_grad_(False)
    has_weights = any(True for _ in model.parameters())
    if has_weights:
        mask_at_random_(model, sparsity, kernel.shape[1:])
    weights = [p for p in model.parameters() if p.dim() > 1]
    kept = sum(int(torch.count_nonzero(weight)) for weight in weights) if has_weights else 1
    engine = probmask.runtime.compile(model, torch.randn(kernel.shape), layers="sparse", threads=1)
    rows = [row for row in engine.describe() if row["runs"] == "kernels"]
    return kernel.uses * kept, 1e-3 * sum(row["kernels_ms"] for row in rows)


def main() -> None:
    """Measure the limits and the kernels, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", type=float, default=0.9)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    limits = {
        PEAK: rate(_registers),
        ALIGNED: rate(_cache),
        CROSSING: rate(_cache, skipped=1),
        FROM_L2: rate(_cache, chunks=_L2_CHUNKS),
    }
    found = {name: measure(kernel, options.sparsity) for name, kernel in KERNELS.items()}
    print(f"{cpu_name() or platform.machine()}, {os.cpu_count()} cores, {date.today()}, one thread")
    print(f"sparsity {options.sparsity:g}; billions of multiply-adds per second:")
    print("; ".join(f"{name} {value / 1e9:.1f}" for name, value in limits.items()))
    print("\n| kernel | achieved | of the peak | limit | of the limit | what bounds it |")
    print("|---|---:|---:|---|---:|---|")
    for name, kernel in KERNELS.items():
        count, seconds = found[name]
        achieved, limit = count / seconds, limits[kernel.limit]
        shares = [f"{100 * achieved / bound:.0f} %" for bound in (limits[PEAK], limit)]
        print(
            f"| {name} | {achieved / 1e9:.1f} | {shares[0]} | {kernel.limit} {limit / 1e9:.1f} "
            f"| {shares[1]} | {kernel.bound} |"
        )


if __name__ == "__main__":
    main()
