"""The engine: takes arrays or tensors, and runs each part of the network where it is fast."""

import copy
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from probmask.artifact import load
from probmask.checks import check_choice, check_count
from probmask.errors import InputError
from probmask.runtime import choose
from probmask.runtime.choices import Choices, read_choices
from probmask.runtime.explain import describe, print_table
from probmask.runtime.exporting import export
from probmask.runtime.lower import lower
from probmask.runtime.native import DoubtError, NativeStep
from probmask.runtime.nodes import Network, Node
from probmask.runtime.program import build
from probmask.runtime.releasing import Work, with_releases
from probmask.runtime.schedule import Step, schedule
from probmask.runtime.threads import Threads

# A measured mixture has to be so many times faster than PyTorch alone to be kept.
_WORTH = 1.05
# Seconds of comparing the mixture with PyTorch alone.
_COMPARING = 0.2


def compile(  # noqa: A001
    model: nn.Module | str | os.PathLike[str],
    example: Any,
    *,
    threads: int | None = None,
    layers: Literal["measured", "sparse", "dense"] = "measured",
    choices: str | os.PathLike[str] | None = None,
) -> "Engine":
    """Compile a network for this machine; its weights are taken as they are now.

    ``model`` is a module, compiled as it is in evaluation, or the path of an artifact. ``example``
    is an input (or a tuple of inputs) of the shape to be fast at; other batch sizes work as well.
    Layers on the sparse kernels use ``threads`` threads (default: as many as PyTorch), those in
    PyTorch use PyTorch's. Which layer runs where is measured, or read from the file ``choices``,
    which ``engine.choices.save`` wrote; ``layers`` decides it for all of them instead: on the
    sparse kernels, or in PyTorch.
    """
    started = time.perf_counter()
    threads = torch.get_num_threads() if threads is None else threads
    check_count("runtime.compile", "threads", threads, least=1, meaning="threads to run on")
    check_choice("runtime.compile", "layers", layers, ("measured", "sparse", "dense"))
    examples = _as_tensors(example)
    network = lower(export(_frozen(model), examples))
    engine = Engine(network, examples, Threads(threads))
    if choices is not None:
        engine._build(read_choices(choices, network))
    elif layers == "sparse":
        engine._build(Choices(frozenset(choose.candidates(network)), {}))
    elif layers == "measured":
        engine._choose()
    engine.compile_seconds = time.perf_counter() - started
    return engine


def _frozen(model: nn.Module | str | os.PathLike[str]) -> nn.Module:
    if isinstance(model, str | os.PathLike):
        return load(model)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"runtime.compile({type(model).__name__}): takes a torch.nn.Module or the path of an "
            "artifact."
        )
    return copy.deepcopy(model).cpu().eval().requires_grad_(False)


def _as_tensors(example: Any) -> tuple[Tensor, ...]:
    given = example if isinstance(example, tuple) else (example,)
    if not given or not all(isinstance(item, Tensor | np.ndarray) for item in given):
        raise InputError("runtime.compile: the example is a tensor, an array, or a tuple of them.")
    return tuple(as_tensor(item).cpu() for item in given)


def as_tensor(item: Any) -> Tensor:
    """A tensor of what is given; an array that PyTorch cannot share is copied."""
    if isinstance(item, np.ndarray):
        return torch.from_numpy(np.require(item, requirements=("C", "W")))
    return item.detach() if isinstance(item, Tensor) else torch.as_tensor(item)


