"""A training run: prepare the network, train it, finish it with an artifact and a record."""

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from probmask.artifact import save
from probmask.core.noise import fold
from probmask.data import DataSource, default_workers, load_data
from probmask.errors import AbsentClassWarning, CheckpointError, InputError
from probmask.launch import is_first_rank
from probmask.masking.attach import attach
from probmask.masking.probe import Probe
from probmask.models import build_model, model_settings
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.config import (
    TrainConfig,
    as_dense_twin,
    load_config,
    make_method,
    to_table,
)
from probmask.training.evaluation import check_model
from probmask.training.loop import Loop
from probmask.training.metrics import MetricsLog, read_history
from probmask.training.progress import Bar, MakeReporter, Quiet, Reporter
from probmask.training.record import artifact_metadata, make_record
from probmask.training.record_format import NEUTRAL_KEYS
from probmask.training.run_directory import RunDirectory, unused_directory

# Keep the random numbers of the initial weights and of the masks apart from other uses of the seed.
_INIT_STREAM, _MASK_STREAM = 0, 2
_PROBE_EPOCH = -1  # an epoch number that training does not use, so the probe has its own order
# Images for re-estimating BatchNorm statistics: all of CIFAR, but a fraction of ImageNet.
_IMAGES_FOR_BATCHNORM = 50_000
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
            omitted; if given, it must agree with the configuration of the run.
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
    launch = config or (
        RunDirectory(Path(out)).read_config() if resume and out is not None else load_config(None)
    )
    data = load_run_data(launch)
    _set_threads(launch)
    run = None if resume else _new_run(launch, data, out, visible=make_reporter is Bar)
    fabric = _launch_fabric(launch)
    _set_threads(launch)  # again: Lightning may have changed it
    data = data.to(fabric.device, workers=_workers(launch))
    if run is not None:
        run.prepare(fabric, data)
    with ExitStack() as locks:
        path, config = _claim_directory(fabric, config, out, resume=resume, locks=locks)
        dense = None
        if config.dense_twin:
            dense = _train_twin(config, data, RunDirectory(path / "dense"), fabric, make_reporter)
        directory = RunDirectory(path)
        record = _finished_record(directory)
        if record is None:
            run = run or _prepared_run(config, data, fabric)
            record = run.complete(directory, make_reporter)
    return Outcome(path, record, dense)


