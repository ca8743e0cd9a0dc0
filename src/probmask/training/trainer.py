"""The trainer behind `probmask.train`: processes, run directory, and the dense twin."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from probmask.data import DataSource, default_workers
from probmask.errors import AbsentClassWarning, InputError
from probmask.launch import is_first_rank, ranks_of_torchrun
from probmask.masking.rank_watch import RankWatch, end_process
from probmask.training.config import (
    TrainConfig,
    as_dense_twin,
    load_config,
    to_table,
    with_init_digest,
)
from probmask.training.devices import launch_fabric
from probmask.training.progress import Bar, MakeReporter, Quiet
from probmask.training.rank_meeting import agree_to_resume, meet
from probmask.training.record_format import KEYS_OF_SESSION, without_keys_of_session
from probmask.training.run import TrainingRun, load_run_data
from probmask.training.run_directory import RunDirectory, unused_directory

_MAX_CLASSES_NAMED = 5


@dataclass(frozen=True)
class Outcome:
    """A finished run: its directory, its record, and the record of its dense twin, if any."""

    directory: Path
    record: dict[str, Any]
    dense: dict[str, Any] | None


def train(
    config: TrainConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    make_reporter: MakeReporter = Quiet,
) -> Outcome:
    """Train a network and write everything to the directory ``out``.

    Wrong settings raise before the directory is created. A run that is already finished is
    returned without training.

    Args:
        config: Configuration of the run, as `probmask.load_config` returns it. The default trains
            a small network on scikit-learn's handwritten digits. With ``resume``, it may be
            omitted; if given, it must agree with the configuration of the run. Pass it to resume
            a run from elsewhere whose network is not part of probmask.
        out: Directory of the run. It must be empty or not exist, unless ``resume`` is set. The
            default is a new directory under ``runs/``.
        resume: Continue the unfinished run in ``out`` from its checkpoint.
        make_reporter: Called with a title and the number of updates; returns an object that shows
            the progress. The default shows nothing.

    Returns:
        The directory of the run, its record, and the record of its dense twin (or None).

    Raises:
        InputError: A setting is wrong, the data is missing, or ``out`` is in use.
        CheckpointError: The checkpoint is damaged or belongs to another run.
        NonFiniteError: The loss became NaN or infinite.
        RankLostError: Another rank does not respond.

    Example:
        >>> import tempfile
        >>> import probmask
        >>> settings = [("epochs", 1), ("batch_size", 256), ("model_args.width", 8)]
        >>> settings += [("dense_twin", False), ("tensorboard", False), ("method.sparsity", 0.5)]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     outcome = probmask.train(probmask.load_config(None, settings), out=directory)
        >>> outcome.record["size"], outcome.record["kept"]
        (4264, 2132)
    """
    return train_rank(config, out=out, resume=resume, make_reporter=make_reporter)


def train_rank(
    config: TrainConfig | None,
    *,
    out: str | Path | None,
    resume: bool,
    make_reporter: MakeReporter,
    end: Callable[[str], None] | None = None,
    is_copied: bool = False,
) -> Outcome:
    """Do what `train` documents, as one of the ranks.

    If ``is_copied``, the directory is a copy on this node; see `RunDirectory`.

    ``end`` is called from a thread if another rank does not respond while this one waits for it.
    Its argument is a message, empty if another rank prints it. By default, the process ends.
    """
    meeting = meet()
    resume = agree_to_resume(meeting, out, resume=resume)
    if resume and (outcome := _finished_outcome(config, out)) is not None:
        return outcome
    if config is not None and not resume:
        config = with_init_digest(config)
    launch = config or (_resumed_config(Path(out)) if resume and out else load_config(None))
    data = load_run_data(launch)
    _set_threads(launch)
    run = None if resume else _new_run(launch, data, out, visible=make_reporter is Bar)
    fabric = launch_fabric(launch, meeting)
    _set_threads(launch)  # again: Lightning may have changed it
    data = data.to(fabric.device, workers=_workers(launch))
    watch = RankWatch(launch.timeout_seconds, end or partial(_end, fabric))
    with watch, ExitStack() as locks:
        if run is not None:
            run.prepare(fabric, data)
        path, config = _claim_directory(fabric, config, out, resume=resume, locks=locks)
        if meeting is not None:
            meeting.note_start(path)
        dense = None
        if config.dense_twin:
            twin = RunDirectory(path / "dense", is_copied=is_copied)
            dense = _train_twin(config, data, twin, fabric, make_reporter)
        directory = RunDirectory(path, is_copied=is_copied)
        record = fabric.broadcast(_finished_record(directory))
        if record is None:
            run = run or _prepared_run(config, data, fabric, directory)
            record = run.complete(directory, make_reporter)
    return Outcome(path, record, dense)


def _end(fabric: Fabric, message: str) -> None:
    """End this process, and those that it has launched, which may be stopped."""
    for process in getattr(fabric.strategy.launcher, "procs", ()):
        process.kill()
    end_process(message and f"{message} Continue the run with --resume.")


def default_directory(config: TrainConfig) -> Path:
    """Return the directory of a run that has no ``out``; its name describes the run."""
    sparsity = config.method.get("sparsity", 0)
    name = f"{config.data}-{config.model.replace(':', '.')}-{config.method['name']}"
    return Path("runs") / f"{name}-{sparsity:g}-seed{config.seed}"


def find_run(config: TrainConfig | None, out: str | Path | None) -> tuple[Path, TrainConfig]:
    """Return the directory of the run to resume, and its configuration.

    Raises:
        InputError: If the directory has no run, or ``config`` differs from its configuration.
    """
    if out is None:
        raise InputError("--resume: which run? Pass its directory: --resume DIR.")
    directory = RunDirectory(Path(out))
    found = directory.read_config()
    if config is not None:
        if config.init_sha256 is None:  # the file is not needed any more
            config = replace(config, init_sha256=found.init_sha256)
        _check_same(config, found, directory)
        found = replace(found, **{key: getattr(config, key) for key in KEYS_OF_SESSION})
    return directory.path, found


def warn_of_absent_classes(data: DataSource) -> None:
    """Warn about classes without a training image."""
    counts = data.train_labels.bincount(minlength=data.classes)
    absent = counts.eq(0).nonzero().flatten().tolist()
    if not absent:
        return
    names = [str(label) for label in absent]
    if data.class_names is not None:
        names = [f"{label} ({data.class_names[label]})" for label in absent]
    shown = ", ".join(names[:_MAX_CLASSES_NAMED])
    hidden = len(absent) - _MAX_CLASSES_NAMED
    more = f" and {hidden} more" if hidden > 0 else ""
    verb = "has" if len(absent) == 1 else "have"
    warnings.warn(
        f"--data {data.name}: {len(absent)} of {data.classes} classes {verb} no training images "
        f"and cannot be learned: {shown}{more} (classes are counted from 0).",
        AbsentClassWarning,
        stacklevel=2,
    )


def _resumed_config(path: Path) -> TrainConfig:
    config = RunDirectory(path).read_config()
    RunDirectory(path).check_trusted(config)
    return config


def _new_run(
    config: TrainConfig, data: DataSource, out: str | Path | None, *, visible: bool
) -> TrainingRun:
    """Build the run, and let the first rank check directory and images before it is launched."""
    if is_first_rank() and out is not None:
        RunDirectory(Path(out)).check_unused()
    run = TrainingRun(config, data)
    if is_first_rank():
        warn_of_absent_classes(data)
        data.to(torch.device("cpu"), workers=_workers(config)).check(progress=visible)
    return run


def _prepared_run(
    config: TrainConfig, data: DataSource, fabric: Fabric, directory: RunDirectory
) -> TrainingRun:
    run = TrainingRun(config, data, resumed=directory.checkpoint.exists())
    run.prepare(fabric, data)
    return run


def _finished_outcome(config: TrainConfig | None, out: str | Path | None) -> Outcome | None:
    """Return the results of a finished run, or None. It needs no data and no writable directory."""
    path, config = find_run(config, out)
    record = _finished_record(RunDirectory(path))
    if record is not None:
        _check_describes(record, config, path)
    if record is None or not config.dense_twin:
        return None if record is None else Outcome(path, record, None)
    dense = _finished_record(RunDirectory(path / "dense"))
    return None if dense is None else Outcome(path, record, dense)


def _finished_record(directory: RunDirectory) -> dict[str, Any] | None:
    if not directory.finished:
        return None
    with suppress(OSError):  # read-only media
        directory.remove_checkpoint()  # left by a kill right after the record
    return directory.read_record()


def _check_describes(record: Mapping[str, Any], config: TrainConfig, path: Path) -> None:
    """Raise if config.toml has changed since the run finished."""
    for key in ("data", "model", "epochs", "batch_size", "seed"):
        before, now = record["config"].get(key), getattr(config, key)
        if before not in (None, now):
            raise InputError(
                f"--resume {path}: this run has finished with {key} = {before}, but its "
                f"config.toml now says {now}; restore config.toml, or start a new run."
            )


def _train_twin(
    config: TrainConfig,
    data: DataSource,
    directory: RunDirectory,
    fabric: Fabric,
    make_reporter: MakeReporter,
) -> dict[str, Any]:
    """Train the dense twin in its own directory, or read its record; return the record."""
    twin = as_dense_twin(config)
    if fabric.global_rank == 0:
        if directory.path.exists():
            directory.remove_leftovers()
        if not directory.config.exists():
            directory.create(twin)
    fabric.barrier()
    record: dict[str, Any] | None = fabric.broadcast(_finished_record(directory))
    if record is None:
        record = _prepared_run(twin, data, fabric, directory).complete(directory, make_reporter)
    return record


def _set_threads(config: TrainConfig) -> None:
    # A run of a larger machine continues with fewer threads. Thousands would end the process.
    if config.threads is not None:
        torch.set_num_threads(min(config.threads, os.cpu_count() or 1))


def _workers(config: TrainConfig) -> int:
    if config.workers is not None:
        return config.workers
    _, here = ranks_of_torchrun() or (1, config.devices)
    return default_workers(devices=here)


def _claim_directory(
    fabric: Fabric,
    config: TrainConfig | None,
    out: str | Path | None,
    *,
    resume: bool,
    locks: ExitStack,
) -> tuple[Path, TrainConfig]:
    """Let the first rank create or find the directory and lock it; send the result to all ranks."""
    result: Any = None
    if fabric.global_rank == 0:
        try:
            result = find_run(config, out) if resume else _create_run(config, out)
            locks.enter_context(RunDirectory(result[0]).locked())
            RunDirectory(result[0]).remove_leftovers()
        except (InputError, OSError) as error:  # the other ranks wait for the broadcast
            result = error
    found: tuple[Path, TrainConfig] | InputError | OSError = fabric.broadcast(result)
    if isinstance(found, Exception):
        raise found
    return found


def _create_run(config: TrainConfig | None, out: str | Path | None) -> tuple[Path, TrainConfig]:
    config = config or load_config(None)
    path = Path(out) if out is not None else unused_directory(default_directory(config))
    RunDirectory(path).create(config)
    return path, config


def _check_same(given: TrainConfig, found: TrainConfig, directory: RunDirectory) -> None:
    """Raise if a setting that influences the result differs from the run's."""
    ours, theirs = (without_keys_of_session(to_table(each)) for each in (given, found))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"--resume {directory.path}: {key} = {ours.get(key)} differs from the run's "
                f"{theirs.get(key)}; a run resumes with the settings it was started with."
            )
