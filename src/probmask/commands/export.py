"""`probmask export`: hand a finished network to others' tools."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from probmask.commands.artifact_argument import add_artifact, artifact_of
from probmask.commands.output import print_json
from probmask.errors import InputError


def add(commands: Any) -> None:
    """Add the command and its flags."""
    export = commands.add_parser(
        "export",
        help="write a finished network in a format of others",
        description="Write a finished network as ONNX (for any batch size, checked against "
        "PyTorch), as a dense state_dict that any safetensors reader opens, or with weights as "
        "PyTorch's sparse CSR tensors.",
    )
    add_artifact(export)
    export.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    export.add_argument(
        "--format",
        metavar="onnx|dense|torch-csr",
        help="default by the suffix of OUT: .onnx, .safetensors, .pt",
    )
    export.add_argument("--force", action="store_true", help="replace OUT if it exists")
    export.add_argument(
        "--model", help="package.module:function, if the network is your own and you trust it"
    )
    export.add_argument(
        "--input-shape",
        metavar="C,H,W",
        help="of one input, for ONNX (default: what the network was trained on)",
    )
    export.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Export the network, and say how well the result agrees with it."""
    from probmask.artifact.export import export

    done = export(
        artifact_of(options),
        options.out,
        format=options.format,
        model=options.model,
        input_shape=parse_shape(options.input_shape),
        overwrite=options.force,
    )
    if options.json:
        print_json({**asdict(done), "path": str(done.path)})
        return
    print(f"{done.path}: {done.format}, {done.bytes:,} bytes")
    if done.agreement is not None:
        found = done.agreement
        print(
            f"ONNX Runtime against PyTorch on {found.inputs} random inputs: largest difference "
            f"{found.largest_difference:.2g}, same top-1 on {found.same_top1}"
        )
    elif done.format == "onnx":
        print("not compared with PyTorch: onnxruntime is not installed")


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """The sizes of one input, from a flag."""
    if text is None:
        return None
    try:
        return tuple(int(size) for size in text.replace("x", ",").split(","))
    except ValueError as error:
        raise InputError(
            f"--input-shape {text}: expected the sizes of one input, as in 3,32,32."
        ) from error
