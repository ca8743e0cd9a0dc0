"""Export a model with `torch.export`, for any batch size if the model allows it."""

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from probmask.errors import InputError
from probmask.messages import one_line
from probmask.runtime.lower.einsum import decompositions
from probmask.runtime.lower.export_errors import place_of, reason_in_eager_mode, reason_of
from probmask.runtime.lower.graph import arguments_of, size_of
from probmask.runtime.lower.recurrent_nodes import CELLS

_logger = logging.getLogger("probmask")
# A place in the model's code, as PyTorch's guards and messages name it.
_USER_LINE = re.compile(r"(.+?)\s+# (.+):(\d+) in ")
# Batch sizes at which the conditions of an export are checked.
_SIZES = (*range(2, 130), 255, 256, 1000, 4096)
# Operations of attention, and how many of their arguments are sequences.
_SEQUENCES: dict[Any, int] = {
    torch.ops.aten.scaled_dot_product_attention.default: 3,
    torch.ops.aten.bmm.default: 2,
}


@dataclass(frozen=True)
class Export:
    """An exported program, and what fixes its batch size: an operation, or nothing."""

    program: torch.export.ExportedProgram
    fixed_by: str = ""


# For each input, the dimension that is the batch; None if the input has none.
_Dims = list[int | None]
# Takes the model, inputs with a batch of two or more, and its dimensions.
Explain = Callable[[Any, tuple[Tensor, ...], _Dims], str]


def export(
    model: nn.Module,
    examples: tuple[Tensor, ...],
    *,
    batch_dims: list[int | None] | None = None,
    explain: Explain | None = None,
    caller: str = "runtime.compile",
) -> Export:
    """Export the model for any batch size, or for the examples' if the model fixes it.

    ``batch_dims`` are the dimensions of the inputs that are the batch, if they are known.
    ``explain`` names what fixes the batch size in a model without code of its own.
    """
    examples = tuple(example.contiguous() for example in examples)
    possible = _possible_batches(model, examples, batch_dims)
    with warnings.catch_warnings(), torch.no_grad(), _without_reports():
        warnings.simplefilter("ignore")
        attempts = (
            program
            for dims in possible
            if (program := _for_any_batch(model, _at_least_two(examples, dims), dims)) is not None
            and (dims is possible[-1] or _varies_in_layers(program))
            and _holds_for_one(program, model, examples, dims)
        )
        program, fixed_by = next(attempts, None), ""
        if program is None:
            program = _for_this_batch(model, examples, caller)
            dims = possible[-1]
            wide = _at_least_two(examples, dims)
            varies = any(dim is not None for dim in dims)
            fixed_by = (explain or _what_fixes_the_batch)(model, wide, dims) if varies else ""
        _check_that_it_runs(model, examples, caller)
    if fixed_by and caller != "export_c":  # a C program has one batch size anyway
        _logger.warning(
            "%s(%s): forward fixes the batch size at %d (%s); compile an engine for each "
            "batch size.",
            caller,
            type(model).__name__,
            max(_sizes(examples, possible[-1]), default=0),
            fixed_by,
        )
    return Export(program, fixed_by)


def _possible_batches(
    model: nn.Module, examples: tuple[Tensor, ...], known: _Dims | None
) -> list[_Dims]:
    """Return which dimensions of the inputs may be the batch: their first, in general.

    The states of recurrent layers have it second. So have the inputs of recurrent layers and of
    attention without `batch_first`, but masks of keys have it first. The first input is not taken
    for a state, because a sequence may have the same sizes.
    """
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, nn.RNNBase)]
    attention = [module for module in modules if isinstance(module, nn.MultiheadAttention)]
    states = {
        (module.num_layers * (1 + module.bidirectional), size)
        for module in layers
        for size in (module.hidden_size, module.proj_size)
    }
    first: _Dims = [0 if example.dim() else None for example in examples]
    with_states = [
        1 if i and x.dim() == 3 and (x.shape[0], x.shape[2]) in states else dim
        for i, (x, dim) in enumerate(zip(examples, first, strict=True))
    ]
    second = [1 if x.dim() > 1 else dim for x, dim in zip(examples, first, strict=True)]
    with_masks = [
        0 if x.dim() == 2 and i else dim
        for i, (x, dim) in enumerate(zip(examples, second, strict=True))
    ]
    possible = [with_states]
    if not all(m.batch_first for m in (*layers, *attention)):
        possible = [second, with_masks, with_states] if attention else [second, with_states]
    if known is not None and len(known) == len(examples) and any(d is not None for d in known):
        possible.insert(0, known)
    found = []
    for dims in (*possible, first):
        # An input of size 1 next to larger ones is shared by the whole batch, so it is fixed.
        least = min(2, max(_sizes(examples, dims), default=0))
        varying = [
            dim if dim is not None and x.shape[dim] >= least else None
            for x, dim in zip(examples, dims, strict=True)
        ]
        if varying not in found:
            found.append(varying)
    return found


