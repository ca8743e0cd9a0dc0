"""The engine as a backend of `torch.compile`."""

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from probmask.errors import InputError
from probmask.runtime.compile import compile as compile_engine
from probmask.runtime.run.engine import Engine

# How TorchDynamo names the inputs of a graph that are the module's own.
_OWN = re.compile(r"(_modules_.*|_self)_(parameters|buffers)_")


# Engines of one graph: each compiles for a shape. Further shapes run in PyTorch.
_MOST = 8


def probmask(graph: fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """Compile a graph of TorchDynamo's when it is first called; for inference only.

    The weights are taken as they are at that call. Where gradients are asked for, or where the
    graph cannot be exported, it runs in PyTorch as it is. Inputs of another shape are compiled
    for anew, those of another batch size only if the graph allows no other. No ``settings``, which
    are the mode and the options of `torch.compile`, are taken.
    """
    return _refusing(settings) if settings else _Compiled(graph, examples)


def _refusing(settings: dict[str, Any]) -> Callable[..., Any]:
    """Refuse the call: an error of the backend itself would be put into one of TorchDynamo's."""

    def refuse(*_: Any) -> Any:
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        raise InputError(
            f"torch.compile(backend='probmask', {given}): the backend takes no "
            f"{' or '.join(settings)}; leave it out, or call probmask.runtime.compile, which takes "
            "threads, layers and choices."
        )

    return refuse


class _Compiled:
    def __init__(self, graph: fx.GraphModule, examples: Sequence[Any]) -> None:
        self.graph = graph
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.own = [
            isinstance(example, Tensor)
            and (isinstance(example, nn.Parameter) or _OWN.search(node.name) is not None)
            for node, example in zip(nodes, examples, strict=True)
        ]
        # Of inputs that are sizes: the tensor and the dimension that have them.
        self.sizes = {
            i: place
            for i, (node, example) in enumerate(zip(nodes, examples, strict=True))
            if not isinstance(example, Tensor)
            and (place := _where_size_is(nodes, self.own, node)) is not None
        }
        # By the inputs that are neither tensors nor their sizes, which are compiled in.
        self.engines: dict[tuple[Any, ...], list[Engine]] = {}
        self.refused = False

    def __call__(self, *arguments: Any) -> Any:
        tensors = [a for a in arguments if isinstance(a, Tensor)]
        trained = torch.is_grad_enabled() and any(a.requires_grad for a in tensors)
        varying = [a for i, a in enumerate(arguments) if isinstance(a, Tensor) and not self.own[i]]
        if trained or self.refused or not varying or any(a.device.type != "cpu" for a in tensors):
            return self.graph(*arguments)
        engine = self._engine(arguments, varying)
        return self.graph(*arguments) if engine is None else engine(*varying)

    def _engine(self, arguments: Sequence[Any], varying: Sequence[Tensor]) -> Engine | None:
        """The engine for such arguments; None if there is and will be none."""
        fixed = tuple(
            a for i, a in enumerate(arguments) if not isinstance(a, Tensor) and i not in self.sizes
        )
        engines = self.engines.setdefault(fixed, [])
        found = next((engine for engine in engines if engine.takes(*varying)), None)
        if found is not None or sum(map(len, self.engines.values())) >= _MOST:
            return found
        try:
            bound = _Bound(self.graph, arguments, self.own, self.sizes)
            engines.append(compile_engine(bound, tuple(varying)))
        except InputError as error:
            warnings.warn(f"torch.compile(backend='probmask'): {error}", stacklevel=3)
            self.refused = True
            return None
        return engines[-1]


def _where_size_is(
    nodes: Sequence[fx.Node], own: Sequence[bool], size: fx.Node
) -> tuple[int, int] | None:
    """Of a size that is an input: the tensor and the dimension that have it, if any has."""
    wanted = str(size.meta["example_value"])
    for i, node in enumerate(nodes):
        value = node.meta.get("example_value")
        if own[i] or not isinstance(value, Tensor):
            continue
        for dimension, length in enumerate(value.shape):
            if str(length) == wanted:
                return i, dimension
    return None


class _Bound(nn.Module):
    """The graph with its own tensors and what is no tensor in place, as a function of the rest."""

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
        self.places = {}
        for i, value in enumerate(arguments):
            if own[i]:
                self.register_buffer(f"own{i}", value.detach())
                self.places[i] = f"own{i}"

    def forward(self, *varying: Tensor) -> Any:
        """Call the graph with all of its inputs."""
        arguments = list(self.fixed)
        for i, tensor in zip(self.varying, varying, strict=True):
            arguments[i] = tensor
        for i, name in self.places.items():
            arguments[i] = getattr(self, name)
        for i, (place, dimension) in self.sizes.items():
            arguments[i] = arguments[place].shape[dimension]
        return self.graph(*arguments)
