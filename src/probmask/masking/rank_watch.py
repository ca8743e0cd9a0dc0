"""Detect ranks that no longer respond, while the others wait for their messages.

A rank that is stopped, swapped out or cut off from the network sends nothing. The other ranks wait
for it inside a message, where Python cannot act. Each rank therefore runs a thread that increments
a counter in the store of the process group and reads the counter of the next rank. A rank that sees
no progress for too long names the other in one line, and all of them end.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import distributed

from probmask.checks import check_within
from probmask.errors import RankLostError
from probmask.masking.distributed import rank, several_ranks, world_size

_LEFT = 1 << 40  # added to the counter of a rank that has ended its watch without an error
_FAILED = 1  # exit code
_ADVICE = "it has ended, is stopped, or is cut off from the network."


def watch_ranks(timeout_seconds: float) -> "RankWatch":
    """Return a context manager that ends this process if another rank does not respond.

    Without it, the other ranks wait for the timeout of ``init_process_group``, 30 minutes by
    default, and the error does not name the rank. All ranks enter and leave it together. A
    single process is not watched.

    Args:
        timeout_seconds: How long a rank may show no sign of life. Choose more than the longest time
            for which your code keeps Python's interpreter lock, such as a compilation.

    Returns:
        The context manager. It raises `RankLostError` in place of the error of a message that
        failed, and ends the process if a message waits.

    Raises:
        InputError: If ``timeout_seconds`` is below 1.

    Example:
        >>> with probmask.watch_ranks(timeout_seconds=60):
        ...     pass  # train
    """
    check_within("watch_ranks", "timeout_seconds", timeout_seconds, 1, 1e9, meaning="seconds")
    return RankWatch(timeout_seconds, end_process)


def end_process(message: str) -> None:
    """Print a message, unless it is empty, and end this process even if it is blocked."""
    if message:
        print(f"probmask: {message}", file=sys.stderr, flush=True)
    os._exit(_FAILED)


class RankWatch:
    """The watch of one rank; see `watch_ranks`.

    Args:
        timeout: Seconds without a sign of life.
        end: Called with a message, from a thread other than the training thread. The message is
            empty on ranks that need not print it. The process must end soon.
    """

    def __init__(self, timeout: float, end: Callable[[str], None]) -> None:
        self._timeout, self._end = timeout, end
        self._interval = min(max(timeout / 10, 0.1), 1.0)
        self._left = threading.Event()
        self._failed = False  # whether this rank leaves with an error
        self._answered = time.monotonic()  # when the store has last answered
        self._store: Any = None

    def __enter__(self) -> Self:
        if several_ranks():
            # Its own connection: the main thread may be waiting for an answer on the other one.
            self._store = distributed.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
            entered = self._store.add(f"probmask/watch/{rank()}", 1)  # the same on all ranks
            self._prefix = f"probmask/watch/{entered}"
            self._threads = [
                threading.Thread(target=task, daemon=True)
                for task in (self._beat, self._watch_store)
            ]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._store is None or self._left.is_set():
            return
        self._failed = error is not None
        failed = _failed_message(error)
        lost = None if failed is None else self._explanation(failed)
        self._left.set()
        for thread in self._threads:
            thread.join(self._interval)
        if lost is not None:
            raise lost from error

    def _beat(self) -> None:
        following = (rank() + 1) % world_size()
        count, since = -1, time.monotonic()
        try:
            while not self._left.wait(self._interval):
                self._store.add(self._key(rank()), 1)
                found = self._store.add(self._key(following), 0)
                reported = self._store.add(f"{self._prefix}/lost", 0)
                now = self._answered = time.monotonic()
                if found != count or found >= _LEFT:
                    count, since = found, now
                if reported:
                    self._stop("")
                elif now - since > self._timeout and self._is_first_report():
                    self._stop(self._text(following))
            if not self._failed:  # otherwise the others may still wait for this rank
                self._store.add(self._key(rank()), _LEFT)
        except (RuntimeError, distributed.DistError):
            pass  # `_watch_store` reports it, unless this rank leaves before

    def _watch_store(self) -> None:
        while not self._left.wait(self._interval):
            if time.monotonic() - self._answered > self._timeout:
                self._stop(self._text(0, "its host runs the store that all ranks use; "))

    def _stop(self, message: str) -> None:
        if not self._left.is_set():
            self._left.set()
            self._end(message)

    def _is_first_report(self) -> bool:
        return int(self._store.add(f"{self._prefix}/lost", 1)) == 1

    def _key(self, of: int) -> str:
        return f"{self._prefix}/{of}"

    def _text(self, lost: int, reason: str = "") -> str:
        return (
            f"rank {lost} has not responded to rank {rank()} for {self._timeout:g} seconds: "
            f"{reason}{_ADVICE}"
        )

    def _explanation(self, error: BaseException) -> RankLostError | None:
        """Return an error that names the ranks without a sign of life during three intervals.

        Return None if all of them respond: then the error has another cause.
        """
        try:
            before = self._counts()
            time.sleep(3 * self._interval)
            after = self._counts()
            silent = [
                each
                for each, (old, new) in enumerate(zip(before, after, strict=True))
                if old == new and each != rank()
            ]
            if not silent:
                return None
            self._left.set()  # before the report, which would end this rank without a message
            first = self._is_first_report()
        except (RuntimeError, distributed.DistError):  # rank 0 has the store
            silent, first = [0], True
        names = ", ".join(map(str, silent))
        ranks = f"rank {names} does" if len(silent) < 2 else f"ranks {names} do"
        line = str(error).strip().partition("\n")[0]
        cause = line.rpartition("] ")[2].partition(". ")[0]  # without the place in the source code
        return RankLostError(
            f"{ranks} not respond to rank {rank()}: {_ADVICE} ({cause})", first=first
        )

    def _counts(self) -> list[int]:
        return [int(self._store.add(self._key(each), 0)) for each in range(world_size())]


def _failed_message(error: BaseException | None) -> BaseException | None:
    """Return the error of a message that was not sent or received, if it is one or caused this one.

    Reading a checkpoint sends messages too, and its errors have those of PyTorch as causes.
    """
    while error is not None and not _is_lost_connection(error):
        error = error.__cause__
    return error


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether PyTorch reports that a message has not been sent or received."""
    if isinstance(error, distributed.DistError):
        return True
    words = ("connection", "timed out", "timeout", "socket", "gloo", "nccl")
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in words)