class Run:
    """One training run.

    Creating the object builds the network, once, and checks that it fits the data. `prepare`
    attaches the method. `train` makes the updates, from the checkpoint if there is one. `finish`
    measures the network and writes the artifact and the record. Only `train` and `finish` write
    files.
    """

    def __init__(self, config: TrainConfig, data: DataSource) -> None:
        self.config = config
        self.data = data
        self.method = make_method(config)
        self.phases = self.method.phases(config.epochs)
        self.steps_per_epoch = data.steps_per_epoch(config.batch_size)
        self.total_steps = sum(phase.epochs for phase in self.phases) * self.steps_per_epoch
        suggested = _suggested_settings(data)
        self.model_args = model_settings(config.model, config.model_args, suggested=suggested)
        torch.manual_seed(fold(config.seed, _INIT_STREAM))
        self.model = build_model(config.model, self.model_args)
        check_model(self.model, data, name=config.model)
        self.seconds = 0.0
        self._log_length = 0
        self._loop: Loop | None = None

    @property
    def loop(self) -> Loop:
        """The training loop, which exists after `prepare`."""
        assert self._loop is not None, "call prepare() first"
        return self._loop

    def prepare(self, fabric: Fabric, data: DataSource) -> None:
        """Attach the method to the network and set both up on the device.

        Args:
            fabric: Launched Fabric, whose processes share every batch.
            data: The data of the run, on the device of ``fabric``.

        Raises:
            InputError: The method cannot be attached, or the batch cannot be shared evenly.
        """
        config = self.config
        if config.batch_size % fabric.world_size:
            raise InputError(
                f"train(batch_size={config.batch_size}): {fabric.world_size} processes share every "
                "batch evenly; choose a multiple."
            )
        self.data = data
        optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config.optimizer.lr,
            momentum=config.optimizer.momentum,
            weight_decay=config.optimizer.weight_decay,
            nesterov=config.optimizer.nesterov,
        )
        sparsifier = attach(
            self.model,
            self.method,
            optimizer=optimizer,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            include=config.include,
            exclude=config.exclude,
            example_inputs=torch.zeros(1, *data.image_shape),
            phases=self.phases,
            probe=Probe(_ProbeBatches(config, data), _criterion(config)),
            seed=fold(config.seed, _MASK_STREAM),
        )
        self._loop = Loop(
            config=config,
            data=data,
            fabric=fabric,
            model=self.model,
            optimizer=optimizer,
            sparsifier=sparsifier,
            phases=self.phases,
        )

    def complete(self, directory: RunDirectory, make_reporter: MakeReporter) -> dict[str, Any]:
        """Train and finish in ``directory``; return the record."""
        if directory.checkpoint.exists():
            self.restore(directory)
        with make_reporter(str(self.config.method["name"]), self.total_steps) as reporter:
            self.train(directory, reporter)
        return self.finish(directory)

    def train(self, directory: RunDirectory, reporter: Reporter) -> None:
        """Make all updates that are left, and write checkpoints on the way."""
        fingerprint = self.data.fingerprint() if self._is_first_rank else ""
        seconds_before = self.seconds
        started = last_checkpoint = time.monotonic()
        log = self._open_log(directory)
        with log or nullcontext():
            for _ in self.loop.updates(log, reporter):
                now = time.monotonic()
                self.seconds = seconds_before + now - started
                # All ranks hold the same state. The first one, which has the log, writes it.
                due = now - last_checkpoint >= self.config.checkpoint_seconds
                if log is not None and due:
                    write_checkpoint(directory.checkpoint, self._state(log, fingerprint))
                    last_checkpoint = now

    def finish(self, directory: RunDirectory) -> dict[str, Any]:
        """Finalize the masks, measure the network, write artifact and record."""
        # Every rank reads the same images, in batches of the size that one rank trains with.
        batch_size = self.config.batch_size // self.loop.shard.ranks
        batches = self.data.training(self.loop.epochs, batch_size=batch_size, seed=self.config.seed)
        with closing(batches):  # ends the worker processes
            some = islice(batches, max(1, _IMAGES_FOR_BATCHNORM // batch_size))
            summary = self.loop.sparsifier.finalize(data=(batch.images for batch in some))
        record = make_record(
            self.config,
            self.data,
            self.model,
            summary,
            model_args=self.model_args,
            phases=self.phases,
            updates=self.total_steps,
            seconds=self.seconds,
            device=self.loop.fabric.device,
            devices=self.loop.fabric.world_size,
        )
        if self._is_first_rank:
            save(self.model, directory.artifact, metadata=artifact_metadata(record), overwrite=True)
            record["bytes"] = directory.artifact.stat().st_size
            record["history"] = read_history(directory.metrics)
            directory.write_record(record)
            directory.checkpoint.unlink(missing_ok=True)
        finished: dict[str, Any] = self.loop.fabric.broadcast(record)
        return finished

    def restore(self, directory: RunDirectory) -> None:
        """Continue from the checkpoint in ``directory``.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another run.
        """
        path = directory.checkpoint
        state = read_checkpoint(path)
        if _without_neutral(state["config"]) != _without_neutral(to_table(self.config)):
            raise CheckpointError(
                f"{path}: belongs to a run with another configuration; resume without changing "
                "settings."
            )
        if state["data"] != self.data.fingerprint():
            raise CheckpointError(
                f"{path}: was written while training on different data; restore the original data, "
                "or pass its new place as --data-dir."
            )
        try:
            self.model.load_state_dict(state["model"])
            self.loop.optimizer.load_state_dict(state["optimizer"])
            self.loop.sparsifier.load_state_dict(state["sparsifier"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{path}: does not fit the model ({reason}); restore the code of the model that "
                "wrote it, or start a new run with another --out."
            ) from error
        self.loop.load_state_dict(state)
        self.data.recall_unreadable(state["unreadable"])
        self.seconds = state["seconds"]
        self._log_length = state["log_length"]

    def _state(self, log: MetricsLog, fingerprint: str) -> dict[str, Any]:
        """Return everything that `restore` needs."""
        return {
            "config": to_table(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.loop.optimizer.state_dict(),
            "sparsifier": self.loop.sparsifier.state_dict(),
            **self.loop.state_dict(),
            "seconds": self.seconds,
            "log_length": log.length,
            "data": fingerprint,
            "unreadable": self.data.unreadable,
        }

    def _open_log(self, directory: RunDirectory) -> MetricsLog | None:
        if not self._is_first_rank:
            return None
        tensorboard = directory.tensorboard if self.config.tensorboard else None
        return MetricsLog(
            directory.metrics, tensorboard, length=self._log_length, step=self.loop.step + 1
        )

    @property
    def _is_first_rank(self) -> bool:
        return self.loop.fabric.global_rank == 0


def load_run_data(config: TrainConfig) -> DataSource:
    """Load the data of a run, with validation images held out if runs are selected by them."""
    if config.select_on == "val":
        return load_data(config.data, config.data_dir, config.data_args).with_validation()
    # No images are held out, so any number of validation images is accepted.
    settings = {key: v for key, v in config.data_args.items() if key != "validation_images"}
    return load_data(config.data, config.data_dir, settings)


def default_directory(config: TrainConfig) -> Path:
    """Return the directory of a run that has no ``out``; its name describes the run."""
    sparsity = config.method.get("sparsity", 0)
    name = f"{config.data}-{config.model.replace(':', '.')}-{config.method['name']}"
    return Path("runs") / f"{name}-{sparsity:g}-seed{config.seed}"


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
        f"and cannot be learnt: {shown}{more} (classes are counted from 0).",
        AbsentClassWarning,
        stacklevel=2,
    )


def _new_run(
    config: TrainConfig, data: DataSource, out: str | Path | None, *, visible: bool
) -> Run:
    """Build the run, and let the first rank check directory and images before it is launched."""
    if is_first_rank() and out is not None:
        RunDirectory(Path(out)).check_unused()
    run = Run(config, data)
    if is_first_rank():
        warn_of_absent_classes(data)
        data.to(torch.device("cpu"), workers=_workers(config)).check(progress=visible)
    return run


def _prepared_run(config: TrainConfig, data: DataSource, fabric: Fabric) -> Run:
    run = Run(config, data)
    run.prepare(fabric, data)
    return run


def _finished_record(directory: RunDirectory) -> dict[str, Any] | None:
    if not directory.finished:
        return None
    directory.checkpoint.unlink(missing_ok=True)  # left by a kill right after the record
    return directory.read_record()


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
    record = _finished_record(directory)
    if record is None:
        record = _prepared_run(twin, data, fabric).complete(directory, make_reporter)
    return record


def _set_threads(config: TrainConfig) -> None:
    if config.threads is not None:
        torch.set_num_threads(config.threads)


def _workers(config: TrainConfig) -> int:
    return default_workers(devices=config.devices) if config.workers is None else config.workers


def _launch_fabric(config: TrainConfig) -> Fabric:
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=config.devices,
            strategy=config.strategy,
            precision=config.precision,
        )
        fabric.launch()
    except Exception as error:  # Lightning raises errors of many types here
        raise InputError(
            f"train(accelerator={config.accelerator!r}, devices={config.devices}, strategy="
            f"{config.strategy!r}): Lightning Fabric cannot start: {' '.join(str(error).split())}"
        ) from error
    return fabric


def _claim_directory(
    fabric: Fabric,
    config: TrainConfig | None,
    out: str | Path | None,
    *,
    resume: bool,
    locks: ExitStack,
) -> tuple[Path, TrainConfig]:
    """Let the first rank create or find the directory and lock it; send the result to all ranks."""
    result: tuple[Path, TrainConfig] | str = ""
    if fabric.global_rank == 0:
        try:
            result = _find_run(config, out) if resume else _create_run(config, out)
            locks.enter_context(RunDirectory(result[0]).locked())
            RunDirectory(result[0]).remove_leftovers()
        except (InputError, OSError) as error:  # the other ranks wait for the broadcast
            result = str(error)
    result = fabric.broadcast(result)
    if isinstance(result, str):
        raise InputError(result)
    return result


def _create_run(config: TrainConfig | None, out: str | Path | None) -> tuple[Path, TrainConfig]:
    config = config or load_config(None)
    path = Path(out) if out is not None else unused_directory(default_directory(config))
    RunDirectory(path).create(config)
    return path, config


def _find_run(config: TrainConfig | None, out: str | Path | None) -> tuple[Path, TrainConfig]:
    if out is None:
        raise InputError("--resume: which run? Pass its directory: --resume DIR.")
    directory = RunDirectory(Path(out))
    found = directory.read_config()
    if config is not None:
        _check_same(config, found, directory)
        found = replace(found, **{key: getattr(config, key) for key in NEUTRAL_KEYS})
    return directory.path, found


def _check_same(given: TrainConfig, found: TrainConfig, directory: RunDirectory) -> None:
    """Raise if a setting that influences the result differs from the run's."""
    ours, theirs = _without_neutral(to_table(given)), _without_neutral(to_table(found))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"--resume {directory.path}: {key} = {ours.get(key)} differs from the run's "
                f"{theirs.get(key)}; a run resumes with the settings it was started with."
            )


def _without_neutral(table: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that influence the result."""
    return {key: value for key, value in table.items() if key not in NEUTRAL_KEYS}


def _suggested_settings(data: DataSource) -> dict[str, Any]:
    """Return settings for the model that follow from the data."""
    channels, height, width = data.image_shape
    size = height if height == width else [height, width]
    return {"classes": data.classes, "channels": channels, "image_size": size}


class _ProbeBatches:
    """Training batches for methods that look at data before training; the same on every rank."""

    def __init__(self, config: TrainConfig, data: DataSource) -> None:
        self._config, self._data = config, data

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._data.training(
            _PROBE_EPOCH, batch_size=self._config.batch_size, seed=self._config.seed
        )
        for batch in batches:
            yield batch.images, batch.labels


def _criterion(config: TrainConfig) -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
