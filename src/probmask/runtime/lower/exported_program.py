"""`torch.export` of a model, for any batch size where the model allows it."""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind

from probmask.errors import InputError


def export(model: nn.Module, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Export the model for any batch size, or for that of the examples if it allows no other."""
    examples = tuple(example.contiguous() for example in examples)
    # Beside a batch, what is there once is the same for all of it.
    batch = max((len(example) for example in examples if example.dim()), default=0)
    varies = [bool(example.dim()) and len(example) >= min(2, batch) for example in examples]
    wide = tuple(_of_two(x) if v else x for x, v in zip(examples, varies, strict=True))
    dynamic = _as_forward_takes_them(
        model, [{0: torch.export.Dim.AUTO} if v else {} for v in varies]
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, wide, dynamic_shapes=dynamic)
            if not _any_batch(program):
                program = torch.export.export(model, examples)
        except Exception:
            try:
                program = torch.export.export(model, examples)
            except Exception as error:
                reason = " ".join(str(error).split())[:300]
                raise InputError(
                    f"runtime.compile({type(model).__name__}): torch.export cannot export it: "
                    f"{reason}"
                ) from error
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    return functional


def _as_forward_takes_them(model: nn.Module, items: list[Any]) -> tuple[Any, ...]:
    """What belongs to the inputs, with those that ``*args`` collects in a tuple of their own."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return tuple(items)
    own = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*items[:own], tuple(items[own:]))


def _any_batch(program: torch.export.ExportedProgram) -> bool:
    """Whether the size of some first dimension was left open."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(v, Tensor) and v.dim() and isinstance(size_of(v.shape[0]), str) for v in values
    )


def size_of(size: Any) -> int | str:
    """A size as a number, or what it is called where it may vary.

    A size that was to vary, but has one value only, is still a symbol of PyTorch's.
    """
    name = str(size)
    return int(name) if name.isdecimal() else name


def _of_two(example: Tensor) -> Tensor:
    """A batch of at least two: one of one image would be taken for a constant size."""
    if not example.dim() or len(example) >= 2:
        return example
    return example.expand(2, *example.shape[1:]).contiguous()


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
