"""A lowered network as the files of a C program."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod
from string import Template

from probmask.errors import InputError
from probmask.runtime.c.c_operation import Operation
from probmask.runtime.c.c_operations import CALLS
from probmask.runtime.c.c_tables import Tables, as_comment
from probmask.runtime.kernels.operation_table import Field, Kind
from probmask.runtime.lower.nodes import (
    AttendedKeys,
    Embed,
    Move,
    Network,
    Node,
    Rearrange,
    Recurrent,
)
from probmask.runtime.lower.views import View
from probmask.runtime.plan.partition import (
    LANES,
    Step,
    candidates,
    first_grouped,
    first_vector,
    steps_of,
)
from probmask.runtime.plan.program import Program, build_program
from probmask.version import __version__

# C types of the inputs, by dtype.
_KINDS = {"float32": "float", "int64": "int32_t", "int32": "int32_t", "bool": "int32_t"}
# Nested loops of a copy.
_LOOPS = 4
_COPIED = ("kernels.c", "kernels.h", "vectors.h", "Makefile")


@dataclass(frozen=True)
class Tensor:
    """An input or output of the program: its C name, its shape and what it is in the network."""

    name: str
    shape: tuple[int, ...]
    origin: str
    kind: str = "float"

    @property
    def size(self) -> int:
        """Number of elements."""
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
        self.nodes = {node.name: node for node in network.nodes}
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
        kinds = [_KINDS[_name_of(dtype)] for dtype in self.network.input_dtypes]
        return tuple(
            Tensor("in" if single else f"in_{name}", self._sizes(shape), name, kind)
            for name, shape, kind in zip(names, shapes, kinds, strict=True)
        )

    def _outputs(self) -> tuple[Tensor, ...]:
        names = self.network.outputs
        return tuple(
            Tensor("out" if len(names) == 1 else f"out_{i}", self._shape(name), name)
            for i, name in enumerate(names)
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an input, or of the output of a node, outside of the arenas."""
        if name in self.network.inputs:
            return self._sizes(self.network.input_shapes[self.network.inputs.index(name)])
        node = self.nodes[name]
        if isinstance(node, Embed):
            return (*self._shape(node.inputs[0]), node.table.shape[1])
        if isinstance(node, AttendedKeys):
            batch, keys = self._shape(node.inputs[0])
            return (batch, *node.sides(keys)[0].shape)
        view = _view(node)
        if view is not None:
            return tuple(view.sizes(self._shape(view.root)[0]))
        assert node.form is not None
        return (*self._sizes(node.form.leading), *node.trailing)

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
        inputs = [f"const {tensor.kind} *{tensor.name}" for tensor in self.inputs]
        return f"void run({', '.join([*inputs, *(f'float *{t.name}' for t in self.outputs)])})"

    def main_parts(self) -> dict[str, str]:
        """Return what `main.c` leaves open."""
        tensors = (*self.inputs, *self.outputs)
        return {
            "BUFFERS": "\n".join(f"static {t.kind} {t.name}[{t.macro}];" for t in tensors),
            "INPUTS": ", ".join(f"{{{t.name}, {t.macro}}}" for t in self.inputs),
            "OUTPUTS": ", ".join(f"{{{t.name}, {t.macro}}}" for t in self.outputs),
            "ARGUMENTS": ", ".join(t.name for t in tensors),
        }

    def implementation(self) -> str:
        """Return the tables and the function."""
        read = {name for node in self.network.nodes for name in node.inputs}
        body = [f"    (void){t.name}; /* not used */" for t in self.inputs if t.origin not in read]
        for i, step in enumerate(self.steps):
            body += self._step(step, i) if step.sparse else self._moves(step)
        return _IMPLEMENTATION.substitute(
            TITLE=self._title(),
            TABLES="\n".join(self.tables.lines),
            SIGNATURE=self._signature(),
            BODY="\n".join(body),
        )

    def _step(self, step: Step, number: int) -> list[str]:
        """Define the tables of a step on the kernels; return its loop over the images."""
        assert step.nodes[0].form is not None
        images = prod(self._sizes(step.nodes[0].form.leading))
        program = _program(step, images)
        arena = f"arena_{number}"
        self.tables.lines.append(f"\nstatic float {arena}[{program.arena_size}] PM_ALIGNED;")
        self._scratch(program, arena)
        single, grouped = self._calls(step, program, arena, number)
        return _loop(images, program.group, single, grouped)

    def _moves(self, step: Step) -> list[str]:
        """Define the tables of nodes around the kernels; return their calls."""
        return [f"    {self._move(node)};" for node in step.nodes]

    def _move(self, node: Node) -> str:
        source, target = self._pointer(node.inputs[0]), self._pointer(node.name)
        name, count = f"{target}_op", prod(self._shape(node.inputs[0]))
        self.tables.comment(node.label)
        if isinstance(node, AttendedKeys):
            self.tables.structure("pm_comparison", name, self._comparison(node, target))
            return f"pm_compare(&{name}, {source}, {target})"
        if isinstance(node, Embed):
            rows, width = node.table.shape
            table = self.tables.array("float", f"{target}_table", node.table.reshape(-1))
            members = {"table": table, "rows": rows, "width": width, "count": count}
            self.tables.structure("pm_embedding", name, members)
            return f"pm_embed(&{name}, {source}, {target})"
        view = _view(node)
        assert view is not None
        sizes, steps, start = view.strides(self._shape(view.root)[0])
        self.tables.structure("pm_rearrangement", name, _loops(sizes, steps))
        return f"pm_rearrange(&{name}, {source} + {start}, {target})"

    def _comparison(self, node: AttendedKeys, target: str) -> dict[str, object]:
        """Return the members of the structure of a mask."""
        images, keys = self._shape(node.inputs[0])
        sides = node.sides(keys)
        names = "where_equal", "elsewhere"
        tables = {
            name: self.tables.array("float", f"{target}_{name}", side.reshape(-1))
            for name, side in zip(names, sides, strict=True)
        }
        queries, width = sides[0].shape
        sizes = {"images": images, "queries": queries, "heads": width // keys, "keys": keys}
        return {**tables, "number": node.number, **sizes}

    def _pointer(self, name: str) -> str:
        """Return the C name of a tensor outside of the arenas; define its memory if it has none."""
        if name not in self.pointers:
            self.pointers[name] = f"between_{len(self.pointers)}"
            memory = f"{self.pointers[name]}[{prod(self._shape(name))}]"
            self.tables.lines.append(f"\nstatic float {memory} PM_ALIGNED;")
        return self.pointers[name]

    def _scratch(self, program: Program, arena: str) -> None:
        """Define the memory of the attentions of a step."""
        rows = program.table[program.table[:, Field.KIND] == Kind.ATTEND]
        if len(rows):
            keys = int(rows[:, Field.KEYS].max())
            memory = f"{arena}_scratch[PM_SCRATCH({keys})]"
            self.tables.lines.append(f"static float {memory} PM_ALIGNED;")

    def _calls(
        self, step: Step, program: Program, arena: str, number: int
    ) -> tuple[list[str], list[str]]:
        """Define the operations; return the calls for one image and those for a group."""
        externals = tuple(self._pointer(tensor.name) for tensor in (*step.inputs, *step.outputs))
        labels = {node.name: node.label for node in step.nodes}
        calls = []
        for i, owner in enumerate(program.owners):
            self.tables.comment(labels.get(owner, owner))
            suffix = f"_{number}_{i}"
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
        return build_program(step, threads=1, reordered=False)
    return build_program(step, threads=1, lanes=lanes, ungrouped=ungrouped, reordered=False)


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
        if _name_of(dtype) not in _KINDS:
            raise InputError(
                f"export_c: the network takes {name} of {_name_of(dtype)}, but a C program takes "
                "float32 and integers. Convert the network with .float()."
            )
    missing = [node for node in network.nodes if not _has_c(node, network)]
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


def _has_c(node: Node, network: Network) -> bool:
    """Return whether C can compute a node."""
    if node.form is not None:
        return True
    kinds = dict(zip(network.inputs, map(_name_of, network.input_dtypes), strict=True))
    if isinstance(node, Embed | AttendedKeys):
        return _KINDS.get(kinds.get(node.inputs[0], "")) == "int32_t"
    view = _view(node)
    return view is not None and len(_joined(*view.strides(2)[:2])) <= _LOOPS


def _view(node: Node) -> View | None:
    """Return which elements of a tensor a node has, if it only moves them."""
    return node.view if isinstance(node, Move) else None


def _joined(sizes: Sequence[int], steps: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return loops of size, step in the source and step in the target, as few as possible."""
    loops: list[tuple[int, int, int]] = []
    inside = 1
    for size, step in reversed([*zip(sizes, steps, strict=True)]):
        if loops and step == loops[-1][0] * loops[-1][1]:
            loops[-1] = (loops[-1][0] * size, *loops[-1][1:])
        elif size > 1:
            loops.append((size, step, inside))
        inside *= size
    return loops[::-1]


def _loops(sizes: Sequence[int], steps: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return the loops of a copy to a contiguous tensor."""
    loops = _joined(sizes, steps)
    loops = [*[(1, 0, 0)] * (_LOOPS - len(loops)), *loops]
    loops[2:] = loops[:1:-1]  # the third loop is the innermost
    parts = zip(*loops, strict=True)
    return dict(zip(("sizes", "source_steps", "target_steps"), map(tuple, parts), strict=True))


def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


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

#include <stdint.h>

/* Numbers of elements, and shapes, in C order. */
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
