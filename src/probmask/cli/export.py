"""`probmask export`: convert a finished network to ONNX or to formats of PyTorch."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from probmask.cli.arguments import (
    add_artifact,
    add_model,
    artifact_path,
    model_to_import,
    parse_shape,
)
from probmask.cli.terminal import print_json, print_text


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    export = commands.add_parser(
        "export",
        help="convert a finished network to ONNX or to formats of PyTorch",
        description="Convert a finished network to ONNX (for any batch size, checked against "
        "PyTorch), to a dense state_dict in a safetensors file, or to a state_dict of PyTorch's "
        "sparse CSR tensors.",
    )
    add_artifact(export)
    export.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    export.add_argument(
        "--format",
        metavar="onnx|dense|torch-csr",
        help="default: by the suffix of OUT (.onnx, .safetensors, .pt)",
    )
    export.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_model(export)
    export.add_argument(
        "--input-shape",
        metavar="C,H,W",
        help="shape of one input, for ONNX (default: as in training)",
    )
    export.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Export the network and print how well the result agrees with it."""
    from probmask.artifact.export import export

    done = export(
        artifact_path(options),
        options.out,
        format=options.format,
        model=model_to_import(options),
        input_shape=parse_shape(options.input_shape),
        overwrite=options.force,
    )
    if options.json:
        print_json({**asdict(done), "path": str(done.path)})
        return
    print_text(f"{done.path}: {done.format}, {done.bytes:,} bytes")
    if done.agreement is not None:
        found = done.agreement
        print_text(
            f"ONNX Runtime against PyTorch on {found.inputs} random inputs: largest difference "
            f"{found.largest_difference:.2g}, same top-1 class for {found.same_top1}"
        )
    elif done.format == "onnx":
        print_text("not compared with PyTorch: onnxruntime is not installed")
