"""Training on the workers of a Ray cluster; the files of the run are written to this machine.

A worker is an actor in a placement group with one bundle per rank. This is what Ray Train does. It
is not used, because `ray[train]` installs pandas and pyarrow, and needs storage that all nodes
share. Here, every change of the run's files is copied to the machine where the command was typed,
and the workers get these files when they start.

If a worker is lost, all workers are started again from the last checkpoint.
"""

import hashlib
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from probmask.errors import InputError, RankLostError, RestartWarning, WorkerError
from probmask.files import write_atomically
from probmask.launch import available_cores
from probmask.messages import listed, one_line
from probmask.training.config import TrainConfig, with_init_digest
from probmask.training.progress import MakeReporter, Quiet, Reporter, Status
from probmask.training.ray_connection import connected
from probmask.training.ray_worker import (
    Begin,
    End,
    Event,
    Failure,
    Files,
    Place,
    RayWorker,
    file_stamps,
    is_record,
)
from probmask.training.run_directory import RunDirectory, unused_directory
from probmask.training.trainer import Outcome, default_directory, find_run, train

_SECONDS_BETWEEN_POLLS = 0.5
_SECONDS_TO_FAIL = 5.0  # for workers, after one of them has failed
_SECONDS_TO_CLEAN = 10.0
_SECONDS_FOR_PLACES = 300.0  # other work ends, or a lost node returns
_MOST_LOSSES = 3  # without a new checkpoint in between


def train_on_ray(
    config: TrainConfig,
    *,
    address: str,
    out: Path | None = None,
    resume: bool = False,
    make_reporter: MakeReporter = Quiet,
) -> Outcome:
    """Train as `probmask.train` does, with every rank on a worker of a Ray cluster.

    Data and initial weights are read on the nodes. The directory ``out`` is on this machine.

    Args:
        config: Configuration of the run. ``devices`` is the number of workers.
        address: Address of a running cluster, or "local" to start one on this machine.
        out: Directory of the run, as for `probmask.train`.
        resume: Continue the unfinished run in ``out``, wherever it has been trained so far.
        make_reporter: As for `probmask.train`.

    Returns:
        The directory of the run, its record, and the record of its dense twin (or None).

    Raises:
        InputError: A setting is wrong, the cluster cannot be reached or is too small, or ``out``
            is in use.
        WorkerError: A worker failed unexpectedly, or workers were lost repeatedly.
    """
    if resume:
        path, config = find_run(config, out)
    else:
        config = _with_threads(with_init_digest(config), address)
        path = out or unused_directory(default_directory(config))
        RunDirectory(path).check_unused()
    directory = RunDirectory(path)
    if not directory.finished:
        cores = max(available_cores(), config.devices * (config.threads or 1))
        with connected(address, cores=cores) as ray, ExitStack() as locks:
            bundle = worker_resources(config, ray.cluster_resources())
            cluster = _Cluster(ray, address, config, bundle)
            cluster.check_size()
            copy = _RunCopy(directory, config, locks, created=resume)
            _train_until_finished(cluster, copy, make_reporter)
    assert directory.finished
    return train(config, out=path, resume=True)  # reads the results


def worker_resources(config: TrainConfig, available: Mapping[str, float]) -> dict[str, float]:
    """Return what Ray reserves for a worker: its threads, and a GPU if the run uses them."""
    resources: dict[str, float] = {"CPU": config.threads or 1}
    if config.accelerator in ("cuda", "gpu") or (
        config.accelerator == "auto" and available.get("GPU", 0) >= config.devices
    ):
        resources["GPU"] = 1
    return resources


def _with_threads(config: TrainConfig, address: str) -> TrainConfig:
    """Fill in the threads of a worker: an even share of this machine's cores, or 1 elsewhere."""
    if config.threads is not None:
        return config
    share = available_cores() // config.devices if address == "local" else 1
    return replace(config, threads=max(1, share))


