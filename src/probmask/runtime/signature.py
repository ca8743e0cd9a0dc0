"""What goes into an exported program and what comes out, and which of it never varies."""

from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind, OutputKind

from probmask.errors import InputError

_CONSTANT = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class Signature:
    """The inputs, constants and outputs of a program, by the names of its graph's nodes."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.inputs: tuple[str, ...] = ()
        self.constants: dict[str, Tensor] = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                self.inputs = (*self.inputs, spec.arg.name)
            elif spec.kind in _CONSTANT:
                self.constants[spec.arg.name] = _held(program, spec.target)
            else:
                raise InputError(
                    f"runtime.compile: the model uses {spec.target}, a {spec.kind.name.lower()}; "
                    "it can be made of tensors only."
                )
        self.out_spec = program.call_spec.out_spec
        # Nodes of the graph, or what is no tensor.
        self.outputs: list[Any] = []
        # Inputs that forward changes in place, and the nodes that compute what they become.
        self.changed_inputs: dict[str, Any] = {}
        given = program.graph.output_node().args[0]
        assert isinstance(given, tuple | list)
        for spec, node in zip(program.graph_signature.output_specs, given, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                self.outputs.append(node)
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                assert spec.target is not None
                self.changed_inputs[spec.target] = node
            else:
                raise InputError(
                    f"runtime.compile: the model's forward changes {spec.target!r}, so that each "
                    "call would depend on those before; an engine keeps nothing between calls. "
                    "Run it in PyTorch, or compile the part that changes nothing."
                )


def _held(program: torch.export.ExportedProgram, name: str | None) -> Tensor:
    assert name is not None
    # A buffer that is not saved with the others is among the constants.
    value = program.state_dict.get(name, program.constants.get(name))
    assert isinstance(value, Tensor)
    return value.detach()
