"""Run a step on the compiled kernels: arenas, threads, and the tensors around it."""

import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from probmask.errors import InputError
from probmask.runtime.kernels.driver import run
from probmask.runtime.plan.program import Program
from probmask.runtime.plan.steps import Step
from probmask.runtime.run.threads import Threads

_LINE = 64  # bytes


# More than any number of threads will ever have come to meetings.
_OVER = 1 << 60


class DoubtError(Exception):
    """Something is not finite: skipping zeros is then not what PyTorch does."""


class Arenas:
    """Arenas of one program; each call borrows one, so that calls do not disturb each other."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Any] = []  # taking and adding are one step each: no lock to be held

    def borrow(self) -> Any:
        """One that nobody uses, with zeros wherever padding is."""
        try:
            return self._free.pop()
        except IndexError:
            return self._new()

    def give_back(self, arena: Any) -> None:
        """To the next call."""
        self._free.append(arena)

    def _new(self) -> Any:
        raw = np.zeros(self._size + _LINE // 4, np.float32)
        skip = -raw.ctypes.data % _LINE // 4
        return raw[skip : skip + self._size]


class Runner:
    """A program and what it needs to run."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.arenas = Arenas(program.arena_size)

    def run(self, outside: Any, begin: int, end: int) -> bool:
        """Compute images on this thread; whether all numbers were finite."""
        arena = self.arenas.borrow()
        try:
            return self._call(arena, outside, begin, end, 0, 1, np.zeros(8, np.int64))
        finally:
            self.arenas.give_back(arena)

    def run_together(self, outside: Any, begin: int, end: int, threads: Threads) -> bool:
        """Compute images with all threads on each layer."""
        arena = self.arenas.borrow()
        meetings = np.zeros(8, np.int64)
        work = [
            lambda thread=thread: self._call(
                arena, outside, begin, end, thread, threads.count, meetings
            )
            for thread in range(threads.count)
        ]

        def let_go() -> None:
            """Nobody waits for who will never come: all meetings are over."""
            meetings[0] = _OVER

        fine = all(threads.map(work, let_go))
        self.arenas.give_back(arena)
        return fine

    def time_operations(self, outside: Any, *, budget: float) -> list[float]:
        """Seconds of each operation, for one image or one group; each is given ``budget`` seconds.

        Each is measured by itself on the tensors that a whole run left, with one thread.
        """
        arena = self.arenas.borrow()
        nobody = np.zeros(8, np.int64)
        try:
            self._call(arena, outside, 0, self.program.group, 0, 1, nobody)
            return [
                _time_one(self.program, i, arena, outside, nobody, budget)
                for i in range(len(self.program.table))
            ]
        finally:
            self.arenas.give_back(arena)

    def _call(
        self,
        arena: Any,
        outside: Any,
        begin: int,
        end: int,
        thread: int,
        threads: int,
        meetings: Any,
    ) -> bool:
        p = self.program
        fine: bool = run(
            p.table, p.limits, p.lone, arena, p.longs, p.offsets, p.values, p.constants, p.masks,
            outside, begin, end, p.group, thread, threads, meetings,
        )  # fmt: skip
        return fine


def _time_one(
    program: Program, i: int, arena: Any, outside: Any, nobody: Any, budget: float
) -> float:
    """The shortest of several runs of one operation, in a table that repeats it."""
    p = program

    def seconds(times: int) -> float:
        table, limits = (np.repeat(a[i : i + 1], times, axis=0) for a in (p.table, p.limits))
        started = time.thread_time()
        run(
            table, limits, 0, arena, p.longs, p.offsets, p.values, p.constants, p.masks,
            outside, 0, 1, 1, 0, 1, nobody,
        )  # fmt: skip
        return time.thread_time() - started

    empty = min(seconds(0) for _ in range(3))
    once = max(seconds(1) - empty, 1e-7)
    times = max(1, min(1000, int(budget / 4 / once)))
    return max(0.0, min(seconds(times) for _ in range(3)) - empty) / times


class NativeStep:
    """A step with a program for single images, and perhaps one for groups of images."""

    def __init__(
        self, step: Step, single: Program, grouped: Program | None, threads: Threads
    ) -> None:
        self.step = step
        self.single = Runner(single)
        self.grouped = Runner(grouped) if grouped is not None else None
        self.threads = threads

    def __call__(self, values: dict[str, Any]) -> None:
        """Compute the step's outputs and put them to the values."""
        inputs = [values[outside.name].contiguous() for outside in self.step.inputs]
        lead = inputs[0].shape[: len(self.step.inputs[0].form.unit)]
        images = lead.numel()
        self._check(inputs, images)
        outputs = [
            torch.empty(*lead, *outside.tail, dtype=torch.float32, device="cpu")
            for outside in self.step.outputs
        ]
        addresses = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
        if not self._compute(np.array(addresses, np.int64), images):
            raise DoubtError
        for outside, tensor in zip(self.step.outputs, outputs, strict=True):
            values[outside.name] = tensor

    def _check(self, inputs: list[Any], images: int) -> None:
        """Refuse sizes that do not go together before compiled code reads what is not there."""
        for tensor, outside in zip(inputs, self.step.inputs, strict=True):
            if tensor.numel() != images * outside.form.size:
                found = ", ".join("×".join(map(str, other.shape)) for other in inputs)
                raise InputError(
                    f"the network was compiled for inputs whose sizes go together; these lead to "
                    f"tensors of {found}."
                )

    def _compute(self, outside: Any, images: int) -> bool:
        group = self.grouped.program.group if self.grouped is not None else 1
        in_groups = images // group * group if self.grouped is not None else 0
        fine = True
        if self.grouped is not None and in_groups:
            fine = self._share(self.grouped, outside, 0, in_groups, group)
        if in_groups < images:
            fine = self._share(self.single, outside, in_groups, images, 1) and fine
        return fine

    def _share(self, runner: Runner, outside: Any, begin: int, end: int, group: int) -> bool:
        """Divide images among threads if there are enough, or else each layer of an image."""
        count = self.threads.count
        groups = (end - begin) // group
        if count == 1:
            return runner.run(outside, begin, end)
        if groups >= 2 * count or groups == count:
            bounds = [begin + groups * k // count * group for k in range(count + 1)]
            work = [
                lambda first=first, last=last: runner.run(outside, first, last)
                for first, last in pairwise(bounds)
            ]
            return all(self.threads.map(work))
        if not self.threads.together.acquire(blocking=False):
            return runner.run(outside, begin, end)  # another call has the threads
        try:
            return runner.run_together(outside, begin, end, self.threads)
        finally:
            self.threads.together.release()
