"""What a call runs, one after the other, and which tensors it lets go on the way."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from probmask.errors import InputError
from probmask.runtime.lower.nodes import Network, Node
from probmask.runtime.plan.choices import (
    LANES,
    Choices,
    Timing,
    candidates,
    choose_lone,
    choose_sparse,
)
from probmask.runtime.plan.program import build
from probmask.runtime.plan.steps import Step, schedule
from probmask.runtime.run.profile import describe, measure, print_table, shortest
from probmask.runtime.run.runner import DoubtError, NativeStep
from probmask.runtime.run.threads import Threads


@dataclass(frozen=True)
class Work:
    """A part of a call: it takes its inputs from the values and puts its outputs there."""

    run: Callable[[dict[str, Any]], None]
    reads: Collection[str]
    # What nothing after it reads: the memory is free for what comes.
    last_read: tuple[str, ...] = ()


def with_releases(works: Sequence[Work], kept: Collection[str]) -> list[Work]:
    """The same work, each told what to let go; what is ``kept`` stays until the end."""
    done, needed = [], set(kept)
    for work in reversed(works):
        last = tuple(sorted(set(work.reads) - needed))
        needed.update(work.reads)
        done.append(replace(work, last_read=last))
    return done[::-1]


# A measured mixture has to be so many times faster than PyTorch alone to be kept.
_WORTH = 1.05


# Seconds of comparing the mixture with PyTorch alone.
_COMPARING = 0.2


def as_tensors(example: Any) -> tuple[Tensor, ...]:
    """Return the example inputs as a tuple of tensors on the CPU."""
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
        self._timings: dict[str, Timing] | None = None
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
        other = Engine(self.network, as_tensors(example), self._threads)
        other.use_fastest()
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

    def _measure(self) -> dict[str, Timing]:
        with torch.no_grad():
            return measure(self.network, self._examples)

    def use_fastest(self) -> None:
        """Measure, build the best mixture, and keep it if it is faster than PyTorch alone."""
        if not candidates(self.network):
            return
        self._timings = self._measure()
        sparse = choose_sparse(self.network, self._timings)
        lone = {
            step.nodes[0].name: choose_lone(step, self._timings)
            for step in schedule(self.network, sparse)
            if step.sparse
        }
        self.use(Choices(frozenset(sparse), lone))
        if self._hardly_faster_than_pytorch():
            self.use(Choices(frozenset(), {}))

    def _hardly_faster_than_pytorch(self) -> bool:
        values = dict(zip(self.network.inputs, self._examples, strict=True))
        with torch.no_grad():
            if self._run_finite(values) is None:
                return False
            ours: list[float] = []
            theirs: list[float] = []
            started = time.perf_counter()
            while len(ours) < 3 or time.perf_counter() - started < _COMPARING:
                ours.append(shortest(lambda: self._run(self._steps, values), budget=0))
                theirs.append(shortest(lambda: self._run(self._dense, values), budget=0))
        return _WORTH * min(ours) > min(theirs)

    def use(self, choices: Choices) -> None:
        """Run the nodes as chosen from now on."""
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
                lanes=LANES,
                lone=lone,
            )
        return NativeStep(step, single, grouped, self._threads)


def _shown(size: int | str) -> str:
    return str(size) if isinstance(size, int) else "N"


def _in_pytorch(node: Node) -> Callable[[dict[str, Any]], None]:
    def run(values: dict[str, Any]) -> None:
        values[node.name] = node.call(*(values[name] for name in node.inputs))

    return run


class EngineModule(nn.Module):
    """Calls the engine; has no parameters and nothing to train."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *inputs: Tensor) -> Any:
        """What the network computes."""
        return self.engine(*inputs)