def _sizes(examples: tuple[Tensor, ...], dims: _Dims) -> list[int]:
    pairs = zip(examples, dims, strict=True)
    return [example.shape[dim] for example, dim in pairs if dim is not None]


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


@contextlib.contextmanager
def _fused_layers(*, allowed: bool) -> Iterator[None]:
    """Choose whether `nn.TransformerEncoderLayer` may be one operation, which has no kernel here.

    Some layers can only be exported so: those of an encoder that compares its mask's values.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled and allowed)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _for_any_batch(
    model: nn.Module, wide: tuple[Tensor, ...], dims: _Dims
) -> torch.export.ExportedProgram | None:
    """Export with a batch size that may vary; None if the model fixes it.

    The second attempt reads the code of `forward`, because ``len(x)`` is a number when it runs. The
    third allows fused layers.
    """
    shapes = [{dim: torch.export.Dim.AUTO} if dim is not None else {} for dim in dims]
    has_fused = any(isinstance(m, nn.TransformerEncoderLayer) for m in model.modules())
    for strict, fused in ((False, False), (True, False), *[(True, True)] * has_fused):
        try:
            with _fused_layers(allowed=fused):
                program = torch.export.export(
                    model, wide, dynamic_shapes=_match_forward(model, shapes), strict=strict
                )
            functional: torch.export.ExportedProgram = program.run_decompositions(
                decompositions(program)
            )
        except Exception:  # PyTorch raises many kinds
            program = None
        if program is not None and _has_dynamic_batch(functional) and not _narrowing(program):
            return functional
        if all(dim is None for dim in dims):
            return None
    return None


def _for_this_batch(
    model: nn.Module, examples: tuple[Tensor, ...], caller: str
) -> torch.export.ExportedProgram:
    try:
        program = _exported_for_this_batch(model, examples)
        functional: torch.export.ExportedProgram = program.run_decompositions(
            decompositions(program)
        )
        return functional
    except InputError:  # of an ONNX operator
        raise
    except Exception as error:
        _check_that_it_runs(model, examples, caller)
        raise InputError(f"{caller}({type(model).__name__}): {reason_of(error)}") from error


def _exported_for_this_batch(
    model: nn.Module, examples: tuple[Tensor, ...]
) -> torch.export.ExportedProgram:
    with contextlib.suppress(Exception), _fused_layers(allowed=False):
        return torch.export.export(model, examples)
    return torch.export.export(model, examples)


def _check_that_it_runs(model: nn.Module, examples: tuple[Tensor, ...], caller: str) -> None:
    """Raise if PyTorch cannot compute the examples: it can export operations that it cannot run."""
    try:
        with torch.random.fork_rng(devices=[]):
            model(*(example.clone() for example in examples))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{caller}({type(model).__name__}): {reason_in_eager_mode(error)}"
        ) from error


def _what_fixes_the_batch(model: nn.Module, wide: tuple[Tensor, ...], dims: _Dims) -> str:
    """Return the line of code that needs one batch size, if PyTorch reports it."""
    shapes = [{dim: torch.export.Dim.DYNAMIC} if dim is not None else {} for dim in dims]
    try:
        program = torch.export.export(
            model, wide, dynamic_shapes=_match_forward(model, shapes), strict=True
        )
    except Exception as error:
        return place_of(error) or one_line(error)[:120]
    found = [_USER_LINE.match(str(guard.sloc.maybe_user_loc)) for guard in _narrowing(program)]
    places = [f"{Path(m[2]).name}, line {m[3]}: {m[1][:100]}" for m in found if m is not None]
    return places[0] if places else "a branch that torch.export does not name"


def _narrowing(program: torch.export.ExportedProgram) -> list[Any]:
    """Return the guards of an export that do not hold for every batch size.

    ``if len(x) > 4:`` in `forward` is such a guard: the program has one of the branches only.
    PyTorch has no guards about a batch of one; `_holds_for_one` checks it.
    """
    values = (node.meta.get("val") for node in program.graph.nodes)
    environment = next((v.fake_mode.shape_env for v in values if isinstance(v, FakeTensor)), None)
    guards = environment.guards if environment is not None else []
    return [guard for guard in guards if any(_fails(guard.expr, size) for size in _SIZES)]


def _holds_for_one(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    examples: tuple[Tensor, ...],
    dims: _Dims,
) -> bool:
    """Return whether the program computes what the model does for a batch of one.

    ``if len(x) == 1:`` in `forward` leaves no guard, because PyTorch assumes at least two.
    """
    one = tuple(
        x if dim is None else x.narrow(dim, 0, min(1, x.shape[dim])).contiguous()
        for x, dim in zip(examples, dims, strict=True)
    )
    try:
        with torch.random.fork_rng(devices=[]):
            expected = model(*one)
    except Exception:  # such as a BatchNorm that needs several values: then any batch of one fails
        return True
    try:
        with torch.random.fork_rng(devices=[]):
            found = program.module()(*one)
    except Exception:
        return False
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=False)
    return all(_close(a, b) for a, b in pairs if isinstance(b, Tensor))


def _close(found: Any, expected: Tensor) -> bool:
    """Return whether two results are equal but for rounding."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    scale = float(expected.abs().nan_to_num().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _fails(condition: Any, size: int) -> bool:
    """Return whether a condition does not hold if all sizes that vary have this value."""
    return bool(condition.subs(dict.fromkeys(condition.free_symbols, size)) == False)  # noqa: E712


