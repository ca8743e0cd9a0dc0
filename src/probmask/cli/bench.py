"""`probmask bench`: time a finished network on this machine."""

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.cli.arguments import (
    add_artifact,
    add_model,
    artifact_path,
    model_to_import,
    parse_shape,
)
from probmask.cli.terminal import print_json, print_message, print_rows, print_text
from probmask.errors import InputError
from probmask.messages import one_line

if TYPE_CHECKING:
    from torch import nn

    from probmask.runtime.speed import Speed

_LARGEST_BATCH = 2**28  # numbers in one batch: a gigabyte as float32
# Threads wait for each other after every layer, so more threads than this only slow things down.
_THREADS_PER_PROCESSOR = 4


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    bench = commands.add_parser(
        "bench",
        help="time a finished network on this machine",
        description="Time a finished network on this machine and compare it with PyTorch. If "
        "ARTIFACT is a run's directory, the result is also written to its record, from which "
        "'compare' and 'report' read it.",
    )
    add_artifact(bench)
    add_conditions(bench)
    add_model(bench)
    bench.add_argument(
        "--input-shape", metavar="C,H,W", help="shape of one input (default: as in training)"
    )
    bench.add_argument("--layers", action="store_true", help="also print the time of each layer")
    bench.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Compile the network for each batch size, time it and print the table."""
    from probmask.artifact import load, read
    from probmask.artifact.export import input_shape_of
    from probmask.runtime.speed import measure_speed

    artifact = artifact_path(options)
    model = model_to_import(options)
    shape = input_shape_of(artifact, read(artifact), model, parse_shape(options.input_shape))
    batches, threads = set_conditions(options)
    check_sizes(shape, batches)
    network = load(artifact, model=model)
    check_accepts(network, shape)
    measured = [measure_speed(network, shape, batch=b, threads=threads) for b in batches]
    speeds = [speed for speed, _ in measured]
    written = _try_to_record(options.artifact, speeds, shape)
    if options.json:
        results = [{**speed.as_table(), "nodes": engine.describe()} for speed, engine in measured]
        result = {"artifact": str(artifact), "input_shape": list(shape), "results": results}
        print_json({**result, "record": None if written is None else str(written)})
        return
    print_speeds(speeds)
    if written is not None:
        print_text(f"written to {written}; 'compare' and 'report' show batch size {batches[0]}")
    if options.layers:
        for speed, engine in measured:
            print_text()
            print_text(f"batch {speed.batch}")
            engine.explain()


def _try_to_record(
    given: Path, speeds: Sequence["Speed"], input_shape: Sequence[int]
) -> Path | None:
    """Write the speeds to the record of a run; warn if it cannot be written."""
    try:
        return record_latency(given, speeds, input_shape) if given.is_dir() else None
    except (InputError, OSError) as error:
        print_message(f"warning: the measurements are printed but not recorded: {error}")
        return None


def record_latency(
    directory: Path, speeds: Sequence["Speed"], input_shape: Sequence[int]
) -> Path | None:
    """Write the speeds to the record of the run in the directory, replacing earlier ones.

    Tables and pages show the first batch size; the record holds all of them.

    Returns:
        The path of the record, or None if nothing was written: the directory has no finished run,
        or its inputs have another shape.
    """
    from probmask.sweeps.sweep_directory import update_copy
    from probmask.training.record import cpu_name
    from probmask.training.run_directory import RunDirectory

    run = RunDirectory(directory)
    if not run.finished:
        return None
    record = run.read_record()
    if list(input_shape) != record.get("image_shape"):
        return None
    timed = [_latency(speed) for speed in speeds]
    record["latency"] = {**timed[0], "cpu": cpu_name(), "batches": timed}
    run.write_record(record)
    update_copy(run, record)
    return run.record


def add_conditions(command: argparse.ArgumentParser) -> None:
    """Add ``--batch`` and ``--threads``."""
    command.add_argument(
        "--batch",
        type=int,
        action="append",
        metavar="B",
        help="batch size; may be repeated (default: 1 and 64)",
    )
    command.add_argument(
        "--threads", type=int, metavar="N", help="number of threads (default: PyTorch's)"
    )


def set_conditions(options: argparse.Namespace) -> tuple[list[int], int]:
    """Return the batch sizes and the number of threads, and set the latter in PyTorch."""
    import torch

    batches = options.batch or [1, 64]
    for batch in batches:
        if batch < 1:
            raise InputError(f"--batch {batch}: the batch size must be at least 1.")
    threads = torch.get_num_threads() if options.threads is None else options.threads
    if threads < 1:
        raise InputError(f"--threads {threads}: the number of threads must be at least 1.")
    most = _THREADS_PER_PROCESSOR * (os.cpu_count() or 1)
    if threads > most:
        raise InputError(
            f"--threads {threads}: the limit on this machine is {most}, {_THREADS_PER_PROCESSOR} "
            "per processor."
        )
    torch.set_num_threads(threads)
    return batches, threads


def check_sizes(shape: Sequence[int], batches: Sequence[int]) -> None:
    """Raise if the input shape is empty, or if a batch would not fit into memory."""
    if any(side < 1 for side in shape):
        given = ",".join(map(str, shape))
        raise InputError(f"--input-shape {given}: every size must be at least 1.")
    for batch in batches:
        if batch * math.prod(shape) > _LARGEST_BATCH:
            raise InputError(
                f"--batch {batch}: {batch} × {'×'.join(map(str, shape))} exceeds the limit of "
                f"{_LARGEST_BATCH:,} numbers; pass a smaller batch or a smaller input shape."
            )


def check_accepts(network: "nn.Module", shape: Sequence[int]) -> None:
    """Raise if the network fails on inputs of this shape, before anything is measured."""
    import torch

    network.eval()
    try:
        with torch.no_grad():
            network(torch.zeros(2, *shape))
    except InputError:
        raise
    except Exception as error:  # a user's network may raise anything
        reason = one_line(error)[:300]
        raise InputError(
            f"--input-shape {','.join(map(str, shape))}: the network fails on inputs of this "
            f"shape: {reason}"
        ) from error


def print_speeds(speeds: Sequence["Speed"]) -> None:
    """Print the times of PyTorch and of the sparse engine for each batch size."""
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
    print_text(
        f"medians, {threads} thread{'s' * (threads > 1)}; compiled in {seconds:.1f} s "
        "(the kernels are cached on disk, the measurements are not)"
    )


def _latency(speed: "Speed") -> dict[str, Any]:
    return {
        "milliseconds": round(speed.engine_ms, 4),
        "pytorch_milliseconds": round(speed.pytorch_ms, 4),
        "batch": speed.batch,
        "threads": speed.threads,
    }
