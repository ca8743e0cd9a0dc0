"""A training run: prepare the network, train it, finish it with an artifact and a record."""

import time
from collections.abc import Iterator
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from probmask.artifact import save
from probmask.core.noise import RunStream, fold
from probmask.data import DataSource, load_data
from probmask.errors import CheckpointError, InputError
from probmask.masking.attach import attach
from probmask.masking.probe import Probe
from probmask.messages import one_line
from probmask.models import build_model, model_settings
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.config import TrainConfig, make_method, to_table
from probmask.training.evaluation import check_model
from probmask.training.loop import Loop
from probmask.training.metrics import MetricsLog, read_history
from probmask.training.progress import MakeReporter, Reporter
from probmask.training.record import artifact_metadata, make_record
from probmask.training.record_format import without_neutral_keys
from probmask.training.run_directory import RunDirectory

_PROBE_EPOCH = -1  # an epoch number that training does not use, so the probe has its own order
# Images for re-estimating BatchNorm statistics: all of CIFAR, but a fraction of ImageNet.
_IMAGES_FOR_BATCHNORM = 50_000


class TrainingRun:
    """One training run. The calls follow in this order:

    1. ``TrainingRun(config, data)`` builds the network, once, and checks that it fits the data.
    2. `prepare` attaches the method.
    3. `restore` loads the checkpoint, if there is one.
    4. `train` makes the updates and writes checkpoints.
    5. `finish` measures the network and writes the artifact and the record.

    `complete` does the last three.
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
        torch.manual_seed(fold(config.seed, RunStream.INITIAL_WEIGHTS))
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
                f"batch evenly; choose a multiple of {fabric.world_size}."
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
            seed=fold(config.seed, RunStream.MASKS),
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
        if without_neutral_keys(state["config"]) != without_neutral_keys(to_table(self.config)):
            raise CheckpointError(
                f"{path}: belongs to a run with another configuration; resume without changing "
                "settings."
            )
        if not self.data.matches(state["data"]):
            raise CheckpointError(
                f"{path}: was written while training on different data; restore the original data, "
                "or pass its new place as --data-dir."
            )
        try:
            self.model.load_state_dict(state["model"])
            self.loop.optimizer.load_state_dict(state["optimizer"])
            self.loop.sparsifier.load_state_dict(state["sparsifier"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = one_line(error)
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


def _suggested_settings(data: DataSource) -> dict[str, Any]:
    """Return settings for the model that follow from the data."""
    channels, height, width = data.image_shape
    size = height if height == width else [height, width]
    return {"classes": data.classes, "channels": channels, "image_size": size}


class _ProbeBatches:
    """Training batches for methods that read data before training; the same on every rank."""

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
