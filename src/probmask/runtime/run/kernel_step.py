"""Run a step on the kernels: arenas, sharing among threads, and the tensors around it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from probmask.errors import InputError
from probmask.runtime.kernels.driver import run
from probmask.runtime.plan.partition import Step
from probmask.runtime.plan.program import Program
from probmask.runtime.run.threads import Threads

_CACHE_LINE = 64  # bytes
# Larger than any number of barriers that threads pass: it opens all of them.
_OPEN = 1 << 60
# The counter of barriers for one thread, which neither reads nor changes it.
_NO_BARRIERS = np.zeros(8, np.int64)


class ArenaPool:
    """Arenas of one program. Each call borrows one, so that concurrent calls are independent."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Any] = []  # append and pop are atomic, so no lock is needed

    def borrow(self) -> Any:
        """Return an arena that is not in use; its padding is zero."""
        try:
            return self._free.pop()
        except IndexError:
            return self._create()

    def give_back(self, arena: Any) -> None:
        """Return an arena to the pool."""
        self._free.append(arena)

    def _create(self) -> Any:
        raw = np.zeros(self._size + _CACHE_LINE // 4, np.float32)
        skip = -raw.ctypes.data % _CACHE_LINE // 4
        return raw[skip : skip + self._size]


class Runner:
    """Runs a program on images ``begin`` to ``end``.

    ``external`` holds the addresses of the program's input and output tensors.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.arenas = ArenaPool(program.arena_size)

    def run(self, external: Any, begin: int, end: int) -> bool:
        """Compute images on this thread; return whether all results are finite."""
        arena = self.arenas.borrow()
        try:
            return self._call(arena, external, begin, end, 0, 1, _NO_BARRIERS)
        finally:
            self.arenas.give_back(arena)

    def run_together(self, external: Any, begin: int, end: int, threads: Threads) -> bool:
        """Compute images with all threads on each layer; return whether all results are finite."""
        arena = self.arenas.borrow()
        barriers = np.zeros(8, np.int64)
        jobs = [
            lambda thread=thread: self._call(
                arena, external, begin, end, thread, threads.count, barriers
            )
            for thread in range(threads.count)
        ]

        def open_barriers() -> None:
            """Release every waiting thread: another one will not reach the barrier."""
            barriers[0] = _OPEN

        finite = all(threads.map(jobs, open_barriers))
        self.arenas.give_back(arena)
        return finite

    def time_operations(self, external: Any, *, budget: float) -> list[float]:
        """Return the seconds of each operation, for one image or one group, on one thread.

        Each operation is timed for about ``budget`` seconds, on the tensors of a complete run.
        """
        arena = self.arenas.borrow()
        try:
            self._call(arena, external, 0, self.program.group, 0, 1, _NO_BARRIERS)
            return [
                _time_operation(self.program, i, arena, external, budget)
                for i in range(len(self.program.table))
            ]
        finally:
            self.arenas.give_back(arena)

    def _call(
        self,
        arena: Any,
        external: Any,
        begin: int,
        end: int,
        thread: int,
        threads: int,
        barriers: Any,
    ) -> bool:
        p = self.program
        finite: bool = run(
            p.table, p.limits, p.ungrouped, arena, p.longs, p.offsets, p.values, p.constants,
            p.position_bits, external, begin, end, p.group, thread, threads, barriers,
        )  # fmt: skip
        return finite


def _time_operation(program: Program, i: int, arena: Any, external: Any, budget: float) -> float:
    """Return the shortest time of one operation, from tables that repeat it."""
    p = program

    def seconds(times: int) -> float:
        table, limits = (np.repeat(a[i : i + 1], times, axis=0) for a in (p.table, p.limits))
        started = time.thread_time()
        run(
            table, limits, 0, arena, p.longs, p.offsets, p.values, p.constants,
            p.position_bits, external, 0, 1, 1, 0, 1, _NO_BARRIERS,
        )  # fmt: skip
        return time.thread_time() - started

    empty = min(seconds(0) for _ in range(3))
    once = max(seconds(1) - empty, 1e-7)
    times = max(1, min(1000, int(budget / 4 / once)))
    return max(0.0, min(seconds(times) for _ in range(3)) - empty) / times


class Tensors(ABC):
    """The tensors around the kernels, of PyTorch or of NumPy. All are float32 on the CPU."""

    @abstractmethod
    def contiguous(self, tensor: Any) -> Any:
        """Return the tensor, or a copy of it, with its elements in order in memory."""

    @abstractmethod
    def address(self, tensor: Any) -> int:
        """Return where the first element is in memory."""

    @abstractmethod
    def empty(self, shape: Sequence[int]) -> Any:
        """Return a tensor of unspecified content."""


class KernelStep:
    """A step on the kernels, with a program for single images and optionally one for groups."""

    def __init__(
        self,
        step: Step,
        single: Program,
        grouped: Program | None,
        threads: Threads,
        tensors: Tensors,
        *,
        undivided: bool = False,
    ) -> None:
        self.step = step
        self.single = Runner(single)
        self.grouped = Runner(grouped) if grouped is not None else None
        self.threads, self.tensors = threads, tensors
        # Whether one thread computes a layer if there are not enough images for all threads.
        self.undivided = undivided
        self._names = [external.name for external in step.inputs]
        # Shapes of the inputs of the last call, its number of images, and shapes of its outputs.
        self._sizes: tuple[list[Any], int, list[tuple[int, ...]]] = ([], 0, [])

    def __call__(self, values: dict[str, Any]) -> bool:
        """Compute the step's outputs and add them to the values; return whether all are finite.

        If not, the results differ from PyTorch's: a kernel skips zeros, and 0 · ∞ is NaN.
        """
        tensors = self.tensors
        inputs = [tensors.contiguous(values[name]) for name in self._names]
        images, shapes = self._images_and_shapes(inputs)
        outputs = [tensors.empty(shape) for shape in shapes]
        addresses = [tensors.address(tensor) for tensor in (*inputs, *outputs)]
        finite = self._compute(np.array(addresses, np.int64), images)
        for external, tensor in zip(self.step.outputs, outputs, strict=True):
            values[external.name] = tensor
        return finite

    def _images_and_shapes(self, inputs: list[Any]) -> tuple[int, list[tuple[int, ...]]]:
        """Return the number of images and the shapes of the outputs. Raise if sizes do not match.

        The results for the shapes of the last call are kept: finding them takes longer than a small
        layer.
        """
        given = [tensor.shape for tensor in inputs]
        known, images, shapes = self._sizes  # read once: other threads may replace it
        if given != known:
            leading = inputs[0].shape[: len(self.step.inputs[0].form.leading)]
            images = prod(leading)
            self._check(inputs, images)
            shapes = [(*leading, *external.trailing) for external in self.step.outputs]
            self._sizes = given, images, shapes
        return images, shapes

    def has_few_images(self, values: Mapping[str, Any]) -> bool:
        """Return whether there are too few images in these values to divide them among threads."""
        first = self.step.inputs[0]
        images = prod(values[first.name].shape[: len(first.form.leading)])
        group = self.grouped.program.group if self.grouped is not None else 1
        counts = [images // group] if group > 1 and images >= group else []
        counts += [images % group if group > 1 else images]
        return any(count and not self._has_enough(count) for count in counts)

    def _has_enough(self, images: int) -> bool:
        """Return whether all threads get about the same number of images or groups."""
        return images >= 2 * self.threads.count or images == self.threads.count

    def _check(self, inputs: list[Any], images: int) -> None:
        """Raise if sizes do not match: compiled code would read past the end of a tensor."""
        for tensor, external in zip(inputs, self.step.inputs, strict=True):
            if prod(tensor.shape) != images * external.form.size:
                found = ", ".join("×".join(map(str, other.shape)) for other in inputs)
                raise InputError(
                    "the sizes of the inputs do not match each other as those of the example did; "
                    f"they lead to tensors of {found}."
                )

    def _compute(self, external: Any, images: int) -> bool:
        group = self.grouped.program.group if self.grouped is not None else 1
        in_groups = images // group * group if self.grouped is not None else 0
        finite = True
        if self.grouped is not None and in_groups:
            finite = self._share(self.grouped, external, 0, in_groups, group)
        if in_groups < images:
            finite = self._share(self.single, external, in_groups, images, 1) and finite
        return finite

    def _share(self, runner: Runner, external: Any, begin: int, end: int, group: int) -> bool:
        """Divide the images among threads if there are enough, otherwise each layer."""
        count = self.threads.count
        groups = (end - begin) // group
        if count == 1:
            return runner.run(external, begin, end)
        if self._has_enough(groups):
            bounds = [begin + groups * k // count * group for k in range(count + 1)]
            jobs = [
                lambda first=first, last=last: runner.run(external, first, last)
                for first, last in pairwise(bounds)
            ]
            return all(self.threads.map(jobs))
        # If the threads are not free, another call uses them.
        if self.undivided or not self.threads.together.acquire(blocking=False):
            return runner.run(external, begin, end)
        try:
            return runner.run_together(external, begin, end, self.threads)
        finally:
            self.threads.together.release()
