"""`probmask bench`: how fast a finished network runs on this machine."""

import argparse
from pathlib import Path
from typing import Any

from probmask.commands.artifact_argument import add_artifact, artifact_of
from probmask.commands.export import parse_shape
from probmask.commands.latency_record import record_latency
from probmask.commands.output import print_json
from probmask.commands.speed_table import (
    add_conditions,
    check_sizes,
    check_takes,
    conditions,
    print_speeds,
)


def add(commands: Any) -> None:
    """Add the command and its flags."""
    bench = commands.add_parser(
        "bench",
        help="time a finished network on this machine",
        description="Time a finished network on this machine, against PyTorch. For the directory "
        "of a run the result also goes into its record, where 'compare' and 'report' find it.",
    )
    add_artifact(bench)
    add_conditions(bench)
    bench.add_argument(
        "--model", help="package.module:function, if the network is your own and you trust it"
    )
    bench.add_argument(
        "--input-shape", metavar="C,H,W", help="of one input (default: what it was trained on)"
    )
    bench.add_argument("--layers", action="store_true", help="also print each layer")
    bench.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Compile the network per batch size and time it against PyTorch."""
    from probmask.artifact import load, read
    from probmask.artifact.export import input_shape_of
    from probmask.runtime.speed import measure_speed

    artifact = artifact_of(options)
    shape = input_shape_of(
        artifact, read(artifact), options.model, parse_shape(options.input_shape)
    )
    batches, threads = conditions(options)
    check_sizes(shape, batches)
    network = load(artifact, model=options.model)
    check_takes(network, shape)
    measured = [measure_speed(network, shape, batch=b, threads=threads) for b in batches]
    speeds = [speed for speed, _ in measured]
    given: Path = options.artifact
    written = record_latency(given, speeds, shape) if given.is_dir() else None
    if options.json:
        results = [{**speed.as_table(), "nodes": engine.describe()} for speed, engine in measured]
        result = {"artifact": str(artifact), "input_shape": list(shape), "results": results}
        print_json({**result, "record": None if written is None else str(written)})
        return
    print_speeds(speeds)
    if written is not None:
        print(f"written into {written}, as what 'compare' and 'report' show (batch {batches[0]})")
    if options.layers:
        for speed, engine in measured:
            print(f"\nbatch {speed.batch}")
            engine.explain()
