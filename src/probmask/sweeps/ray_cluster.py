"""Training the runs of a sweep on a Ray cluster; their files are copied to this machine."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from probmask.files import write_atomically
from probmask.launch import available_cores
from probmask.messages import one_line
from probmask.sweeps.local_processes import with_threads
from probmask.sweeps.sweep_directory import Job, SweepDirectory
from probmask.sweeps.sweep_progress import SweepProgress
from probmask.sweeps.training_process import Request, execute
from probmask.training.config import TrainConfig, own_code, to_table
from probmask.training.run_directory import RunDirectory
from probmask.training.trusted_runs import remember_run

_SECONDS_BETWEEN_POLLS = 0.5
# Files of a run that are copied. The record is last, because it marks the run as finished.
_FILES = ("config.toml", "metrics.jsonl", "model.safetensors", "record.json")


def run_on_ray(
    jobs: Sequence[Job],
    directory: SweepDirectory,
    progress: SweepProgress,
    *,
    ray: Any,
    parallel: int | None,
) -> None:
    """Train the jobs as tasks of a Ray cluster.

    A task trains in a directory of its node (~/.cache/probmask/ray). If the run is scheduled on the
    same node again, it continues from its checkpoint there.

    Args:
        jobs: The runs to train.
        directory: Directory of the sweep.
        progress: Progress of the sweep.
        ray: The module ``ray``, connected to a cluster.
        parallel: Number of tasks that share the cores of a local cluster. None on other clusters,
            where Ray's scheduler decides, and each task gets as many cores as it has threads.
    """
    _Cluster(ray, directory, progress, parallel).run(jobs)


class _Cluster:
    """The tasks on the cluster and their messages."""

    def __init__(
        self, ray: Any, directory: SweepDirectory, progress: SweepProgress, parallel: int | None
    ) -> None:
        self._ray, self._directory, self._progress = ray, directory, progress
        self._threads = max(1, available_cores() // parallel) if parallel else 1
        self._messages = ray.remote(num_cpus=0)(_LastMessages).remote()

    def run(self, jobs: Sequence[Job]) -> None:
        pending = {self._submit(job): job for job in jobs}
        while pending:
            done, _ = self._ray.wait(list(pending), timeout=_SECONDS_BETWEEN_POLLS)
            self._update(pending.values())
            for task in done:
                self._end(pending.pop(task), task)

    def _submit(self, job: Job) -> Any:
        planned = job.planned
        config = with_threads(planned.config, self._threads)
        resources = required_resources(config, self._ray.cluster_resources())
        task = self._ray.remote(**resources, max_retries=0)(train_on_node)
        return task.remote(
            planned.name, planned.identity, to_table(config), self._messages, str(Path.cwd())
        )

    def _update(self, jobs: Iterable[Job]) -> None:
        messages = self._ray.get(self._messages.read.remote())
        for job in jobs:
            name = job.planned.name
            if name in messages:
                if name not in self._progress.running:
                    self._progress.start(name, resumed=messages[name].get("resumed", False))
                if messages[name]["kind"] == "status":
                    self._progress.update(name, messages[name])

    def _end(self, job: Job, task: Any) -> None:
        planned = job.planned
        if planned.name not in self._progress.running:
            self._progress.start(planned.name, resumed=False)
        try:
            result: Mapping[str, Any] = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            result = {"reason": f"Ray: {one_line(error)}"}
        if "reason" in result:
            self._directory.write_failure(planned, result["reason"])
            self._progress.fail(planned.name, result["reason"])
            return
        run = RunDirectory(job.directory)
        _write_files(run, result["files"])
        remember_run(run.path, run.config, own_code(planned.config).values())
        self._progress.finish(planned.name, self._directory.write_record(planned))


def _write_files(run: RunDirectory, files: Mapping[str, bytes]) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        write_atomically(run.path / name, files[name], overwrite=True)
    run.remove_checkpoint()  # left by an earlier start on this machine


class _LastMessages:
    """Ray actor that stores the last message of every run."""

    def __init__(self) -> None:
        self._messages: dict[str, Mapping[str, Any]] = {}

    def write(self, name: str, message: Mapping[str, Any]) -> None:
        """Store a message of a run."""
        self._messages[name] = message

    def read(self) -> dict[str, Mapping[str, Any]]:
        """Return the last message of every run."""
        return self._messages


def train_on_node(
    name: str, identity: str, config: Mapping[str, Any], messages: Any, working_directory: str
) -> dict[str, Any]:
    """Train a run on the node that executes the task.

    Args:
        name: Name of the run.
        identity: Identity of the run, which names its directory on the node.
        config: Configuration as a table.
        messages: Handle of the `_LastMessages` actor.
        working_directory: Directory of the user's own network, if the node has this directory.

    Returns:
        The contents of the run's files as "files", or why it failed as "reason".
    """
    if Path(working_directory).is_dir():
        os.chdir(working_directory)
    path = Path.home() / ".cache" / "probmask" / "ray" / identity
    directory = RunDirectory(path)
    resume = directory.config.exists()
    last: dict[str, Any] = {}
    send = _sender(name, messages, last)
    send({"kind": "started", "resumed": resume})
    if not directory.finished:
        execute(Request(str(path), resume, config), send)
    if "reason" in last:
        return {"reason": str(last["reason"])}
    return {"files": {file: (path / file).read_bytes() for file in _FILES}}


def _sender(name: str, messages: Any, last: dict[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that stores a message in ``last`` and sends it, but not too often."""
    sent = 0.0

    def send(message: Mapping[str, Any]) -> None:
        nonlocal sent
        last.clear()
        last.update(message)
        now = time.monotonic()
        if message["kind"] != "status" or now - sent >= _SECONDS_BETWEEN_POLLS:
            sent = now
            messages.write.remote(name, dict(message))

    return send


def required_resources(config: TrainConfig, available: Mapping[str, float]) -> dict[str, Any]:
    """Return the resources that Ray reserves for a run: its threads, and GPUs if it uses them."""
    resources: dict[str, Any] = {"num_cpus": config.threads}
    if config.accelerator in ("cuda", "gpu") or (
        config.accelerator == "auto" and available.get("GPU", 0) >= config.devices
    ):
        resources["num_gpus"] = config.devices
    return resources
