"""The schedule of a call: which tasks run in which order, and when their tensors are freed."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from probmask.runtime.lower.nodes import Network, Node
from probmask.runtime.plan.partition import LANES, Choices, Step, first_grouped, steps_of
from probmask.runtime.plan.program import build_program
from probmask.runtime.run.kernel_step import KernelStep, Tensors
from probmask.runtime.run.threads import Threads


class Schedule:
    """The tasks of a call: steps on the kernels, and single nodes that run by their ``call``."""

    def __init__(
        self, network: Network, choices: Choices, threads: Threads, tensors: Tensors
    ) -> None:
        self._threads, self._tensors = threads, tensors
        tasks = []
        for step in steps_of(network, set(choices.sparse)):
            if step.sparse:
                reads = {external.name for external in step.inputs}
                tasks.append(_Task(self._kernel_step(step, choices), reads))
            else:
                tasks += [_Task(_called(node), set(node.inputs)) for node in step.nodes]
        self._tasks = _with_last_reads(tasks, network.outputs)
        # Tuples, because reading attributes is slower.
        self._order = [(task.run, task.last_reads) for task in self._tasks]

    def run(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the values of a call, and whether all results on the kernels are finite.

        The call ends at the first step whose results are not finite.
        """
        values = dict(inputs)
        for run, last_reads in self._order:
            if not run(values):
                return values, False
            for name in last_reads:
                del values[name]
        return values, True

    def seconds_of_few_images(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """Run a call; return the seconds of each step that has too few images for all threads.

        The steps are named by their first node.
        """
        values, seconds = dict(inputs), {}
        for task in self._tasks:
            started = time.perf_counter()
            task.run(values)
            if isinstance(task.run, KernelStep) and task.run.has_few_images(values):
                seconds[task.run.step.nodes[0].name] = time.perf_counter() - started
        return seconds

    def _kernel_step(self, step: Step, choices: Choices) -> KernelStep:
        ungrouped = choices.ungrouped.get(step.nodes[0].name, len(step.nodes))
        ungrouped = max(ungrouped, first_grouped(step.nodes))
        undivided = step.nodes[0].name in choices.undivided
        threads = 1 if undivided else self._threads.count
        single = build_program(step, threads=threads)
        grouped = None
        if ungrouped < len(step.nodes):
            grouped = build_program(step, threads=threads, lanes=LANES, ungrouped=ungrouped)
        return KernelStep(step, single, grouped, self._threads, self._tensors, undivided=undivided)


@dataclass(frozen=True)
class _Task:
    """A part of a call.

    It reads its inputs from the values, adds its outputs to them, and returns whether these are
    finite.
    """

    run: Callable[[dict[str, Any]], bool]
    reads: Collection[str]
    # Values that no later task reads: their memory can be freed.
    last_reads: tuple[str, ...] = ()


def _with_last_reads(tasks: Sequence[_Task], outputs: Collection[str]) -> list[_Task]:
    """Set the values that each task is the last to read; outputs are never freed."""
    complete, needed = [], set(outputs)
    for task in reversed(tasks):
        last = tuple(sorted(set(task.reads) - needed))
        needed.update(task.reads)
        complete.append(replace(task, last_reads=last))
    return complete[::-1]


def _called(node: Node) -> Callable[[dict[str, Any]], bool]:
    """Return a task that runs a node by its call, whose results may be anything."""
    name, call, inputs = node.name, node.call, node.inputs

    def run(values: dict[str, Any]) -> bool:
        values[name] = call(*[values[read] for read in inputs])
        return True

    def run_one(values: dict[str, Any]) -> bool:
        values[name] = call(values[inputs[0]])
        return True

    return run_one if len(inputs) == 1 else run
