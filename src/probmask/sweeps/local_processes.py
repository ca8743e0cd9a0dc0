"""Training the runs of a sweep in parallel processes of this machine.

The processes are managed here and not by `concurrent.futures`, because every run needs its own
environment variables and log, and must end when the sweep is killed.
"""

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

from probmask.launch import available_cores
from probmask.sweeps.sweep_directory import Job, SweepDirectory
from probmask.sweeps.sweep_progress import SweepProgress
from probmask.sweeps.training_process import Request
from probmask.training.config import TrainConfig, to_table

_SECONDS_TO_STOP = 20.0
# The libraries that start their own threads read one of these.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LOG_TAIL = 4096  # bytes


def run_locally(
    jobs: Sequence[Job], directory: SweepDirectory, progress: SweepProgress, *, parallel: int
) -> None:
    """Train the jobs, ``parallel`` at a time; each process gets an equal share of the cores.

    No training process outlives this call, however it ends.
    """
    _Pool(directory, progress, parallel).run(jobs)


@dataclass
class _Process:
    """A training process, its job, and the last message that was not a status."""

    job: Job
    slot: int
    process: subprocess.Popen[str]
    log: Path
    outcome: Mapping[str, Any] | None = None


class _Pool:
    """The running training processes and their messages."""

    def __init__(self, directory: SweepDirectory, progress: SweepProgress, parallel: int) -> None:
        self._directory, self._progress = directory, progress
        self._threads = max(1, available_cores() // parallel)
        self._free_slots = list(range(parallel))
        self._running: dict[int, _Process] = {}
        # None in place of a message: the process has ended.
        self._messages: queue.SimpleQueue[tuple[_Process, Mapping[str, Any] | None]] = (
            queue.SimpleQueue()
        )

    def run(self, jobs: Sequence[Job]) -> None:
        waiting = list(reversed(jobs))
        try:
            while waiting or self._running:
                while waiting and self._free_slots:
                    self._start(waiting.pop(), self._free_slots.pop(0))
                with suppress(queue.Empty):
                    # With a timeout, because Ctrl-C does not interrupt an endless wait everywhere.
                    self._handle(*self._messages.get(timeout=0.5))
        finally:
            self._stop()

    def _start(self, job: Job, slot: int) -> None:
        name = job.planned.name
        config = with_threads(job.planned.config, self._threads)
        log = self._directory.logs / f"{name}.log"
        request = Request(str(job.directory), job.resume, to_table(config))
        with log.open("a", encoding="utf-8") as errors:
            process = subprocess.Popen(  # noqa: S603 (our own module, no shell)
                [sys.executable, "-P", "-m", "probmask.sweeps.training_process", request.to_text()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=environment(os.environ, slot, config),
                start_new_session=True,  # Ctrl-C reaches only the sweep, which stops the processes
            )
        started = _Process(job, slot, process, log)
        self._running[process.pid] = started
        self._directory.remove_failure(job.planned)
        self._progress.start(name, resumed=job.resume)
        threading.Thread(target=self._listen, args=(started,), daemon=True).start()

    def _listen(self, running: _Process) -> None:
        assert running.process.stdout is not None
        with running.process.stdout as lines:
            for message in _parse_messages(lines):
                self._messages.put((running, message))
        running.process.wait()
        self._messages.put((running, None))

    def _handle(self, running: _Process, message: Mapping[str, Any] | None) -> None:
        if message is None:
            self._end(running)
        elif message["kind"] == "status":
            self._progress.update(running.job.planned.name, message)
        else:
            running.outcome = message

    def _end(self, ended: _Process) -> None:
        planned = ended.job.planned
        del self._running[ended.process.pid]
        self._free_slots.append(ended.slot)
        _close_input(ended)
        if ended.outcome is not None and ended.outcome["kind"] == "finished":
            self._progress.finish(planned.name, self._directory.write_record(planned))
            return
        reason = ended.outcome["reason"] if ended.outcome else _exit_reason(ended)
        self._directory.write_failure(planned, reason)
        self._progress.fail(planned.name, reason)

    def _stop(self) -> None:
        """Stop all running processes; their checkpoints stay."""
        for running in self._running.values():
            _close_input(running)  # tells the process to stop
        deadline = time.monotonic() + _SECONDS_TO_STOP
        for running in self._running.values():
            try:
                running.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        self._running.clear()


def with_threads(config: TrainConfig, threads: int) -> TrainConfig:
    """Return the configuration, with ``threads`` filled in if it sets no number of threads."""
    return config if config.threads is not None else replace(config, threads=threads)


def environment(
    inherited: Mapping[str, str], slot: int, config: TrainConfig, gpus: Sequence[str] | None = None
) -> dict[str, str]:
    """Return the environment variables of a training process: its threads and its GPU.

    If there are several GPUs, slots get them in turn. A run on several devices sees all GPUs.

    Args:
        inherited: Variables of this process.
        slot: Index of the process among those that run in parallel.
        config: Configuration of the run, with its number of threads.
        gpus: Names of the GPUs; the default is those that ``inherited`` makes visible.
    """
    threads = str(config.threads)
    variables = {**inherited, **dict.fromkeys(_THREAD_VARIABLES, threads)}
    gpus = available_gpus(inherited) if gpus is None else gpus
    if len(gpus) > 1 and config.devices == 1:
        variables["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return variables


def available_gpus(variables: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs, as CUDA_VISIBLE_DEVICES lists them."""
    if "CUDA_VISIBLE_DEVICES" in variables:
        return [name for name in variables["CUDA_VISIBLE_DEVICES"].split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def _parse_messages(lines: IO[str]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:  # incomplete, because the process was killed
            continue


def _close_input(running: _Process) -> None:
    assert running.process.stdin is not None
    with suppress(OSError):  # the process has ended
        running.process.stdin.close()


def _exit_reason(ended: _Process) -> str:
    """Return why a process ended that sent no reason."""
    code = ended.process.returncode
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name} (out of memory?)"
    with ended.log.open("rb") as file:
        file.seek(max(0, ended.log.stat().st_size - _LOG_TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "(empty)")
    return f"exited with code {code}; the last line of its log: {last}"
