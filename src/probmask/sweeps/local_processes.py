"""The runs of a sweep in parallel processes of this machine."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from probmask.sweeps.sweep_directory import Job, SweepDirectory
from probmask.sweeps.sweep_progress import Board
from probmask.sweeps.training_process import Request
from probmask.training.config import TrainConfig, to_table

_GRACE_SECONDS = 20.0
# All libraries that bring threads of their own ask one of these.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LOG_TAIL = 4096


def run_locally(
    jobs: Sequence[Job], directory: SweepDirectory, board: Board, *, parallel: int
) -> None:
    """Train the jobs, ``parallel`` at a time, each on its share of the cores.

    However this ends, no training outlives it.
    """
    _Pool(directory, board, parallel).run(jobs)


@dataclass
class _Child:
    """A training process: what it trains, and the last word it had."""

    job: Job
    slot: int
    process: subprocess.Popen[str]
    log: Path
    outcome: Mapping[str, Any] | None = None


class _Pool:
    """The processes at work, and what they tell."""

    def __init__(self, directory: SweepDirectory, board: Board, parallel: int) -> None:
        self._directory, self._board = directory, board
        self._threads = max(1, available_cores() // parallel)
        self._free = list(range(parallel))
        self._alive: dict[int, _Child] = {}
        self._told: queue.SimpleQueue[tuple[_Child, Mapping[str, Any] | None]] = queue.SimpleQueue()

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = list(reversed(jobs))
        try:
            while waiting or self._alive:
                while waiting and self._free:
                    self._start(waiting.pop(), self._free.pop(0))
                with suppress(queue.Empty):
                    # Not for ever: on some systems a wait without end cannot be interrupted.
                    self._hear(*self._told.get(timeout=0.5))
        finally:
            self._stop()

    def _start(self, job: Job, slot: int) -> None:
        name = job.planned.name
        config = with_threads(job.planned.config, self._threads)
        log = self._directory.logs / f"{name}.log"
        request = Request(str(job.directory), job.resume, to_table(config))
        with log.open("a", encoding="utf-8") as errors:
            process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
                [sys.executable, "-m", "probmask.sweeps.training_process", request.to_text()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=environment(os.environ, slot, config),
                start_new_session=True,  # an interrupt is ours to pass on
            )
        child = _Child(job, slot, process, log)
        self._alive[process.pid] = child
        self._directory.forget_failure(job.planned)
        self._board.start(name, resumed=job.resume)
        threading.Thread(target=self._listen, args=(child,), daemon=True).start()

    def _listen(self, child: _Child) -> None:
        assert child.process.stdout is not None
        with child.process.stdout as lines:
            for message in _messages(lines):
                self._told.put((child, message))
        child.process.wait()
        self._told.put((child, None))

    def _hear(self, child: _Child, message: Mapping[str, Any] | None) -> None:
        planned = child.job.planned
        if message is None:
            self._end(child)
        elif message["kind"] == "status":
            self._board.show(planned.name, message)
        else:
            child.outcome = message

    def _end(self, child: _Child) -> None:
        planned = child.job.planned
        del self._alive[child.process.pid]
        self._free.append(child.slot)
        _close(child)
        if child.outcome is not None and child.outcome["kind"] == "finished":
            self._board.finish(planned.name, self._directory.put_record(planned))
            return
        reason = child.outcome["reason"] if child.outcome else _last_words(child)
        self._directory.put_failure(planned, reason)
        self._board.fail(planned.name, reason)

    def _stop(self) -> None:
        """End what still trains; its checkpoint stays."""
        for child in self._alive.values():
            _close(child)  # the sign to stop
        end = time.monotonic() + _GRACE_SECONDS
        for child in self._alive.values():
            try:
                child.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._alive.clear()


def with_threads(config: TrainConfig, threads: int) -> TrainConfig:
    """The configuration, with its share of the cores where it does not say how many threads."""
    return config if config.threads is not None else replace(config, threads=threads)


def environment(
    inherited: Mapping[str, str], slot: int, config: TrainConfig, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """The variables for a run: as many threads as it may have, and a GPU of its own if there are.

    Runs take turns on the GPUs when there are more of them; one that asks for several devices sees
    them all.
    """
    threads = str(config.threads)
    found = {**inherited, **dict.fromkeys(_THREAD_VARIABLES, threads)}
    gpus = available_gpus(inherited) if gpus is None else gpus
    if len(gpus) > 1 and config.devices == 1:
        found["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return found


def available_gpus(variables: Mapping[str, str]) -> list[str]:
    """The GPUs by the names that CUDA_VISIBLE_DEVICES takes."""
    if "CUDA_VISIBLE_DEVICES" in variables:
        return [name for name in variables["CUDA_VISIBLE_DEVICES"].split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def available_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _messages(lines: IO[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # torn: its writer was killed
            continue


def _close(child: _Child) -> None:
    assert child.process.stdin is not None
    with suppress(OSError):  # it is gone
        child.process.stdin.close()


def _last_words(child: _Child) -> str:
    """Why a process ended that gave no reason."""
    code = child.process.returncode
    if code < 0:
        try:
            ended = f"ended by {signal.Signals(-code).name}"
        except ValueError:
            ended = f"ended by signal {-code}"
        return f"{ended}, not by itself (out of memory?)"
    with child.log.open("rb") as file:
        file.seek(max(0, child.log.stat().st_size - _LOG_TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    return f"ended with code {code}; its log says: {said}"