class Engine:
    """A compiled network. Calls may come from several threads at once."""

    compile_seconds: float = 0.0

    def __init__(self, network: Network, examples: tuple[Tensor, ...], threads: Threads) -> None:
        self.network = network
        self.threads = threads.count
        self.choices = Choices(frozenset(), {})
        self._examples, self._threads = examples, threads
        self._timings: dict[str, choose.Timing] | None = None
        self._dense = self._planned(Choices(frozenset(), {}))
        self._steps = self._dense

    def __call__(self, *inputs: Any) -> Any:
        """Run the network: tensors give tensors, NumPy arrays give NumPy arrays."""
        arrays = any(isinstance(item, np.ndarray) for item in inputs)
        values = self._check(inputs)
        with torch.no_grad():
            results = self._run_finite(values)
            if results is None:  # where something is not finite, PyTorch says what comes out
                results = self._run(self._dense, values)
            for name, becomes in self.network.changed_inputs.items():
                values[name].copy_(results[becomes])
        packed = self.network.pack_outputs(results)
        return pytree.tree_map_only(Tensor, Tensor.numpy, packed) if arrays else packed

    def takes(self, *inputs: Any) -> bool:
        """Whether the network takes inputs of this number, these shapes and types."""
        try:
            self._check(inputs)
        except InputError:
            return False
        return True

    def tuned_for(self, example: Any) -> "Engine":
        """The same network, with its layers' places measured for another batch size."""
        started = time.perf_counter()
        other = Engine(self.network, _as_tensors(example), self._threads)
        other._choose()
        other.compile_seconds = time.perf_counter() - started
        return other

    def explain(self) -> None:
        """Print which node runs where and why, with the time that each takes."""
        print_table(self.describe(), self.compile_seconds, self.threads)

    def describe(self) -> list[dict[str, Any]]:
        """Of each node: where it runs and why, and its time for the example, in milliseconds."""
        if self._timings is None:
            self._timings = self._measure()
        return describe(self.network, self.choices, self._timings)

    def _check(self, inputs: Sequence[Any]) -> dict[str, Any]:
        network = self.network
        if len(inputs) != len(network.inputs):
            raise InputError(f"the network takes {len(network.inputs)} inputs, not {len(inputs)}.")
        values = {}
        sizes: dict[str, int] = {}  # of those that vary, by name
        wanted = zip(network.inputs, network.input_shapes, network.input_dtypes, strict=True)
        for item, (name, shape, dtype) in zip(inputs, wanted, strict=True):
            tensor = as_tensor(item)
            fits = len(shape) == tensor.dim() and all(
                given == (size if isinstance(size, int) else sizes.setdefault(size, given))
                for size, given in zip(shape, tensor.shape, strict=True)
            )
            if not fits or tensor.dtype != dtype or tensor.device.type != "cpu":
                expected = "×".join(_shown(size) for size in shape)
                found = "×".join(str(size) for size in tensor.shape)
                raise InputError(
                    f"the network takes {name} of {expected} {str(dtype)[6:]} on the CPU, not "
                    f"{found} {str(tensor.dtype)[6:]} on {tensor.device.type}."
                )
            values[name] = tensor
        return values

    def _run_finite(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Run as chosen; None where a number is not finite."""
        try:
            return self._run(self._steps, values)
        except DoubtError:
            return None

    def _run(self, steps: list[Work], given: dict[str, Any]) -> dict[str, Any]:
        values = dict(given)
        for work in steps:
            work.run(values)
            for name in work.last_read:
                del values[name]
        return values

    def _measure(self) -> dict[str, choose.Timing]:
        with torch.no_grad():
            return choose.measure(self.network, self._examples)

    def _choose(self) -> None:
        """Measure, build the best mixture, and keep it if it is faster than PyTorch alone."""
        if not choose.candidates(self.network):
            return
        self._timings = self._measure()
        sparse = choose.choose_sparse(self.network, self._timings)
        lone = {
            step.nodes[0].name: choose.choose_lone(step, self._timings)
            for step in schedule(self.network, sparse)
            if step.sparse
        }
        self._build(Choices(frozenset(sparse), lone))
        if self._hardly_faster_than_pytorch():
            self._build(Choices(frozenset(), {}))

    def _hardly_faster_than_pytorch(self) -> bool:
        values = dict(zip(self.network.inputs, self._examples, strict=True))
        with torch.no_grad():
            if self._run_finite(values) is None:
                return False
            ours: list[float] = []
            theirs: list[float] = []
            started = time.perf_counter()
            while len(ours) < 3 or time.perf_counter() - started < _COMPARING:
                ours.append(choose.shortest(lambda: self._run(self._steps, values), budget=0))
                theirs.append(choose.shortest(lambda: self._run(self._dense, values), budget=0))
        return _WORTH * min(ours) > min(theirs)

    def _build(self, choices: Choices) -> None:
        self.choices = choices
        self._steps = self._planned(choices)

    def _planned(self, choices: Choices) -> list[Work]:
        """What to run, one after the other: steps on the kernels, single nodes in PyTorch."""
        works = []
        for step in schedule(self.network, set(choices.sparse)):
            if step.sparse:
                reads = {outside.name for outside in step.inputs}
                works.append(Work(self._native(step, choices), reads))
            else:
                works += [Work(_in_pytorch(node), set(node.inputs)) for node in step.nodes]
        return with_releases(works, self.network.outputs)

    def _native(self, step: Step, choices: Choices) -> NativeStep:
        lone = choices.lone.get(step.nodes[0].name, len(step.nodes))
        single = build(step.nodes, step.inputs, step.outputs, threads=self.threads)
        grouped = None
        if lone < len(step.nodes):
            grouped = build(
                step.nodes,
                step.inputs,
                step.outputs,
                threads=self.threads,
                lanes=choose.LANES,
                lone=lone,
            )
        return NativeStep(step, single, grouped, self._threads)


def _shown(size: int | str) -> str:
    return str(size) if isinstance(size, int) else "N"


def _in_pytorch(node: Node) -> Callable[[dict[str, Any]], None]:
    def run(values: dict[str, Any]) -> None:
        values[node.name] = node.call(*(values[name] for name in node.inputs))

    return run
