"""The engine: a compiled network that runs each node where it is fastest."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from probmask.errors import InputError
from probmask.runtime.lower.nodes import Network
from probmask.runtime.plan.partition import (
    Choices,
    Timing,
    all_on_kernels,
    choose_sparse,
    choose_ungrouped,
    steps_of,
)
from probmask.runtime.run.inputs import LastInputs, check_inputs, example_tensors
from probmask.runtime.run.profile import describe, measure, print_table, shortest
from probmask.runtime.run.pytorch_tensors import PyTorchTensors
from probmask.runtime.run.schedule import Schedule
from probmask.runtime.run.threads import Threads

# The measured mixture is used if it is this many times faster than PyTorch and the model alone.
_MIN_SPEEDUP = 1.05
_GAIN_OF_THREADS = 1.1  # their speed varies more from call to call
# Seconds for comparing the two.
_COMPARISON_SECONDS = 0.2


class Engine:
    """A compiled network, made by `probmask.runtime.compile`.

    Engines are called like the model. Several threads may call one engine at the same time. An
    engine can be copied and pickled; the pickle holds the network with its weights and the choices,
    and the copy plans its own memory and starts its own threads.

    Attributes:
        choices: Which nodes run on the kernels. ``choices.save(path)`` writes them to a file.
        threads: Number of threads for nodes on the kernels.
        compile_seconds: How long the compilation took.
        network: The lowered network.

    Example:
        >>> import torch, probmask
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> engine = probmask.runtime.compile(model, torch.zeros(1, 4), layers="sparse")
        >>> x = torch.ones(3, 4)
        >>> torch.allclose(engine(x), model(x), atol=1e-5)
        True
    """

    compile_seconds: float = 0.0

    def __init__(
        self,
        network: Network,
        examples: tuple[Tensor, ...],
        threads: Threads,
        model: nn.Module | None = None,
    ) -> None:
        self.network = network
        self._model = model
        self.threads = threads.count
        self.choices = Choices(frozenset(), {})
        self._examples, self._threads = examples, threads
        self._last_inputs = LastInputs()
        self._timings: dict[str, Timing] | None = None
        self._dense = self._plan(Choices(frozenset(), {}))
        self._schedule = self._dense
        self._whole: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = ("network", "threads", "choices", "_examples", "_timings", "compile_seconds")
        return {name: getattr(self, name) for name in kept}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Engine":
        """Return an engine with its own memory and threads; calls never change the network."""
        copied = copy.copy(self)
        copied._model = self._model
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        Engine.__init__(self, state["network"], state["_examples"], Threads(state["threads"]))
        self._timings, self.compile_seconds = state["_timings"], state["compile_seconds"]
        self.use(state["choices"])

    def __call__(self, *inputs: Any) -> Any:
        """Run the network.

        If a result on the kernels is not finite, the call is repeated in PyTorch: kernels skip
        zeros, and 0 · ∞ is NaN.

        Args:
            inputs: Dense tensors on the CPU or NumPy arrays, with the shapes and dtypes of the
                example. The batch size may differ if the model allows it.

        Returns:
            The model's output. Its tensors are NumPy arrays if any input is one.

        Raises:
            InputError: If the number, the kind, the shape or the dtype of the inputs does not fit,
                or if an input requires a gradient.
        """
        if self._last_inputs.resemble(inputs):
            if self._whole is not None:
                return self._whole(*inputs)
            return self._computed(dict(zip(self.network.inputs, inputs)))  # noqa: B905
        values = check_inputs(self.network, inputs)
        self._last_inputs.remember(values.values())
        whole = self._whole
        packed = self._computed(values) if whole is None else whole(*values.values())
        arrays = any(isinstance(item, np.ndarray) for item in inputs)
        return pytree.tree_map_only(Tensor, Tensor.numpy, packed) if arrays else packed

    def _computed(self, values: dict[str, Any]) -> Any:
        """Run the nodes, and change the inputs that the model's `forward` changes."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._computed(values)
        results, finite = self._schedule.run(values)
        if not finite:
            results, _ = self._dense.run(values)
        network = self.network
        if network.changed_inputs:
            for name, new_value in network.changed_inputs.items():
                values[name].copy_(results[new_value])
        return network.pack_outputs(results)

    def takes(self, *inputs: Any) -> bool:
        """Return whether the number, shapes and dtypes of the inputs fit the network.

        Args:
            inputs: Tensors or NumPy arrays.

        Returns:
            True if a call with these inputs would be accepted.
        """
        try:
            check_inputs(self.network, inputs)
        except InputError:
            return False
        return True

    def tuned_for(self, example: Any) -> "Engine":
        """Return an engine for the same network, with choices measured for another batch size.

        Args:
            example: An input, or a tuple of inputs, with the new batch size.

        Returns:
            A new engine. It shares the network and the threads with this one.

        Raises:
            InputError: If the example does not fit the network.
        """
        started = time.perf_counter()
        values = check_inputs(self.network, example_tensors(example))
        other = Engine(self.network, tuple(values.values()), self._threads, self._model)
        other.use_fastest()
        other.compile_seconds = time.perf_counter() - started
        return other

    def explain(self) -> None:
        """Print a table of the nodes: where each runs, why, and how long it takes.

        The total is the time of a call, measured on the example. What the nodes do not take of it
        is a row of its own, so that the rows add up to the total.
        """
        call = 1e3 * shortest(
            lambda: self(*self._examples),
            budget=_COMPARISON_SECONDS,
            least=3,
            threads=self._threads_of_a_call(),
        )
        print_table(self.describe(), call, self.compile_seconds, self.threads)

    def describe(self) -> list[dict[str, Any]]:
        """Return the rows of the table that `explain` prints.

        Nodes are timed on the example, unless they were timed before.

        Returns:
            One dictionary per node. Times are in milliseconds for the whole batch, on one thread.
        """
        if self._timings is None:
            self._timings = self._measure()
        return describe(self.network, self.choices, self._timings)

    def use(self, choices: Choices) -> None:
        """Run the nodes as chosen from now on.

        Args:
            choices: Which nodes run on the kernels.
        """
        self.choices = choices
        self._schedule = self._plan(choices)
        # Neither the copied model's weights nor its inputs need gradients.
        self._whole = _forward_of(self._model) if choices.model and self._model else None

    def use_kernels(self) -> None:
        """Run every node that has a kernel on the kernels; vectors in groups."""
        self.use(all_on_kernels(self.network))

    def use_fastest(self) -> None:
        """Time all nodes and use the fastest mixture, unless PyTorch alone is about as fast.

        PyTorch alone is the model itself or the nodes in PyTorch, whichever is faster: the model
        may use fused kernels, the nodes have BatchNorm folded.
        """
        self._timings = self._measure()
        sparse = choose_sparse(self.network, self._timings)
        ungrouped = {
            step.nodes[0].name: choose_ungrouped(step, self._timings)
            for step in steps_of(self.network, sparse)
            if step.sparse
        }
        mixture = Choices(frozenset(sparse), ungrouped)
        self._use_fastest_of(self._divided_where_faster(mixture))

    def _divided_where_faster(self, choices: Choices) -> Choices:
        """Return the choices with the steps that one thread computes as fast as all threads."""
        if self.threads == 1 or not choices.sparse:
            return choices
        alone = replace(choices, undivided=frozenset(choices.ungrouped))
        values = dict(zip(self.network.inputs, self._examples, strict=True))
        schedules = [self._plan(chosen) for chosen in (choices, alone)]
        rounds: list[list[dict[str, float]]] = [[], []]
        started = time.perf_counter()
        with torch.no_grad():
            for schedule in schedules:  # creates the memory and the threads
                schedule.run(values)
            while len(rounds[0]) < 5 or time.perf_counter() - started < _COMPARISON_SECONDS:
                for schedule, taken in zip(schedules, rounds, strict=True):
                    taken.append(schedule.seconds_of_few_images(values))
        together, single = (
            {name: statistics.median(seconds[name] for seconds in taken) for name in taken[0]}
            for taken in rounds
        )
        slow = (name for name in together if single[name] < _GAIN_OF_THREADS * together[name])
        return replace(choices, undivided=frozenset(slow))

    def _use_fastest_of(self, mixture: Choices) -> None:
        """Use the mixture if it is fast enough, otherwise PyTorch alone."""
        alternatives = [Choices(frozenset(), {})]
        if self._can_run_model():
            alternatives.append(Choices(frozenset(), {}, model=True))
        if mixture.sparse:
            self.use(mixture)
            values = dict(zip(self.network.inputs, self._examples, strict=True))
            with torch.no_grad():
                if not self._schedule.run(values)[1]:
                    return  # the example says nothing about the speed
        choices = [mixture, *alternatives] if mixture.sparse else alternatives
        seconds = self._seconds_of(choices)
        others = seconds[-len(alternatives) :]
        fastest = alternatives[others.index(min(others))]
        enough = mixture.sparse and _MIN_SPEEDUP * seconds[0] <= min(others)
        self.use(mixture if enough else fastest)

    def _can_run_model(self) -> bool:
        """Return whether calls of the model do the same: no shared outputs, no changed inputs."""
        return (
            self._model is not None
            and not self.network.changed_inputs
            and not self.network.returns_constants
        )

    def _seconds_of(self, choices: Sequence[Choices]) -> list[float]:
        """Return the shortest call with each of several choices, timed in turn."""
        functions = [self._function(chosen) for chosen in choices]
        times: list[list[float]] = [[] for _ in functions]
        threads = self._threads_of_a_call()
        started = time.perf_counter()
        with torch.no_grad():
            while len(times[0]) < 3 or time.perf_counter() - started < _COMPARISON_SECONDS:
                for function, taken in zip(functions, times, strict=True):
                    taken.append(shortest(function, budget=0, threads=threads))
        return [min(taken) for taken in times]

    def _threads_of_a_call(self) -> int:
        """Return the number of threads that a call may use, on the kernels or in PyTorch."""
        return max(self.threads, torch.get_num_threads())

    def _function(self, choices: Choices) -> Callable[[], Any]:
        """Return a function that runs the example as chosen."""
        if choices.model:
            assert self._model is not None
            forward = _forward_of(self._model)
            return lambda: forward(*self._examples)
        schedule = self._schedule if choices == self.choices else self._plan(choices)
        values = dict(zip(self.network.inputs, self._examples, strict=True))
        return lambda: self.network.pack_outputs(schedule.run(values)[0])

    def _measure(self) -> dict[str, Timing]:
        with torch.no_grad():
            values = dict(zip(self.network.inputs, self._examples, strict=True))
            return measure(self.network, values, PyTorchTensors(), torch.get_num_threads())

    def _plan(self, choices: Choices) -> Schedule:
        return Schedule(self.network, choices, self._threads, PyTorchTensors())


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    """Return the model's `forward`, or its call if it has hooks; a call takes 2 µs longer."""
    hooks = model._forward_hooks or model._forward_pre_hooks
    return model if hooks else model.forward


class EngineModule(nn.Module):
    """An engine as a module without parameters, for code that expects a module."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *inputs: Tensor) -> Any:
        """Run the network."""
        return self.engine(*inputs)
