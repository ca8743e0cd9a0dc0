"""Threads that compiled code runs on: in a forked child as well, and after an interrupt."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Seconds between two looks at whether others have finished, after an interrupt.
_LOOK = 1e-4


class Threads:
    """Threads that compiled code runs on; one call at a time shares its layers among them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None
        self._renew()

    @property
    def together(self) -> Any:
        """The lock of the one call that shares its layers.

        An interrupt can leave it locked. The thread that was interrupted gets it all the same:
        it cannot be in two calls at once.
        """
        self._check_process()
        return self._together

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads beside the caller's."""
        self._check_process()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(1, self.count - 1), "probmask")
        return self._pool

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
            others = [self.pool.submit(job) for job in jobs]
            return [bool(work[0]()), *(bool(other.result()) for other in others)]
        except BaseException:
            _stop(jobs, let_go)
            raise

    def _check_process(self) -> None:
        """Threads do not survive a fork, nor does anybody unlock what they had locked."""
        if self._process != os.getpid():
            self._renew()

    def _renew(self) -> None:
        self._together = threading.RLock()
        self._pool = None
        self._process = os.getpid()


class _Job:
    """Work that can be called off until it begins."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.begun = self.ended = self.called_off = False

    def __call__(self) -> bool:
        self.begun = True  # before looking: who calls off looks the other way round
        try:
            return not self.called_off and bool(self.function())
        finally:
            self.ended = True


def _stop(jobs: Sequence[_Job], let_go: Callable[[], None]) -> None:
    """Call off what has not begun and wait for the rest, however often it is interrupted."""
    while True:
        try:
            for job in jobs:
                job.called_off = True
            let_go()
            while any(job.begun and not job.ended for job in jobs):
                time.sleep(_LOOK)
            return
        except KeyboardInterrupt:
            continue
