"""`probmask.runtime.export_c`: write a network as a C99 program."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.runtime.c.c_program import program_files
from probmask.runtime.compilation import frozen_copy
from probmask.runtime.lower.export import export
from probmask.runtime.lower.lowering import lower
from probmask.runtime.lower.moves import without_pytorch
from probmask.runtime.run.inputs import example_tensors

_COMMAND = "cc -std=c99 -O3 -march=native -ffp-contract=fast -o network main.c network.c kernels.c"


@dataclass(frozen=True)
class ExportedProgram:
    """A C program that `export_c` wrote.

    Attributes:
        path: The directory.
        bytes: Size of all files together.
        command: A command that builds the program, in that directory.
    """

    path: Path
    bytes: int
    command: str


def export_c(
    model: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    example: Any,
    *,
    overwrite: bool = False,
) -> ExportedProgram:
    """Write a network as a C99 program that needs no library and allocates no memory.

    The program has one function, ``void run(const float *in, float *out)``, with one pointer for
    each input and each output, and a ``main`` that reads raw floats from stdin. Zero weights are
    not part of it. The batch size is that of the example.

    Args:
        model: A module, exported in evaluation mode, or the path of an artifact.
        out: The directory to write. It must not exist, or be empty.
        example: An input, or a tuple of inputs, as tensors or arrays of float32 or integers.
            Integers, such as tokens, are ``int32_t`` in C.
        overwrite: Write into a directory that is not empty. Files of the same names are replaced.

    Returns:
        The directory, its size, and the command that builds the program.

    Raises:
        InputError: If the network has an operation without a C kernel, if it cannot be exported by
            `torch.export`, if the directory is not empty, or if an argument is invalid.

    Example:
        >>> import tempfile, torch, probmask
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     exported = probmask.runtime.export_c(model, directory + "/net", torch.zeros(1, 4))
        ...     sorted(file.name for file in exported.path.glob("*.c"))
        ['kernels.c', 'main.c', 'network.c']
    """
    directory = Path(out)
    _check_directory(directory, overwrite=overwrite)
    examples = example_tensors(example, caller="export_c")
    frozen = frozen_copy(model, caller="export_c")
    network = without_pytorch(lower(export(frozen, examples, caller="export_c")))
    title = f"{type(frozen).__name__} for inputs of " + " and ".join(
        "x".join(map(str, tensor.shape)) for tensor in examples
    )
    files = program_files(network, [tensor.shape for tensor in examples], title)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(directory / name, text.encode(), overwrite=overwrite)
    return ExportedProgram(directory, sum(len(text.encode()) for text in files.values()), _COMMAND)


def _check_directory(directory: Path, *, overwrite: bool) -> None:
    """Raise if the files cannot be written there, before the network is exported."""
    if directory.exists() and not directory.is_dir():
        raise InputError(
            f"{directory}: is a file, but a C program is written to a directory; pass another path."
        )
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise InputError(
            f"{directory}: the directory is not empty; pass another one, or --force "
            "(overwrite=True) to replace files of the same names."
        )
