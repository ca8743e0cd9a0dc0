"""The engine as a backend of `torch.compile`."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from probmask.errors import InputError
from probmask.runtime.compilation import compile as compile_engine
from probmask.runtime.run.engine import Engine

# How TorchDynamo names the graph inputs that are parameters and buffers of the module.
_OWN = re.compile(r"(_modules_.*|_self)_(parameters|buffers)_")
# Largest number of engines per graph, one per shape. Further shapes run in PyTorch.
_MAX_ENGINES = 8


def probmask(graph: fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """Compile a TorchDynamo graph at its first call, for inference only.

    The engine uses the weights of that call. The graph runs in PyTorch if gradients are needed or
    if it cannot be exported. A new shape is compiled again; a new batch size is not, unless the
    graph fixes its batch size.

    Args:
        graph: The graph that TorchDynamo captured.
        examples: Example inputs of the graph.
        settings: Mode and options of `torch.compile`. The backend supports none.

    Returns:
        A function with the inputs and outputs of the graph.

    Raises:
        InputError: At the first call, if there are settings.

    Example:
        >>> import torch
        >>> from probmask.runtime.backend import probmask
        >>> model = torch.compile(torch.nn.Linear(4, 2), backend=probmask)
        >>> with torch.no_grad():
        ...     model(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    return _rejecting(settings) if settings else _CompiledGraph(graph, examples)


def _rejecting(settings: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that raises: TorchDynamo would wrap an error of the backend itself."""

    def reject(*_: Any) -> Any:
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        raise InputError(
            f"torch.compile(backend='probmask', {given}): the backend takes no "
            f"{' or '.join(settings)}; leave it out, or call probmask.runtime.compile, which takes "
            "threads, layers and choices."
        )

    return reject


class _CompiledGraph:
    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        # Whether each input is a parameter or a buffer of the module.
        self.own = [
            isinstance(example, Tensor)
            and (isinstance(example, nn.Parameter) or _OWN.search(node.name) is not None)
            for node, example in zip(nodes, examples, strict=True)
        ]
        # For inputs that are sizes: the index and the dimension of a tensor with that size.
        self.sizes = {
            i: location
            for i, (node, example) in enumerate(zip(nodes, examples, strict=True))
            if not isinstance(example, Tensor)
            and (location := _locate_size(nodes, self.own, node)) is not None
        }
        # Engines by the values of the inputs that are compiled in: neither tensors nor sizes.
        self.engines: dict[tuple[Any, ...], list[Engine]] = {}
        self.cannot_compile = False

    def __call__(self, *arguments: Any) -> Any:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        needs_grad = torch.is_grad_enabled() and any(a.requires_grad for a in tensors)
        varying = [a for i, a in enumerate(arguments) if isinstance(a, Tensor) and not self.own[i]]
        on_cpu = all(a.device.type == "cpu" for a in tensors)
        if needs_grad or self.cannot_compile or not varying or not on_cpu:
            return self.graph(*arguments)
        engine = self._engine(arguments, varying)
        return self.graph(*arguments) if engine is None else engine(*varying)

    def _engine(self, arguments: Sequence[Any], varying: Sequence[Tensor]) -> Engine | None:
        """Return the engine for these arguments, or None if they run in PyTorch."""
        fixed = tuple(
            a for i, a in enumerate(arguments) if not isinstance(a, Tensor) and i not in self.sizes
        )
        engines = self.engines.setdefault(fixed, [])
        found = next((engine for engine in engines if engine.takes(*varying)), None)
        if found is not None or sum(map(len, self.engines.values())) >= _MAX_ENGINES:
            return found
        try:
            bound = _BoundGraph(self.graph, arguments, self.own, self.sizes)
            engines.append(compile_engine(bound, tuple(varying)))
        except InputError as error:
            warnings.warn(f"torch.compile(backend='probmask'): {error}", stacklevel=3)
            self.cannot_compile = True
            return None
        return engines[-1]


def _locate_size(
    nodes: Sequence[fx.Node], own: Sequence[bool], size: fx.Node
) -> tuple[int, int] | None:
    """Return the index and the dimension of an input tensor of this size, or None."""
    name = str(size.meta["example_value"])
    for i, node in enumerate(nodes):
        value = node.meta.get("example_value")
        if own[i] or not isinstance(value, Tensor):
            continue
        for dimension, length in enumerate(value.shape):
            if str(length) == name:
                return i, dimension
    return None


class _BoundGraph(nn.Module):
    """The graph as a function of its varying tensors; all other inputs are bound."""

    def __init__(
        self,
        graph: fx.GraphModule,
        arguments: Sequence[Any],
        own: Sequence[bool],
        sizes: dict[int, tuple[int, int]],
    ) -> None:
        super().__init__()
        self.graph = graph
        self.sizes = sizes
        self.fixed: list[Any] = [None if isinstance(a, Tensor) else a for a in arguments]
        self.varying = [i for i, a in enumerate(arguments) if isinstance(a, Tensor) and not own[i]]
        self.buffer_names = {}
        for i, value in enumerate(arguments):
            if own[i]:
                self.register_buffer(f"own{i}", value.detach())
                self.buffer_names[i] = f"own{i}"

    def forward(self, *varying: Tensor) -> Any:
        """Call the graph with all of its inputs."""
        arguments = list(self.fixed)
        for i, tensor in zip(self.varying, varying, strict=True):
            arguments[i] = tensor
        for i, name in self.buffer_names.items():
            arguments[i] = getattr(self, name)
        for i, (index, dimension) in self.sizes.items():
            arguments[i] = arguments[index].shape[dimension]
        return self.graph(*arguments)
