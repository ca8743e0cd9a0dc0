"""Batch sizes, threads, and the table of speeds that `bench` and `plan` print."""

import argparse
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probmask.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from probmask.runtime.speed import Speed

# Numbers of one batch: a gigabyte of them.
_LARGEST_BATCH = 2**28
# Threads wait for each other at every layer; more of them on one processor do little else.
_THREADS_PER_PROCESSOR = 4


def add_conditions(command: argparse.ArgumentParser) -> None:
    """Take batch sizes and threads."""
    command.add_argument(
        "--batch", type=int, action="append", metavar="B", help="images at once (default: 1 and 64)"
    )
    command.add_argument(
        "--threads", type=int, metavar="N", help="default: as many as PyTorch uses"
    )


def conditions(options: argparse.Namespace) -> tuple[list[int], int]:
    """The batch sizes and the number of threads; PyTorch is told to use as many."""
    import torch

    batches = options.batch or [1, 64]
    for batch in batches:
        if batch < 1:
            raise InputError(f"--batch {batch}: at least one image.")
    threads = torch.get_num_threads() if options.threads is None else options.threads
    if threads < 1:
        raise InputError(f"--threads {threads}: at least one thread.")
    most = _THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    if threads > most:
        raise InputError(
            f"--threads {threads}: at most {most} on this machine, {_THREADS_PER_PROCESSOR} per "
            "processor."
        )
    torch.set_num_threads(threads)
    return batches, threads


def check_sizes(shape: Sequence[int], batches: Sequence[int]) -> None:
    """Refuse inputs of no size, and batches that would not fit into memory."""
    if any(side < 1 for side in shape):
        given = ",".join(map(str, shape))
        raise InputError(f"--input-shape {given}: the sizes of one input, all at least 1.")
    for batch in batches:
        if batch * math.prod(shape) > _LARGEST_BATCH:
            raise InputError(
                f"--batch {batch}: {batch} × {'×'.join(map(str, shape))} are more than "
                f"{_LARGEST_BATCH:,} numbers; give a smaller batch or a smaller input."
            )


def check_takes(network: "nn.Module", shape: Sequence[int]) -> None:
    """Refuse inputs that the network fails on, before anything is measured."""
    import torch

    network.eval()
    try:
        with torch.no_grad():
            network(torch.zeros(2, *shape))
    except InputError:
        raise
    except Exception as error:  # whatever a network of people's own may raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"--input-shape {','.join(map(str, shape))}: the network does not take such an input: "
            f"{reason}"
        ) from error


def print_speeds(speeds: Sequence["Speed"]) -> None:
    """Print PyTorch's time and the engine's, per batch size."""
    from probmask.analysis.tables import print_rows

    headings = ("batch", "PyTorch ms", "sparse ms", "times faster", "images/s", "sparse layers")
    rows = [
        (
            f"{speed.batch}",
            f"{speed.pytorch_ms:.2f}",
            f"{speed.engine_ms:.2f}",
            f"{speed.ratio:.1f}",
            f"{speed.images_per_second:,.0f}",
            f"{speed.layers_on_kernels} of {speed.layers}",
        )
        for speed in speeds
    ]
    print_rows(headings, rows)
    seconds = sum(speed.compile_seconds for speed in speeds)
    threads = speeds[0].threads
    print(
        f"medians, {threads} thread{'s' * (threads > 1)}; compiled in {seconds:.1f} s "
        "(kernels are kept on disk, measuring is not)"
    )
