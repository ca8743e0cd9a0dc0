"""Export a model with `torch.export`, for any batch size if the model allows it."""

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probmask.errors import InputError
from probmask.messages import one_line
from probmask.runtime.lower.graph import size_of

_logger = logging.getLogger("probmask")
# A place in the model's code, as PyTorch's messages name it.
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+(?:\n[ \t]+([^\n]+))?')


@dataclass(frozen=True)
class Export:
    """An exported program, and what fixes its batch size: an operation, or nothing."""

    program: torch.export.ExportedProgram
    fixed_by: str = ""


def export(
    model: nn.Module, examples: tuple[Tensor, ...], *, caller: str = "runtime.compile"
) -> Export:
    """Export the model for any batch size, or for the examples' if the model fixes it."""
    examples = tuple(example.contiguous() for example in examples)
    # An input of size 1 next to larger ones is shared by the whole batch, so its size is fixed.
    batch = max((len(example) for example in examples if example.dim()), default=0)
    varies = [bool(example.dim()) and len(example) >= min(2, batch) for example in examples]
    wide = tuple(_at_least_two(x) if v else x for x, v in zip(examples, varies, strict=True))
    with warnings.catch_warnings(), torch.no_grad(), _without_reports():
        warnings.simplefilter("ignore")
        program = _for_any_batch(model, wide, varies)
        fixed_by = ""
        if program is None:
            program = _for_this_batch(model, examples, caller)
            fixed_by = _what_fixes_the_batch(model, wide, varies) if any(varies) else ""
        functional: torch.export.ExportedProgram = program.run_decompositions({})
    if fixed_by and caller != "export_c":  # a C program has one batch size anyway
        _logger.warning(
            "%s(%s): forward fixes the batch size at %d (%s); compile an engine for each "
            "batch size.",
            caller,
            type(model).__name__,
            batch,
            fixed_by,
        )
    return Export(functional, fixed_by)


@contextlib.contextmanager
def _without_reports() -> Iterator[None]:
    """Keep PyTorch from printing the graph and the guards of an attempt that fails."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def _for_any_batch(
    model: nn.Module, wide: tuple[Tensor, ...], varies: list[bool]
) -> torch.export.ExportedProgram | None:
    """Export with a batch size that may vary; None if the model fixes it.

    The second attempt reads the code of `forward`, because ``len(x)`` is a number when it runs.
    """
    dims = [{0: torch.export.Dim.AUTO} if v else {} for v in varies]
    for strict in (False, True):
        try:
            program = torch.export.export(
                model, wide, dynamic_shapes=_match_forward(model, dims), strict=strict
            )
        except Exception:  # PyTorch raises many kinds
            program = None
        if program is not None and _has_dynamic_batch(program):
            return program
        if not any(varies):
            return None
    return None


def _for_this_batch(
    model: nn.Module, examples: tuple[Tensor, ...], caller: str
) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, examples)
    except Exception as error:
        name = type(model).__name__
        place = _place(error)
        if "data-dependent" in str(error).lower():
            raise InputError(
                f"{caller}({name}): torch.export cannot export it: which operations forward "
                f"runs depends on the values of a tensor{f' ({place})' if place else ''}. Use "
                "torch.where or torch.cond."
            ) from None
        reason = one_line(error)[:300]
        raise InputError(f"{caller}({name}): torch.export cannot export it: {reason}") from error


def _what_fixes_the_batch(model: nn.Module, wide: tuple[Tensor, ...], varies: list[bool]) -> str:
    """Return the line of code that needs one batch size, as far as PyTorch says it."""
    dims = [{0: torch.export.Dim.DYNAMIC} if v else {} for v in varies]
    try:
        torch.export.export(model, wide, dynamic_shapes=_match_forward(model, dims), strict=True)
    except Exception as error:
        return _place(error) or one_line(error)[:120]
    return "an operation that torch.export does not name"


def _place(error: Exception) -> str:
    """Return the last place in code outside of PyTorch that a message names."""
    own = str(Path(torch.__file__).parent)
    places = [found for found in _PLACE.findall(str(error)) if not found[0].startswith(own)]
    if not places:
        return ""
    path, line, code = places[-1]
    return f"{Path(path).name}, line {line}{f': {code.strip()[:100]}' if code else ''}"


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