class _LostWorkersError(Exception):
    """Workers have died or do not answer; ``at_start`` is why one could not start, if so."""

    def __init__(self, message: str, *, at_start: str | None = None) -> None:
        super().__init__(message)
        self.at_start = at_start


class _RunCopy:
    """The directory of the run on this machine.

    It is created when the first files arrive, so that wrong settings, which the workers find,
    leave nothing behind. From then on it is locked.
    """

    def __init__(
        self, directory: RunDirectory, config: TrainConfig, locks: ExitStack, *, created: bool
    ) -> None:
        self.directory, self.created = directory, created
        self.checkpoints = 0  # received so far
        self._config, self._locks = config, locks
        if created:
            locks.enter_context(directory.locked())
            directory.remove_leftovers()

    @property
    def name(self) -> str:
        """Name of the copies on the nodes, which depends on this machine and directory only."""
        path = self.directory.path.resolve()
        digest = hashlib.sha256(f"{socket.gethostname()}:{path}".encode()).hexdigest()
        return f"{path.name}-{digest[:16]}"

    def read(self) -> Files:
        """Return all files of the run."""
        path = self.directory.path
        names = [name for name, _ in file_stamps(path)] if self.created else []
        return {name: (path / name).read_bytes() for name in names}

    def write(self, files: Files) -> None:
        """Write files that have changed on a node, a record last: it marks the end of its run."""
        if files and not self.created:
            self.directory.create(self._config)
            self._locks.enter_context(self.directory.locked())
            self.created = True
        for name in sorted(files, key=is_record):
            path = self.directory.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, files[name], overwrite=True)
            run = RunDirectory(path.parent)
            self.checkpoints += path == run.checkpoint
            if path == run.record:
                run.remove_checkpoint()


def _train_until_finished(cluster: "_Cluster", copy: _RunCopy, make_reporter: MakeReporter) -> None:
    """Train; whenever workers are lost, start again from the last checkpoint."""
    losses, started = 0, False
    while True:
        before = copy.checkpoints
        try:
            with cluster.workers(copy) as workers, _Display(make_reporter) as display:
                started = True
                workers.train(copy, display)
            return
        except _LostWorkersError as error:
            if error.at_start is not None and not started:
                raise InputError(
                    f"--ray {cluster.address}: a worker cannot start: {error.at_start}; install "
                    "this version of probmask[train,ray] on every node."
                ) from error
            losses = 1 if copy.checkpoints > before else losses + 1
            if losses == _MOST_LOSSES:
                path = copy.directory.path
                hint = f"; --resume {path} continues the run" if copy.created else ""
                raise WorkerError(
                    f"--ray {cluster.address}: {error}. Workers were lost {losses} times without "
                    f"a new checkpoint in between; check the memory of the nodes{hint}."
                ) from error
            warnings.warn(
                f"{error}; all workers start again from the last checkpoint.",
                RestartWarning,
                stacklevel=2,
            )


