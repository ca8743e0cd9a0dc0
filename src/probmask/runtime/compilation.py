"""`probmask.runtime.compile`: from a model to an engine for this machine."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from probmask.artifact import load
from probmask.checks import check_choice
from probmask.errors import InputError
from probmask.runtime.lower.frozen_model import frozen

if TYPE_CHECKING:  # the engine imports Numba, which is loaded when a network is compiled
    from probmask.runtime.run.engine import Engine


def compile(  # noqa: A001
    model: nn.Module | str | os.PathLike[str],
    example: Any = None,
    *,
    threads: int | None = None,
    layers: Literal["measured", "sparse", "dense"] = "measured",
    choices: str | os.PathLike[str] | None = None,
) -> "Engine":
    """Compile a network for this machine.

    The engine holds a copy of the weights: later changes of the model do not reach it. By default
    each layer is timed on the sparse kernels and in PyTorch, and runs where it is faster; if that
    is not faster than the model itself, the engine calls a copy of the model. The first compilation
    on a machine takes half a minute; Numba then caches the kernels on disk.

    Args:
        model: A module, compiled in evaluation mode, or the path of an artifact or of an ONNX file
            (with the suffix ``.onnx``).
        example: An input, or a tuple of inputs, as tensors or arrays. Layers are timed at its batch
            size. The engine accepts other batch sizes too, if the model does. Default, for an ONNX
            file only: inputs with the shapes in the file, and a batch of one.
        threads: Number of threads for layers on the kernels. Default: as many as PyTorch uses.
            Layers in PyTorch use PyTorch's threads.
        layers: "measured" to time each layer, "sparse" to run every layer that has a kernel on the
            kernels, "dense" to run all layers in PyTorch.
        choices: A file that ``engine.choices.save`` wrote. Its choices are used instead of
            ``layers``.

    Returns:
        An engine, called like the model.

    Raises:
        InputError: If the model cannot be copied, or exported by `torch.export`, if
            `torch.nn.utils.prune` still masks it, if its ``forward`` changes its own buffers, if
            the choices belong to another network or processor, if an ONNX file is damaged or has
            an operator that is not supported, or if an argument is invalid.

    Example:
        >>> import torch, probmask
        >>> model = torch.nn.Linear(4, 2)
        >>> engine = probmask.runtime.compile(model, torch.zeros(1, 4), layers="sparse")
        >>> engine(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    from probmask.runtime.lower.export import export
    from probmask.runtime.lower.lowering import lower
    from probmask.runtime.plan.partition import read_choices
    from probmask.runtime.run.engine import Engine
    from probmask.runtime.run.inputs import example_tensors
    from probmask.runtime.run.threads import Threads, check_threads

    started = time.perf_counter()
    threads = torch.get_num_threads() if threads is None else threads
    check_threads("runtime.compile", threads)
    check_choice("runtime.compile", "layers", layers, ("measured", "sparse", "dense"))
    copied, example, known = _model_and_example(model, example)
    examples = example_tensors(example)
    network = lower(export(copied, examples, **known))
    engine = Engine(network, examples, Threads(threads), copied)
    if choices is not None:
        engine.use(read_choices(choices, network))
    elif layers == "sparse":
        engine.use_kernels()
    elif layers == "measured":
        engine.use_fastest()
    engine.compile_seconds = time.perf_counter() - started
    return engine


def _model_and_example(
    model: nn.Module | str | os.PathLike[str], example: Any
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Return the model for inference, the example, and what `export` needs to know about its batch.

    An ONNX file has the shapes of its inputs.
    """
    if isinstance(model, str | os.PathLike) and Path(model).suffix.lower() == ".onnx":
        from probmask.runtime.from_onnx.onnx_batch import what_fixes_the_batch
        from probmask.runtime.from_onnx.onnx_inputs import batch_dims, check_example, example_of
        from probmask.runtime.from_onnx.onnx_loading import load_onnx

        network, inputs = load_onnx(model)
        example = example_of(model, inputs) if example is None else example
        check_example(model, inputs, example)
        return network, example, {"batch_dims": batch_dims(inputs), "explain": what_fixes_the_batch}
    if example is None:
        raise InputError(
            "runtime.compile(model): pass an example, an input or a tuple of inputs; only ONNX "
            "files have the shapes of their inputs."
        )
    return frozen_copy(model), example, {}


def frozen_copy(
    model: nn.Module | str | os.PathLike[str], *, caller: str = "runtime.compile"
) -> nn.Module:
    """Return the model of an artifact, or a copy of a model, for inference on the CPU.

    Raise `InputError`, which names the ``caller``, if the model cannot be used.
    """
    if isinstance(model, str | os.PathLike):
        return load(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{caller}({type(model).__name__}): takes a torch.nn.Module or the path of an artifact."
        )
    return frozen(model, caller)
