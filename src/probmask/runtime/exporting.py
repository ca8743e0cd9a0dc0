"""`torch.export` of a model, for any batch size where the model allows it."""

import warnings

import torch
from torch import Tensor, nn

from probmask.errors import InputError


def export(model: nn.Module, examples: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Export the model for any batch size, or for that of the examples if it allows no other."""
    wide = tuple(_of_two(example) for example in examples)
    dynamic = tuple({0: torch.export.Dim.AUTO} if x.dim() else {} for x in wide)
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


def _any_batch(program: torch.export.ExportedProgram) -> bool:
    """Whether the size of some first dimension was left open."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(v, Tensor) and v.dim() and not isinstance(v.shape[0], int) for v in values
    )


def _of_two(example: Tensor) -> Tensor:
    """A batch of at least two: one of one image would be taken for a constant size."""
    if not example.dim() or len(example) >= 2:
        return example
    return example.expand(2, *example.shape[1:]).contiguous()
