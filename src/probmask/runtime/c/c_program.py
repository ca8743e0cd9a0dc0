"""A lowered network as the files of a C program."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod
from string import Template

from probmask.errors import InputError
from probmask.runtime.c.c_operations import CALLS, Operation
from probmask.runtime.c.c_tables import Tables, as_comment
from probmask.runtime.kernels.operation_table import Field, Kind
from probmask.runtime.lower.nodes import Network, Node, Rearrange, Recurrent
from probmask.runtime.plan.partition import (
    LANES,
    ExternalTensor,
    Step,
    candidates,
    first_grouped,
    first_vector,
    steps_of,
)
from probmask.runtime.plan.program import Program, build_program
from probmask.version import __version__

_COPIED = ("kernels.c", "kernels.h", "vectors.h", "Makefile")


@dataclass(frozen=True)
class Tensor:
    """An input or output of the program: its C name, its shape and what it is in the network."""

    name: str
    shape: tuple[int, ...]
    origin: str

    @property
    def size(self) -> int:
        """Number of floats."""
        return prod(self.shape)

    @property
    def macro(self) -> str:
        """Name of the macro for its size."""
        return f"PM_{self.name.upper()}_SIZE"

    @property
    def definition(self) -> str:
        """The macro, with the shape as a comment."""
        shape = " x ".join(map(str, self.shape))
        return f"#define {self.macro} {self.size} /* {shape}: {as_comment(self.origin)} */"


def program_files(network: Network, shapes: Sequence[Sequence[int]], title: str) -> dict[str, str]:
    """Return the files of the C program by name, for inputs of these shapes.

    Raise `InputError` if the network has an operation without a C kernel.
    """
    source = _Source(network, shapes, title)
    copied = resources.files("probmask.runtime.c") / "sources"
    files = {name: (copied / name).read_text(encoding="utf-8") for name in _COPIED}
    main, in_node = (
        Template((copied / name).read_text(encoding="utf-8")) for name in ("main.c", "run.mjs")
    )
    return {
        **files,
        "network.h": source.header(),
        "network.c": source.implementation(),
        "main.c": main.substitute(source.main_parts()),
        "run.mjs": in_node.substitute(
            INPUTS=", ".join(str(tensor.size) for tensor in source.inputs),
            OUTPUTS=", ".join(str(tensor.size) for tensor in source.outputs),
        ),
    }


class _Source:
    def __init__(self, network: Network, shapes: Sequence[Sequence[int]], title: str) -> None:
        _check_kernels(network)
        self.network, self.title = network, title
        # The sizes that may vary, by name.
        self.varying = {
            name: size
            for names, sizes in zip(network.input_shapes, shapes, strict=True)
            for name, size in zip(names, sizes, strict=True)
        }
        self.steps = steps_of(network, candidates(network))
        self.inputs = self._inputs()
        self.outputs = self._outputs()
        self.tables = Tables()
        # C names of the tensors outside of the arenas, by their name in the network.
        names = [*zip(network.inputs, self.inputs, strict=True)]
        names += zip(network.outputs, self.outputs, strict=True)
        self.pointers = {name: tensor.name for name, tensor in names}

    def _inputs(self) -> tuple[Tensor, ...]:
        names, shapes = self.network.inputs, self.network.input_shapes
        single = len(names) == 1
        return tuple(
            Tensor("in" if single else f"in_{name}", self._sizes(shape), name)
            for name, shape in zip(names, shapes, strict=True)
        )

    def _outputs(self) -> tuple[Tensor, ...]:
        names, found = self.network.outputs, self._externals()
        return tuple(
            Tensor(
                "out" if len(names) == 1 else f"out_{i}",
                (*self._sizes(found[name].form.leading), *found[name].trailing),
                name,
            )
            for i, name in enumerate(names)
        )

    def _externals(self) -> dict[str, ExternalTensor]:
        return {tensor.name: tensor for step in self.steps for tensor in step.outputs}

    def _sizes(self, sizes: Sequence[int | str]) -> tuple[int, ...]:
        """Return sizes as numbers."""
        return tuple(int(s) if str(s).isdecimal() else self.varying[s] for s in sizes)

    def header(self) -> str:
        """Return the header: the sizes of the tensors, and the function."""
        sizes = "\n".join(tensor.definition for tensor in (*self.inputs, *self.outputs))
        return _HEADER.substitute(TITLE=self._title(), SIZES=sizes, SIGNATURE=self._signature())

    def _title(self) -> str:
        return as_comment(f"{self.title}, by probmask {__version__}.")

    def _signature(self) -> str:
        inputs = [f"const float *{tensor.name}" for tensor in self.inputs]
        return f"void run({', '.join([*inputs, *(f'float *{t.name}' for t in self.outputs)])})"

    def main_parts(self) -> dict[str, str]:
        """Return what `main.c` leaves open."""
        tensors = (*self.inputs, *self.outputs)
        return {
            "BUFFERS": "\n".join(f"static float {t.name}[{t.macro}];" for t in tensors),
            "INPUTS": ", ".join(f"{{{t.name}, {t.macro}}}" for t in self.inputs),
            "OUTPUTS": ", ".join(f"{{{t.name}, {t.macro}}}" for t in self.outputs),
            "ARGUMENTS": ", ".join(t.name for t in tensors),
        }

    def implementation(self) -> str:
        """Return the tables and the function."""
        read = {tensor.name for step in self.steps for tensor in step.inputs}
        body = [f"    (void){t.name}; /* not used */" for t in self.inputs if t.origin not in read]
        for i, step in enumerate(self.steps):
            body += self._step(step, i)
        return _IMPLEMENTATION.substitute(
            TITLE=self._title(),
            TABLES="\n".join(self.tables.lines),
            SIGNATURE=self._signature(),
            BODY="\n".join(body),
        )

    def _step(self, step: Step, number: int) -> list[str]:
        """Define the tables of a step; return its loop over the images."""
        for tensor in step.outputs:
            if tensor.name not in self.pointers:
                self._buffer(tensor, f"between_{number}_{len(self.pointers)}")
        assert step.nodes[0].form is not None
        images = prod(self._sizes(step.nodes[0].form.leading))
        program = _program(step, images)
        arena = "arena" if number == 0 else f"arena_{number}"
        self.tables.lines.append(f"\nstatic float {arena}[{program.arena_size}] PM_ALIGNED;")
        self._scratch(program)
        single, grouped = self._calls(step, program, arena, number)
        return _loop(images, program.group, single, grouped)

    def _buffer(self, tensor: ExternalTensor, name: str) -> None:
        """Define the memory of a tensor between two steps."""
        size = prod(self._sizes(tensor.form.leading)) * tensor.form.size
        self.tables.lines.append(f"\nstatic float {name}[{size}];")
        self.pointers[tensor.name] = name

    def _scratch(self, program: Program) -> None:
        """Define the memory of attentions; all steps share it."""
        rows = program.table[program.table[:, Field.KIND] == Kind.ATTEND]
        if len(rows):
            keys = int(rows[:, Field.KEYS].max())
            self.tables.lines.append(f"static float scratch[PM_SCRATCH({keys})] PM_ALIGNED;")

    def _calls(
        self, step: Step, program: Program, arena: str, number: int
    ) -> tuple[list[str], list[str]]:
        """Define the operations; return the calls for one image and those for a group."""
        externals = tuple(self.pointers[tensor.name] for tensor in (*step.inputs, *step.outputs))
        labels = {node.name: node.label for node in step.nodes}
        calls = []
        for i, owner in enumerate(program.owners):
            self.tables.comment(labels.get(owner, owner))
            suffix = f"_{number}_{i}" if len(self.steps) > 1 else f"_{i}"
            op = Operation(program, i, self.tables, arena, suffix, externals)
            if op.kind not in CALLS:
                raise InputError(
                    f"export_c: {labels.get(owner, owner)} is an operation {op.kind.name}, which "
                    "has no C kernel. Export the network to ONNX, or run it by "
                    "probmask.runtime.compile."
                )
            calls.append(f"{CALLS[op.kind](op)};")
        return calls[: program.ungrouped], calls[program.ungrouped :]


def _program(step: Step, images: int) -> Program:
    """Build the program of a step; vectors run for groups of images that divide the batch.

    Copies in C are for single images.
    """
    lanes = max(size for size in range(1, LANES + 1) if images % size == 0)
    single = [i + 1 for i, n in enumerate(step.nodes) if isinstance(n, Rearrange | Recurrent)]
    ungrouped = max(first_vector(step.nodes), first_grouped(step.nodes), *single)
    if lanes == 1 or ungrouped >= len(step.nodes):
        return build_program(step, threads=1)
    return build_program(step, threads=1, lanes=lanes, ungrouped=ungrouped)


def _loop(images: int, group: int, single: Sequence[str], grouped: Sequence[str]) -> list[str]:
    """Return the loop over the images as lines of C."""
    if group == 1:
        calls = [f"        {call}" for call in single]
        return [f"    for (int image = 0; image < {images}; ++image) {{", *calls, "    }"]
    return [
        f"    for (int first = 0; first < {images}; first += {group}) {{",
        f"        for (int lane = 0; lane < {group}; ++lane) {{",
        "            const int image = first + lane;",
        *(f"            {call}" for call in single),
        "        }",
        "        const int image = first;",
        *(f"        {call}" for call in grouped),
        "    }",
    ]


def _check_kernels(network: Network) -> None:
    """Raise if something has no kernel, or if an output does not depend on the inputs."""
    for name, dtype in zip(network.inputs, network.input_dtypes, strict=True):
        if str(dtype).removeprefix("torch.") != "float32":
            kind = str(dtype).removeprefix("torch.")
            raise InputError(
                f"export_c: the network takes {name} of {kind}, but a C program takes float32. "
                "Export the part of the network after the embeddings, or convert the network with "
                ".float()."
            )
    missing = [node for node in network.nodes if node.form is None]
    if missing:
        raise InputError(
            f"export_c: {_named(missing)} no kernel, so the network cannot be written as C. "
            "Export a network without it, or export to ONNX."
        )
    computed = {node.name for node in network.nodes}
    if network.returns_constants or not computed.issuperset(network.outputs):
        raise InputError(
            "export_c: an output of the network is a constant or one of its inputs. Return only "
            "what the network computes."
        )
    if network.changed_inputs:
        name = next(iter(network.changed_inputs))
        raise InputError(
            f"export_c: forward changes its input {name} in place. Return the new value instead."
        )


def _named(nodes: Sequence[Node]) -> str:
    """Return the names of up to three nodes and the verb, as in "a and b have"."""
    labels = list(dict.fromkeys(node.label for node in nodes))
    if len(labels) == 1:
        return f"{labels[0]} has"
    shown = [*labels[:3], f"{len(labels) - 3} more operations"] if len(labels) > 4 else labels
    return f"{', '.join(shown[:-1])} and {shown[-1]} have"


_HEADER = Template("""\
/* $TITLE
 *
 * `run` is not reentrant: its intermediate results are in static memory. It allocates nothing.
 */
#ifndef PM_NETWORK_H
#define PM_NETWORK_H

/* Numbers of floats, and shapes, in C order. */
$SIZES

#ifdef __cplusplus
extern "C"
#endif
$SIGNATURE;

#endif
""")
_IMPLEMENTATION = Template("""\
/* $TITLE */
#include "network.h"

#include "kernels.h"

#if defined(__GNUC__)
#define PM_ALIGNED __attribute__((aligned(64)))
#else
#define PM_ALIGNED
#endif
$TABLES

$SIGNATURE {
$BODY
}
""")
