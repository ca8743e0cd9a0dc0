"""`probmask bench`: how fast a finished network runs on this machine."""

import argparse
from typing import Any

from probmask.commands.artifact_argument import add_artifact, artifact_of
from probmask.commands.export import parse_shape
from probmask.commands.output import print_json
from probmask.commands.speed_table import add_conditions, conditions, print_speeds


def add(commands: Any) -> None:
    """Add the command and its flags."""
    bench = commands.add_parser("bench", help="time a finished network on this machine")
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
    from probmask.runtime.timing import measure_speed

    artifact = artifact_of(options)
    shape = input_shape_of(
        artifact, read(artifact), options.model, parse_shape(options.input_shape)
    )
    network = load(artifact, model=options.model)
    batches, threads = conditions(options)
    measured = [measure_speed(network, shape, batch=b, threads=threads) for b in batches]
    if options.json:
        results = [{**speed.as_table(), "nodes": engine.describe()} for speed, engine in measured]
        print_json({"artifact": str(artifact), "input_shape": list(shape), "results": results})
        return
    print_speeds([speed for speed, _ in measured])
    if options.layers:
        for speed, engine in measured:
            print(f"\nbatch {speed.batch}")
            engine.explain()
