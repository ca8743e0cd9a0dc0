"""Threads that compiled code runs on: in a forked child as well, and after an interrupt."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class Threads:
    """Threads that compiled code runs on; one call at a time shares its layers among them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._workers: _Workers | None = None
        self._renew()

    @property
    def together(self) -> Any:
        """The lock of the one call that shares its layers.

        An interrupt can leave it locked. The thread that was interrupted gets it all the same:
        it cannot be in two calls at once.
        """
        self._check_process()
        return self._together

    def map(
        self, work: Sequence[Callable[[], Any]], let_go: Callable[[], None] = lambda: None
    ) -> list[bool]:
        """Run all, the first on this thread; what each returns.

        On an interrupt nothing is left running: what has begun ends before the exception goes on,
        as it writes to memory that would be given to others. ``let_go`` ends all waiting for work
        that will then never begin.
        """
        jobs = [_Job(function) for function in work[1:]]
        try:
            workers = self._other_threads()
            for job in jobs:
                workers.queue.put(job)
            return [bool(work[0]()), *(job.result() for job in jobs)]
        except BaseException:
            _stop(jobs, let_go)
            raise

    def _other_threads(self) -> "_Workers":
        self._check_process()
        if self._workers is None:
            self._workers = _Workers(max(1, self.count - 1))
        return self._workers

    def _check_process(self) -> None:
        """Threads do not survive a fork, nor does anybody unlock what they had locked."""
        if self._process != os.getpid():
            self._renew()

    def _renew(self) -> None:
        self._together = threading.RLock()
        self._workers = None
        self._process = os.getpid()


class _Workers:
    """Threads that take jobs from a queue until nobody can give them any more.

    Not an executor: that waits in Python code, which an interrupt leaves half done. Queue and locks
    here are waited for in C.
    """

    def __init__(self, count: int) -> None:
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()
        for _ in range(count):
            threading.Thread(target=_work, args=(self.queue,), name="probmask", daemon=True).start()
        weakref.finalize(self, _dismiss, self.queue, count)


def _work(queue: "SimpleQueue[_Job | None]") -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # and with it what it computes on, while there is nothing to do


def _dismiss(queue: "SimpleQueue[_Job | None]", count: int) -> None:
    for _ in range(count):
        queue.put(None)


class _Job:
    """Work that can be called off until it begins; one thread waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._running = threading.Lock()  # held until it has ended
        self._running.acquire()
        self._begun = self._ended = self._called_off = False
        self._returned: bool | BaseException = False

    def __call__(self) -> None:
        self._begun = True  # before looking: who calls off looks the other way round
        try:
            self._returned = not self._called_off and bool(self._function())
        except BaseException as error:
            self._returned = error
        self._ended = True
        self._running.release()

    def result(self) -> bool:
        """What it returned or raised, once it has."""
        self._wait()
        if isinstance(self._returned, BaseException):
            raise self._returned
        return self._returned

    def call_off(self) -> None:
        """Have it end at once, unless it has begun."""
        self._called_off = True

    def wait_if_begun(self) -> None:
        """Until it has ended; what was called off before may still wait in the queue, or never."""
        if self._begun:
            self._wait()

    def _wait(self) -> None:
        # The lock is not given back: an interrupt might come in between.
        if not self._ended:
            self._running.acquire()


def _stop(jobs: Sequence[_Job], let_go: Callable[[], None]) -> None:
    """Call off what has not begun and wait for the rest, however often it is interrupted."""
    while True:
        try:
            for job in jobs:
                job.call_off()
            let_go()
            for job in jobs:
                job.wait_if_begun()
            return
        except KeyboardInterrupt:
            continue
