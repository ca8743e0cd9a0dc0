"""What `probmask train` does: a run in a directory, with its dense twin if wanted."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from probmask.data import DataSource, default_workers
from probmask.errors import InputError
from probmask.launch import is_first_rank
from probmask.training.config import TrainConfig, as_dense_twin, load_config, to_table
from probmask.training.loop import MakeReporter, train_run
from probmask.training.preparation import check_runnable, load_run_data, warn_of_absent_classes
from probmask.training.progress import Bar, Quiet
from probmask.training.record_format import INDIFFERENT
from probmask.training.run_directory import RunDirectory, unused_directory


@dataclass(frozen=True)
class Outcome:
    """A finished run: where it is, its record, and the record of its dense twin."""

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
    """Train as configured and write everything to the directory ``out``.

    Without ``out`` a new directory under ``runs/`` is taken. ``resume`` goes on with the unfinished
    run in ``out``, whose configuration it reads; ``config`` may then be left out, and must agree if
    it is given. A run that is finished is returned as it is.
    """
    resumes = resume and out is not None
    launch = config or (
        RunDirectory(Path(str(out))).read_config() if resumes else load_config(None)
    )
    data = load_run_data(launch)
    workers = (
        launch.workers if launch.workers is not None else default_workers(devices=launch.devices)
    )
    if not resume:
        check_runnable(launch, data)
        if is_first_rank():
            warn_of_absent_classes(data)
            reading = data.to(torch.device("cpu"), workers=workers)
            reading.check(visible=make_reporter is Bar)
    fabric = _launched_fabric(launch)
    if launch.threads is not None:
        torch.set_num_threads(launch.threads)
    with ExitStack() as locks:
        path, config = _prepared(fabric, config, out, resume=resume, locks=locks)
        data = data.to(fabric.device, workers=workers)
        dense = None
        if config.dense_twin:
            twin = RunDirectory(path / "dense")
            dense = _run_twin(as_dense_twin(config), data, twin, fabric, make_reporter)
        record = train_run(config, data, RunDirectory(path), fabric, make_reporter)
    return Outcome(path, record, dense)


def _launched_fabric(config: TrainConfig) -> Fabric:
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=config.devices,
            strategy=config.strategy,
            precision=config.precision,
        )
        fabric.launch()
    except Exception as error:  # Lightning raises errors of many kinds here
        raise InputError(
            f"train(accelerator={config.accelerator!r}, devices={config.devices}, strategy="
            f"{config.strategy!r}): Lightning refuses: {' '.join(str(error).split())}"
        ) from error
    return fabric


def _prepared(
    fabric: Fabric,
    config: TrainConfig | None,
    out: str | Path | None,
    *,
    resume: bool,
    locks: ExitStack,
) -> tuple[Path, TrainConfig]:
    """Let the first rank choose, make and lock the directory; the others learn what came of it."""
    result: tuple[Path, TrainConfig] | str = ""
    if fabric.global_rank == 0:
        try:
            result = _resumed(config, out) if resume else _created(config, out)
            locks.enter_context(RunDirectory(result[0]).locked())
            RunDirectory(result[0]).remove_leftovers()
        except (InputError, OSError) as error:  # or the other ranks would wait for ever
            result = str(error)
    result = fabric.broadcast(result)
    if isinstance(result, str):
        raise InputError(result)
    return result


def _created(config: TrainConfig | None, out: str | Path | None) -> tuple[Path, TrainConfig]:
    config = config or load_config(None)
    path = Path(out) if out is not None else unused_directory(default_directory(config))
    RunDirectory(path).create(config)
    return path, config


def _resumed(config: TrainConfig | None, out: str | Path | None) -> tuple[Path, TrainConfig]:
    if out is None:
        raise InputError("--resume: which run? Pass its directory: --resume DIR.")
    directory = RunDirectory(Path(out))
    found = directory.read_config()
    if config is not None:
        _check_same(config, found, directory)
        found = replace(found, **{key: getattr(config, key) for key in INDIFFERENT})
    return directory.path, found


def _check_same(wanted: TrainConfig, found: TrainConfig, directory: RunDirectory) -> None:
    wanted = replace(wanted, **{key: getattr(found, key) for key in INDIFFERENT})
    ours, theirs = to_table(wanted), to_table(found)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"--resume {directory.path}: {key} = {ours.get(key)} differs from the run's "
                f"{theirs.get(key)}; a run goes on with the settings it began with."
            )


def _run_twin(
    config: TrainConfig,
    data: DataSource,
    directory: RunDirectory,
    fabric: Fabric,
    make_reporter: MakeReporter,
) -> dict[str, Any]:
    if fabric.global_rank == 0:
        if directory.path.exists():
            directory.remove_leftovers()
        if not directory.config.exists():
            directory.create(config)
    fabric.barrier()
    return train_run(config, data, directory, fabric, make_reporter)


def default_directory(config: TrainConfig) -> Path:
    """Where a run goes when nobody says: the name tells what it is."""
    sparsity = config.method.get("sparsity", 0)
    name = f"{config.data}-{config.model.replace(':', '.')}-{config.method['name']}"
    return Path("runs") / f"{name}-{sparsity:g}-seed{config.seed}"