class _Display:
    """Shows the events of the first rank on this machine."""

    def __init__(self, make_reporter: MakeReporter) -> None:
        self._make_reporter, self._open = make_reporter, ExitStack()
        self._reporter: Reporter = Quiet("", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def show(self, events: Sequence[Event]) -> None:
        """Show the events in order."""
        for event in events:
            if isinstance(event, Begin):
                made = self._make_reporter(event.title, event.total_steps)
                self._reporter = self._open.enter_context(made)
            elif isinstance(event, Status):
                self._reporter.show(event)
            elif isinstance(event, End):
                self._open.close()
            else:
                warnings.warn(event.text, event.category, stacklevel=2)


@dataclass(frozen=True)
class _Cluster:
    """The cluster, and the run that is trained on it.

    ``bundle`` is what Ray reserves for a worker, in all starts: a lost node must not move the run
    from GPUs to CPUs.
    """

    ray: Any
    address: str
    config: TrainConfig
    bundle: dict[str, float]

    def check_size(self) -> None:
        """Raise `InputError` if the cluster is too small, even when it is idle."""
        needed, count, total = self.bundle, self.config.devices, self.ray.cluster_resources()
        if any(total.get(kind, 0) < count * amount for kind, amount in needed.items()):
            has = {kind: total.get(kind, 0) for kind in needed}
            raise InputError(
                f"--ray {self.address} --devices {count}: every worker needs "
                f"{_described(needed)}, but the cluster has {_described(has)}; use fewer "
                "--devices, or add nodes."
            )

    @contextmanager
    def workers(self, copy: _RunCopy) -> Iterator["_Workers"]:
        """Start the workers and send them the files of the run; stop them at the end."""
        util = self.ray.util
        group = util.placement_group([self.bundle] * self.config.devices, strategy="PACK")
        actors: list[Any] = []
        try:
            if not group.wait(_SECONDS_FOR_PLACES):
                raise InputError(
                    f"--ray {self.address}: {self.config.devices} workers with "
                    f"{_described(self.bundle)} each did not start within "
                    f"{_SECONDS_FOR_PLACES:.0f} seconds, because the nodes are busy or lost; try "
                    "again later, or use fewer --devices."
                )
            actors += self._started(group)
            workers = self._prepared(actors, copy)
            yield workers
            workers.clean()
        finally:
            for actor in actors:
                self.ray.kill(actor)
            util.remove_placement_group(group)

    def _started(self, group: Any) -> list[Any]:
        """Create an actor in every bundle."""
        scheduling = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return [
            self.ray.remote(RayWorker)
            .options(
                num_cpus=self.bundle["CPU"],
                num_gpus=self.bundle.get("GPU", 0),
                max_concurrency=3,  # `train`, `news` and one more
                scheduling_strategy=scheduling(group, placement_group_bundle_index=index),
            )
            .remote()
            for index in range(self.config.devices)
        ]

    def _prepared(self, actors: Sequence[Any], copy: _RunCopy) -> "_Workers":
        """Number the workers node by node, and give every node the files of the run."""
        try:
            places: list[Place] = self.ray.get([each.place.remote(copy.name) for each in actors])
            nodes = list(dict.fromkeys(place.node for place in places))
            by_node = sorted(
                zip(actors, places, strict=True), key=lambda pair: nodes.index(pair[1].node)
            )
            port = self.ray.get(by_node[0][0].free_port.remote())
            workers = _Workers(self, [a for a, _ in by_node], [p for _, p in by_node], port)
            workers.send(copy.read())
        except self.ray.exceptions.RayError as error:
            raise _LostWorkersError(
                "a worker died before the training began", at_start=one_line(error)
            ) from error
        return workers


class _Workers:
    """The workers of one start, in the order of their ranks."""

    def __init__(
        self, cluster: _Cluster, actors: list[Any], places: list[Place], port: int
    ) -> None:
        self._cluster, self._actors, self._places, self._port = cluster, actors, places, port
        self._directory = places[0].directory  # the same path on every node
        nodes = [place.node for place in places]
        self._leaders = [actors[nodes.index(node)] for node in dict.fromkeys(nodes)]

    def send(self, files: Files) -> None:
        """Write the files of the run on every node."""
        ray = self._cluster.ray
        content = ray.put(files)
        ray.get([each.receive.remote(self._directory, content) for each in self._leaders])

    def clean(self) -> None:
        """Delete the files of the run on every node."""
        ray = self._cluster.ray
        with suppress(ray.exceptions.RayError):
            ray.get([each.clean.remote() for each in self._leaders], timeout=_SECONDS_TO_CLEAN)

    def train(self, copy: _RunCopy, display: _Display) -> None:
        """Train to the end.

        Raises:
            _LostWorkersError: Workers have died, or one has failed and others do not answer.
            InputError, NonFiniteError, …: The error of a worker.
        """
        ray = self._cluster.ray
        tasks = self._start(copy)
        running = list(tasks)
        news = self._actors[0].news.remote()
        while running:
            done, running = ray.wait(running, timeout=_SECONDS_BETWEEN_POLLS)
            if ray.wait([news], timeout=0)[0]:
                self._receive(news, copy, display)
                news = self._actors[0].news.remote()
            for task in done:
                self._check(tasks, task, copy)
        self._receive(news, copy, display)
        self._receive(self._actors[0].news.remote(), copy, display)
        if not copy.directory.finished:
            raise _LostWorkersError("rank 0: the worker died before its last files were copied")

    def _start(self, copy: _RunCopy) -> dict[Any, int]:
        """Start the training on every worker; return the ranks by their tasks."""
        common = {
            "MASTER_ADDR": self._places[0].address,
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_RUN_ID": copy.name,
        }
        return {
            actor.train.remote(
                self._cluster.config,
                self._directory,
                common | variables,
                resume=copy.created,
                working_directory=str(Path.cwd()),
            ): rank
            for rank, (actor, variables) in enumerate(
                zip(self._actors, rank_variables(self._places), strict=True)
            )
        }

    def _receive(self, news: Any, copy: _RunCopy, display: _Display) -> None:
        try:
            found = self._cluster.ray.get(news)
        except self._cluster.ray.exceptions.RayError:
            return  # the task of this worker fails too, and is checked
        copy.write(found.files)
        display.show(found.events)

    def _check(self, tasks: Mapping[Any, int], done: Any, copy: _RunCopy) -> None:
        """Raise if the worker has failed: its error, or `_LostWorkersError` if any are lost."""
        if self._result(done) is None:
            return
        # A worker whose peer is lost fails as well, and may be the first to report it.
        ended, _ = self._cluster.ray.wait(
            list(tasks), num_returns=len(tasks), timeout=_SECONDS_TO_FAIL
        )
        results = {tasks[task]: self._result(task) for task in ended}
        failures = {rank: each for rank, each in sorted(results.items()) if each is not None}
        if dead := [rank for rank, failure in failures.items() if failure.kind is WorkerError]:
            names = listed([self._described(rank) for rank in dead])
            raise _LostWorkersError(f"{names} died")
        own = [rank for rank, failure in failures.items() if failure.kind is not RankLostError]
        if not own:
            text = max(failure.text for failure in failures.values())  # the others are empty
            raise _LostWorkersError(text.removesuffix("."))
        failure = failures[own[0]]
        text = failure.text.replace(self._directory, str(copy.directory.path))
        if not failure.where:
            raise failure.kind(text)
        raise WorkerError(
            f"--ray {self._cluster.address}: {self._described(own[0])} failed: {text} "
            f"({failure.where})"
        )

    def _described(self, rank: int) -> str:
        return f"rank {rank} on {self._places[rank].address}"

    def _result(self, task: Any) -> Failure | None:
        """Return why the task of a worker failed, or None. `WorkerError`: it has died."""
        try:
            result: Failure | None = self._cluster.ray.get(task)
        except self._cluster.ray.exceptions.RayError as error:
            return Failure(WorkerError, one_line(error), "Ray")
        return result


def rank_variables(places: Sequence[Place]) -> list[dict[str, str]]:
    """Return the environment variables of every rank, as torchrun sets them.

    Workers on the same node are neighbors in ``places``, and all of them see all of their GPUs.
    Fabric requires as many ranks on every node. If Ray has placed them unevenly, each worker counts
    as a node of its own.
    """
    nodes = [place.node for place in places]
    if len({nodes.count(node) for node in nodes}) > 1:
        nodes = [f"{node} {rank}" for rank, node in enumerate(nodes)]
    order = list(dict.fromkeys(nodes))
    variables = []
    for rank, node in enumerate(nodes):
        pairs = zip(nodes, places, strict=True)
        gpus = [gpu for other, place in pairs if other == node for gpu in place.gpus]
        variables.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(rank - nodes.index(node)),
                "LOCAL_WORLD_SIZE": str(nodes.count(node)),
                "GROUP_RANK": str(order.index(node)),
                "GROUP_WORLD_SIZE": str(len(order)),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            }
        )
    return variables


def _described(resources: Mapping[str, float]) -> str:
    """Return resources as text, as in "4 CPU and 1 GPU"."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())