def _match_forward(model: nn.Module, items: list[Any]) -> tuple[Any, ...]:
    """Group the items of inputs that ``*args`` of `forward` collects into a tuple."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        return tuple(items)
    named = kinds.index(inspect.Parameter.VAR_POSITIONAL)
    return (*items[:named], tuple(items[named:]))


def _has_dynamic_batch(program: torch.export.ExportedProgram) -> bool:
    """Return whether a dimension of some input may vary."""
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    return any(
        isinstance(size_of(size), str) for v in values if isinstance(v, Tensor) for size in v.shape
    )


def _varies_in_layers(program: torch.export.ExportedProgram) -> bool:
    """Return whether layers over sequences have a batch that may vary, and fixed numbers of steps.

    These are recurrent layers and attention.
    """
    return all(
        isinstance(size_of(batch), str) and isinstance(size_of(steps), int)
        for node in program.graph.nodes
        for batch, steps in _batch_and_steps(node)
    )


def _batch_and_steps(node: fx.Node) -> list[tuple[Any, Any]]:
    """Return the batch and the number of steps of each sequence that a layer reads."""
    count = 1 if node.target in CELLS else _SEQUENCES.get(node.target, 0)
    shapes = [x.meta["val"].shape for x in node.args[:count] if isinstance(x, fx.Node)]
    if node.target in CELLS and not arguments_of(node)["batch_first"]:
        return [(batch, steps) for steps, batch, _ in shapes]
    return [(shape[0], shape[-2]) for shape in shapes]


def _at_least_two(examples: tuple[Tensor, ...], dims: _Dims) -> tuple[Tensor, ...]:
    """Repeat a batch of one: `torch.export` would treat its size as a constant."""
    wide = []
    for example, dim in zip(examples, dims, strict=True):
        if dim is not None and example.shape[dim] == 1:
            example = example.repeat_interleave(2, dim)
        wide.append(example)
    return tuple(wide)
