"""Threads for compiled code, which survive forks and interrupts."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from probmask.checks import check_count, check_within

# More than any processor has. Much larger numbers are mistakes, which the system refuses late.
_MOST_THREADS = 1024


def check_threads(caller: str, count: object) -> None:
    """Raise an `InputError` for anything but a number of threads that can be started."""
    check_count(caller, "threads", count, least=1, meaning="a number of threads")
    check_within(caller, "threads", count, 1, _MOST_THREADS, meaning="a number of threads")


class Threads:
    """A pool of threads. One call at a time can share its layers among them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._workers: _Workers | None = None
        self._reset()

    @property
    def together(self) -> Any:
        """The lock of the call that shares its layers.

        An interrupt can leave it locked. The interrupted thread can still acquire it, because it
        cannot be in two calls at once.
        """
        self._check_process()
        return self._together

    def map(
        self, functions: Sequence[Callable[[], Any]], release: Callable[[], None] = lambda: None
    ) -> list[bool]:
        """Call all functions, the first on this thread; return their results.

        On an interrupt, functions that have started finish before the exception propagates, because
        they write to memory that other calls would get. ``release`` has to end their waiting for
        functions that will then never start.
        """
        jobs = [_Job(function) for function in functions[1:]]
        try:
            workers = self._started_workers()
            for job in jobs:
                workers.queue.put(job)
            return [bool(functions[0]()), *(job.result() for job in jobs)]
        except BaseException:
            _stop(jobs, release)
            raise

    def _started_workers(self) -> "_Workers":
        self._check_process()
        if self._workers is None:
            self._workers = _Workers(max(1, self.count - 1))
        return self._workers

    def _check_process(self) -> None:
        """Reset after a fork: the child has no threads, and its locks may be held forever."""
        if self._process != os.getpid():
            self._reset()

    def _reset(self) -> None:
        self._together = threading.RLock()
        self._workers = None
        self._process = os.getpid()


class _Workers:
    """Threads that take jobs from a queue until this object is garbage-collected.

    `ThreadPoolExecutor` is not suitable: it waits in Python code, where an interrupt can leave its
    state inconsistent. The queue and locks used here wait in C.
    """

    def __init__(self, count: int) -> None:
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_work, args=(self.queue,), name="probmask", daemon=True).start()
        weakref.finalize(self, _stop_workers, self.queue, count)


def _work(queue: "SimpleQueue[_Job | None]") -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # free its tensors while waiting for the next job


def _stop_workers(queue: "SimpleQueue[_Job | None]", count: int) -> None:
    for _ in range(count):
        queue.put(None)


class _Job:
    """A function call that can be cancelled until it starts. One thread waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._running = threading.Lock()  # held until the job has finished
        self._running.acquire()
        self._started = self._finished = self._cancelled = False
        self._outcome: bool | BaseException = False

    def __call__(self) -> None:
        # Set before reading `_cancelled`; `_stop` sets that before it reads `_started`.
        self._started = True
        try:
            self._outcome = not self._cancelled and bool(self._function())
        except BaseException as error:
            self._outcome = error
        self._finished = True
        self._running.release()

    def result(self) -> bool:
        """Wait for the job, then return its result or raise its exception."""
        self._wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        """Skip the function, unless it has started."""
        self._cancelled = True

    def wait_if_started(self) -> None:
        """Wait until a started job has finished. A cancelled one may stay in the queue."""
        if self._started:
            self._wait()

    def _wait(self) -> None:
        # The lock is never released again: an interrupt might come in between.
        if not self._finished:
            self._running.acquire()


def _stop(jobs: Sequence[_Job], release: Callable[[], None]) -> None:
    """Cancel the jobs that have not started and wait for the others, despite interrupts."""
    while True:
        try:
            for job in jobs:
                job.cancel()
            release()
            for job in jobs:
                job.wait_if_started()
            return
        except KeyboardInterrupt:
            continue
