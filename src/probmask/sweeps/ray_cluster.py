"""The runs of a sweep on a Ray cluster; what comes of them is brought to this machine."""

import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probmask.errors import InputError
from probmask.files import write_atomically
from probmask.sweeps.local_processes import available_cores, with_threads
from probmask.sweeps.sweep_directory import Job, SweepDirectory
from probmask.sweeps.sweep_progress import Board
from probmask.sweeps.training_process import Request, execute
from probmask.training.config import TrainConfig, to_table
from probmask.training.run_directory import RunDirectory

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_ANSWER = 10.0
_PORTS = 65536
# What of a run's directory is brought home; the record last, as it says that the run is finished.
_FILES = ("config.toml", "metrics.jsonl", "model.safetensors", "record.json")


def run_on_ray(
    jobs: Sequence[Job], directory: SweepDirectory, board: Board, *, ray: Any, parallel: int | None
) -> None:
    """Train the jobs as tasks of the cluster that ``ray`` is connected to.

    ``parallel`` shares the cores of a local cluster; on another the scheduler decides how many run
    at once, each on as many cores as it has threads. A run is trained in a directory of the node it
    is on (~/.cache/probmask/ray), and goes on from its checkpoint if it comes there again.
    """
    _Cluster(ray, directory, board, parallel).run(jobs)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster at ``address``, or to one of this machine ("local")."""
    _refuse_silent(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # or it would call home
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray: Any = importlib.import_module("ray")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address == "local":
            ray.init(address="local", include_dashboard=False, num_cpus=available_cores(), **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise _unreachable(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()  # the tasks of a driver that is gone are ended


def _refuse_silent(address: str) -> None:
    """Knock at the address: Ray itself would wait for minutes, and write a log meanwhile."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal() and int(port) < _PORTS):
        return  # "local", "auto", or a name that is Ray's to judge
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_ANSWER).close()
    except (OSError, UnicodeError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split()).rstrip(".")
    return InputError(
        f"--ray {address}: cannot be reached: {reason}; pass the address of a running cluster, "
        "or 'local'."
    )


class _Cluster:
    """The tasks at work, and what they tell."""

    def __init__(
        self, ray: Any, directory: SweepDirectory, board: Board, parallel: int | None
    ) -> None:
        self._ray, self._directory, self._board = ray, directory, board
        self._threads = max(1, available_cores() // parallel) if parallel else 1
        self._notes = ray.remote(num_cpus=0)(_Notes).remote()

    def run(self, jobs: Sequence[Job]) -> None:
        pending = {self._submit(job): job for job in jobs}
        while pending:
            done, _ = self._ray.wait(list(pending), timeout=_SECONDS_BETWEEN_LOOKS)
            self._show(pending.values())
            for task in done:
                self._end(pending.pop(task), task)

    def _submit(self, job: Job) -> Any:
        config = with_threads(job.planned.config, self._threads)
        resources = wanted_resources(config, self._ray.cluster_resources())
        task = self._ray.remote(**resources, max_retries=0)(train_there)
        return task.remote(job.planned.name, job.planned.identity, to_table(config), self._notes)

    def _show(self, jobs: Any) -> None:
        notes = self._ray.get(self._notes.read.remote())
        for job in jobs:
            name = job.planned.name
            if name in notes:
                if name not in self._board.running:
                    self._board.start(name, resumed=notes[name].get("resumed", False))
                if notes[name]["kind"] == "status":
                    self._board.show(name, notes[name])

    def _end(self, job: Job, task: Any) -> None:
        planned = job.planned
        if planned.name not in self._board.running:
            self._board.start(planned.name, resumed=False)
        try:
            came: Mapping[str, Any] = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            came = {"reason": f"Ray: {' '.join(str(error).split())}"}
        if "reason" in came:
            self._directory.put_failure(planned, came["reason"])
            self._board.fail(planned.name, came["reason"])
            return
        self._bring_home(RunDirectory(job.directory), came["files"])
        self._board.finish(planned.name, self._directory.put_record(planned))

    def _bring_home(self, run: RunDirectory, files: Mapping[str, bytes]) -> None:
        run.path.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            write_atomically(run.path / name, files[name], overwrite=True)
        run.checkpoint.unlink(missing_ok=True)  # of an earlier beginning on this machine


class _Notes:
    """What runs tell, kept where the sweep can read it."""

    def __init__(self) -> None:
        self._last: dict[str, Mapping[str, Any]] = {}

    def write(self, name: str, message: Mapping[str, Any]) -> None:
        """Note the last word of a run."""
        self._last[name] = message

    def read(self) -> dict[str, Mapping[str, Any]]:
        """The last word of every run."""
        return self._last


def train_there(name: str, identity: str, config: Mapping[str, Any], notes: Any) -> dict[str, Any]:
    """Train on the node that the task has come to; return the files of the run, or the reason."""
    place = Path.home() / ".cache" / "probmask" / "ray" / identity
    directory = RunDirectory(place)
    resume = directory.config.exists()
    last: dict[str, Any] = {}
    tell = _teller(name, notes, last)
    tell({"kind": "started", "resumed": resume})
    if not directory.finished:
        execute(Request(str(place), resume, config), tell)
    if "reason" in last:
        return {"reason": str(last["reason"])}
    return {"files": {file: (place / file).read_bytes() for file in _FILES}}


def _teller(name: str, notes: Any, last: dict[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    seen = [0.0]

    def tell(message: Mapping[str, Any]) -> None:
        last.clear()
        last.update(message)
        now = time.monotonic()
        if message["kind"] != "status" or now - seen[0] >= _SECONDS_BETWEEN_LOOKS:
            seen[0] = now
            notes.write.remote(name, dict(message))

    return tell


def wanted_resources(config: TrainConfig, there: Mapping[str, float]) -> dict[str, Any]:
    """What Ray sets aside for a run: its threads, and GPUs if it is to have or can have them."""
    wanted: dict[str, Any] = {"num_cpus": config.threads}
    if config.accelerator in ("cuda", "gpu") or (
        config.accelerator == "auto" and there.get("GPU", 0) >= config.devices
    ):
        wanted["num_gpus"] = config.devices
    return wanted
