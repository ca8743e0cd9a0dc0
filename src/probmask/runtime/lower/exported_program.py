"""`torch.export` of a model, and the inputs, constants and outputs of the program."""

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind

from probmask.errors import InputError

_CONSTANT = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def export(model: nn.Module, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Export the model for any batch size, or for the examples' if the model fixes it."""
    examples = tuple(example.contiguous() for example in examples)
    # An input of size 1 next to larger ones is shared by the whole batch, so its size is fixed.
    batch = max((len(example) for example in examples if example.dim()), default=0)
    varies = [bool(example.dim()) and len(example) >= min(2, batch) for example in examples]
    wide = tuple(_at_least_two(x) if v else x for x, v in zip(examples, varies, strict=True))
    dynamic = _match_forward(model, [{0: torch.export.Dim.AUTO} if v else {} for v in varies])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, wide, dynamic_shapes=dynamic)
            if not _has_dynamic_batch(program):
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


def size_of(size: Any) -> int | str:
    """Return a size as an integer, or its name if it may vary.

    PyTorch also uses a symbol for a size that turned out to have a single value.
    """
    name = str(size)
    return int(name) if name.isdecimal() else name


class Signature:
    """The inputs, constants and outputs of a program, by the names of its graph's nodes."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self.inputs: tuple[str, ...] = ()
        self.constants: dict[str, Tensor] = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                self.inputs = (*self.inputs, spec.arg.name)
            elif spec.kind in _CONSTANT:
                self.constants[spec.arg.name] = _stored_tensor(program, spec.target)
            else:
                raise InputError(
                    f"runtime.compile: the model uses {spec.target}, a {spec.kind.name.lower()}; "
                    "only tensors are supported."
                )
        self.out_spec = program.call_spec.out_spec
        # Nodes of the graph, or values that are not tensors.
        self.outputs: list[Any] = []
        # Inputs that `forward` changes in place, and the nodes that compute their new values.
        self.changed_inputs: dict[str, Any] = {}
        returned = program.graph.output_node().args[0]
        assert isinstance(returned, tuple | list)
        for spec, node in zip(program.graph_signature.output_specs, returned, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                self.outputs.append(node)
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                assert spec.target is not None
                self.changed_inputs[spec.target] = node
            else:
                raise InputError(
                    f"runtime.compile: the model's forward changes {spec.target!r}, but an engine "
                    "keeps nothing between calls. Run the model in PyTorch, or compile the part "
                    "that changes nothing."
                )


def _stored_tensor(program: torch.export.ExportedProgram, name: str | None) -> Tensor:
    assert name is not None
    # Non-persistent buffers are among the constants.
    value = program.state_dict.get(name, program.constants.get(name))
    assert isinstance(value, Tensor)
    return value.detach()


def _match_forward(model: nn.Module, items: list[Any]) -> tuple[Any, ...]:
    """Group the items of inputs that ``*args`` of `forward` collects into a tuple."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return tuple(items)
    named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*items[:named], tuple(items[named:]))


def _has_dynamic_batch(program: torch.export.ExportedProgram) -> bool:
    """Return whether the first dimension of some input may vary."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(v, Tensor) and v.dim() and isinstance(size_of(v.shape[0]), str) for v in values
    )


def _at_least_two(example: Tensor) -> Tensor:
    """Repeat a batch of one: `torch.export` would treat its size as a constant."""
    if not example.dim() or len(example) >= 2:
        return example
    return example.expand(2, *example.shape[1:]).contiguous()
