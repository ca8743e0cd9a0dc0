"""`probmask export`: convert a finished network for other programs."""

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
        help="convert a finished network to ONNX, C, formats of PyTorch, or a file with its graph",
        description="Convert a finished network to ONNX (for any batch size, checked against "
        "PyTorch), to a C99 program without dependencies, to a dense state_dict in a safetensors "
        "file, to a state_dict of PyTorch's sparse CSR tensors, or to an artifact with its graph, "
        "which probmask.runtime.load runs without PyTorch.",
    )
    add_artifact(export)
    export.add_argument(
        "out", type=Path, metavar="OUT", help="the file to write; for C, the directory"
    )
    export.add_argument(
        "--format",
        metavar="onnx|c|dense|torch-csr|graph",
        help="default: by the suffix of OUT (.onnx, .safetensors: dense, .pt: torch-csr)",
    )
    export.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_model(export)
    export.add_argument(
        "--input-shape",
        metavar="C,H,W",
        help="shape of one input, for ONNX, C and graph; for C and graph also the number of "
        "tokens (default: as in training)",
    )
    export.add_argument(
        "--batch", type=int, metavar="N", help="number of inputs per call, for C (default: 1)"
    )
    export.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Export the network and print what was written."""
    from probmask.artifact.export import FORMATS, export
    from probmask.checks import check_choice
    from probmask.errors import InputError

    if options.format is not None:
        check_choice("export", "format", options.format, (*FORMATS, "c"))
    if options.format == "c":
        _export_c(options)
        return
    if options.batch is not None:
        raise InputError(
            f"--batch {options.batch}: only --format c has a fixed batch size; leave it out."
        )
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


def _export_c(options: argparse.Namespace) -> None:
    """Write a C program and print how to build it."""
    from probmask.artifact import load, read
    from probmask.artifact.export import example_of, input_shape_of
    from probmask.checks import check_count
    from probmask.cli.bench import check_sizes
    from probmask.runtime.c.c_export import export_c

    batch = 1 if options.batch is None else options.batch
    check_count("export", "batch", batch, least=1, meaning="a number of inputs per call")
    artifact, model = artifact_path(options), model_to_import(options)
    info = read(artifact)
    shape = input_shape_of(artifact, info, model, parse_shape(options.input_shape))
    check_sizes(shape, [batch])
    network = load(artifact, model=model)
    example = example_of(model or info.metadata.get("model"), network, shape, batch)
    done = export_c(network, options.out, example, overwrite=options.force)
    if options.json:
        print_json({**asdict(done), "path": str(done.path), "format": "c"})
        return
    print_text(f"{done.path}: C program, {done.bytes:,} bytes of source")
    print_text(f"build it in that directory: {done.command}")
