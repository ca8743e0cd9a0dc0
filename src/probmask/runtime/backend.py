"""The engine as a backend of `torch.compile`."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from probmask.errors import InputError
from probmask.runtime.engine import Engine
from probmask.runtime.engine import compile as compile_engine

# How TorchDynamo names the inputs of a graph that are the module's own.
_OWN = re.compile(r"_modules_.*_(parameters|buffers)_|_self_.*_(parameters|buffers)_")


def probmask(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph of TorchDynamo's when it is first called; for inference only.

    The weights are taken as they are at that call. Where gradients are asked for, or where the
    graph cannot be exported, it runs in PyTorch as it is.
    """
    return _Compiled(graph, examples)


class _Compiled:
    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.own = [
            isinstance(example, nn.Parameter) or _OWN.search(node.name) is not None
            for node, example in zip(nodes, examples, strict=True)
        ]
        self.sizes = {
            i: _where_size_is(nodes, self.own, node)
            for i, (node, example) in enumerate(zip(nodes, examples, strict=True))
            if not isinstance(example, Tensor)
        }
        self.engine: Engine | None = None
        self.refused = False

    def __call__(self, *arguments: Any) -> Any:
        trained = torch.is_grad_enabled() and any(
            isinstance(a, Tensor) and a.requires_grad for a in arguments
        )
        if trained or self.refused:
            return self.graph(*arguments)
        varying = [a for i, a in enumerate(arguments) if not self.own[i] and i not in self.sizes]
        if self.engine is None:
            try:
                bound = _Bound(self.graph, arguments, self.own, self.sizes)
                self.engine = compile_engine(bound, tuple(varying))
            except InputError as error:
                warnings.warn(f"torch.compile(backend='probmask'): {error}", stacklevel=2)
                self.refused = True
                return self.graph(*arguments)
        return self.engine(*varying)


def _where_size_is(nodes: Sequence[fx.Node], own: Sequence[bool], size: fx.Node) -> tuple[int, int]:
    """Of a size that is an input: the tensor and the dimension that have it."""
    wanted = str(size.meta["example_value"])
    for i, node in enumerate(nodes):
        value = node.meta.get("example_value")
        if own[i] or not isinstance(value, Tensor):
            continue
        for dimension, length in enumerate(value.shape):
            if str(length) == wanted:
                return i, dimension
    raise InputError(f"torch.compile(backend='probmask'): nothing has the size {wanted}.")


class _Bound(nn.Module):
    """The graph with its own tensors in place, as a function of the others."""

    def __init__(
        self,
        graph: fx.GraphModule,
        arguments: Sequence[Any],
        own: Sequence[bool],
        sizes: dict[int, tuple[int, int]],
    ) -> None:
        super().__init__()
        self.graph = graph
        self.count, self.sizes = len(arguments), sizes
        self.places = {}
        for i, value in enumerate(arguments):
            if own[i]:
                self.register_buffer(f"own{i}", value.detach())
                self.places[i] = f"own{i}"

    def forward(self, *varying: Tensor) -> Any:
        """Call the graph with all of its inputs."""
        given = iter(varying)
        arguments: list[Any] = [
            getattr(self, self.places[i])
            if i in self.places
            else None
            if i in self.sizes
            else next(given)
            for i in range(self.count)
        ]
        for i, (tensor, dimension) in self.sizes.items():
            arguments[i] = arguments[tensor].shape[dimension]
        return self.graph(*arguments)
