"""`probmask plan`: estimate file size and speed on this machine before training."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.cli.arguments import MODEL_NAME_HELP, check_sparsity_flag, parse_shape
from probmask.cli.bench import (
    add_conditions,
    check_accepts,
    check_sizes,
    print_speeds,
    set_conditions,
)
from probmask.cli.terminal import print_json, print_text
from probmask.errors import InputError

if TYPE_CHECKING:
    from torch import nn


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    plan = commands.add_parser(
        "plan",
        help="estimate file size and speed on this machine before training",
        description="Build the network, prune it at random, and measure its file size and its "
        "speed. A trained network keeps other weights, often more of them in the early layers; "
        "'probmask bench' measures it.",
    )
    plan.add_argument("--model", required=True, help=MODEL_NAME_HELP)
    plan.add_argument(
        "--sparsity", type=float, required=True, help="fraction of the weights pruned, in [0, 1)"
    )
    add_conditions(plan)
    plan.add_argument(
        "--input-shape", metavar="C,H,W", help="shape of one input (default: the model's)"
    )
    plan.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Prune at random, save, compile and time the network, and print the results."""
    from probmask.runtime.speed import mask_at_random_, measure_speed

    check_sparsity_flag(options.sparsity)
    shape = parse_shape(options.input_shape) or _default_shape(options.model)
    batches, threads = set_conditions(options)
    check_sizes(shape, batches)
    network = _build(options.model, shape)
    check_accepts(network, shape)
    kept, total = mask_at_random_(network, options.sparsity, shape)
    size, dense = _file_sizes(network)
    speeds = [measure_speed(network, shape, batch=b, threads=threads)[0] for b in batches]
    if options.json:
        sizes = {"kept": kept, "size": total, "file_bytes": size, "dense_bytes": dense}
        results = [speed.as_table() for speed in speeds]
        print_json(
            {"model": options.model, "sparsity": options.sparsity, **sizes, "results": results}
        )
        return
    print_text(
        f"{options.model} at {100 * options.sparsity:g} %: {kept:,} of {total:,} weights kept; "
        f"file size {size / 1e6:.2f} MB instead of {dense / 1e6:.2f} MB"
    )
    print_text()
    print_speeds(speeds)
    print_text("measured with random masks; 'probmask bench' measures a trained network")


def _default_shape(model: str) -> tuple[int, ...]:
    from probmask.messages import lookup
    from probmask.models import MODELS

    if ":" in model:
        raise InputError(
            f"--model {model}: the input shape is unknown; pass the shape of one input, as in "
            "--input-shape 3,32,32."
        )
    shape = lookup("model", "--model", model, MODELS).image_shape
    if shape is None:
        raise InputError(f"--model {model}: takes tokens; plan measures networks for images only.")
    return shape


def _build(model: str, shape: tuple[int, ...]) -> "nn.Module":
    import torch

    from probmask.models import build_model

    suggested = {"channels": shape[0], "image_size": list(shape[1:])}
    torch.manual_seed(0)
    return build_model(model, {}, suggested=suggested)


def _file_sizes(network: "nn.Module") -> tuple[int, int]:
    from probmask.artifact import read, save

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        save(network, path)
        info = read(path)
    return info.file_bytes, info.dense_bytes
