"""A training run: prepare the network, train it, finish it with an artifact and a record."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule
from torch import Tensor, nn

from probmask.artifact import save
from probmask.core.noise import RunStream, fold
from probmask.data import DataSource, Inputs, load_data
from probmask.errors import (
    CheckpointError,
    InputError,
    RestartWarning,
)
from probmask.masking.attach import attach
from probmask.masking.distributed import gathered
from probmask.masking.probe import Probe
from probmask.messages import listed, one_line
from probmask.models import MODELS, build_model, model_settings
from probmask.training import checkpoint_schema as schema
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.checkpoint_schedule import CheckpointSchedule
from probmask.training.config import TrainConfig, make_method, phases_of, to_table
from probmask.training.devices import is_sharded
from probmask.training.evaluation import check_model
from probmask.training.initial_weights import load_initial_weights
from probmask.training.loop import Loop
from probmask.training.metrics import MetricsLog, check_text, thin_history
from probmask.training.optimizer import build_optimizer, is_own_optimizer, optimizer_factory
from probmask.training.progress import MakeReporter, Reporter
from probmask.training.quantization import Quantizer
from probmask.training.record import artifact_metadata, make_record, versions
from probmask.training.resume_checks import (
    check_together,
    field_rules,
    joined_versions,
    naming_checkpoint,
    same_settings,
)
from probmask.training.run_directory import RunDirectory
from probmask.training.shard_files import read_rows, write_rows
from probmask.training.sharded_building import (
    Blueprint,
    OnMeta,
    build_seeded,
    fill_rows,
    log_whole_network,
)
from probmask.training.sharded_state import divided_by_shape, divided_like, whole_state

_PROBE_EPOCH = -1  # an epoch number that training does not use, so the probe has its own order
# Examples for re-estimating BatchNorm statistics: all of CIFAR, but a fraction of ImageNet.
_EXAMPLES_FOR_BATCHNORM = 50_000
# What PyTorch and the modules of a network raise for a state that does not fit.
_LOADING_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TrainingRun:
    """One training run. The calls follow in this order:

    1. ``TrainingRun(config, data)`` builds the network, once, checks that it fits the data, and
       loads the initial weights. With ``resumed``, those of the checkpoint follow instead.
    2. `prepare` attaches the method.
    3. `restore` loads the checkpoint, if there is one.
    4. `train` makes the updates and writes checkpoints.
    5. `finish` measures the network and writes the artifact and the record.

    `complete` does the last three.
    """

    def __init__(self, config: TrainConfig, data: DataSource, *, resumed: bool = False) -> None:
        self.config = config
        self.data = data
        self.method = make_method(config)
        self.phases = phases_of(config)
        self._method_phases = self.method.phases(config.epochs)
        self.steps_per_epoch = data.steps_per_epoch(config.batch_size)
        self.total_steps = sum(phase.epochs for phase in self.phases) * self.steps_per_epoch
        self._method_steps = sum(each.epochs for each in self._method_phases) * self.steps_per_epoch
        if config.channels_last and data.image_shape is None:
            raise InputError(
                f"train(channels_last=True): {data.name} has no images; omit channels_last."
            )
        suggested = data.model_settings()
        self.model_args = model_settings(config.model, config.model_args, suggested=suggested)
        self._resumed = resumed
        self._build = partial(build_model, config.model, self.model_args)
        self._blueprint = self._make_blueprint() if config.strategy == "fsdp" else None
        if self._blueprint is None:
            self.model = build_seeded(self._build, self._seed)
            check_model(self.model, data, config)
            self._load_initial_weights()
        else:
            self.model = self._blueprint.model  # without values until `prepare`
        self.seconds = 0.0
        self._lines: list[str] = []  # of the log
        self._fingerprint = ""  # of the data
        self._versions = [versions()]  # of all sessions, if they differ
        self._loop: Loop | None = None

    @property
    def _seed(self) -> int:
        return fold(self.config.seed, RunStream.INITIAL_WEIGHTS)

    def _make_blueprint(self) -> Blueprint | None:
        """Return a blueprint of the network, or None if it needs memory to be built or checked."""
        blueprint = Blueprint.of(self._build)
        if blueprint is None:
            return None
        try:
            with OnMeta():
                check_model(blueprint.model, self.data, self.config, device=torch.device("meta"))
        except Exception as error:  # the whole network is checked instead, which may succeed
            log_whole_network(one_line(error))
            return None
        return blueprint

    def _load_initial_weights(self) -> None:
        """Load the file of a pretrained start, unless a checkpoint follows."""
        config = self.config
        if config.init is not None and not self._resumed:
            load_initial_weights(
                self.model,
                config.init,
                skip=config.init_skip,
                sha256=config.init_sha256,
                own_name=MODELS[config.model].own_name if config.model in MODELS else None,
            )

    def _set_up_network(self, fabric: Fabric) -> _FabricModule:
        """Set up the network; if there is a blueprint, build the rows of this rank."""
        if self._blueprint is None:
            return fabric.setup_module(self.model)
        self.model, rows = self._blueprint.build_rows(
            seed=self._seed, rank=fabric.global_rank, ranks=fabric.world_size
        )
        network = fabric.setup_module(self.model)
        if rows:
            fill_rows(self.model, rows, fabric.device)
        self._load_initial_weights()
        return network

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
        if config.quantize is not None and is_sharded(fabric):
            raise InputError(
                "train(strategy='fsdp', quantize=…): integers need whole weights; train with "
                "strategy ddp."
            )
        self.data = data
        self._fingerprint = _common_fingerprint(data)
        network = self._set_up_network(fabric)
        optimizer = build_optimizer(config.optimizer, self.model.parameters())
        sparsifier = attach(
            self.model,
            self.method,
            optimizer=optimizer,
            total_steps=self._method_steps,
            steps_per_epoch=self.steps_per_epoch,
            include=config.include,
            exclude=config.exclude,
            frozen=config.frozen,
            example_inputs=data.example(),
            phases=self._method_phases,
            probe=Probe(_ProbeBatches(config, data), _criterion(config)),
            pretrained=config.init is not None,
            seed=fold(config.seed, RunStream.MASKS),
        )
        self._loop = Loop(
            config=config,
            data=data,
            fabric=fabric,
            model=self.model,
            network=network,
            optimizer=optimizer,
            sparsifier=sparsifier,
            phases=self.phases,
        )

    def complete(self, directory: RunDirectory, make_reporter: MakeReporter) -> dict[str, Any]:
        """Train and finish in ``directory``; return the record."""
        exists = gathered(directory.checkpoint.exists())
        if not all(exists) and exists[0]:
            raise CheckpointError(
                f"{directory.checkpoint}: rank {exists.index(False)} cannot read it; a run resumes "
                "from a directory on a file system that all nodes share."
            )
        if exists[0]:
            self.restore(directory)
        elif self._is_first_rank and directory.metrics.exists():
            warnings.warn(
                f"{directory.path}: the checkpoint is missing; the training starts again from the "
                "first epoch.",
                RestartWarning,
                stacklevel=2,
            )
        with make_reporter(str(self.config.method["name"]), self.total_steps) as reporter:
            self.train(directory, reporter)
        return self.finish(directory)

    def train(self, directory: RunDirectory, reporter: Reporter) -> None:
        """Make all updates that are left, and write checkpoints on the way.

        Raises:
            NonFiniteError: The training diverged. The last finite checkpoint stays.
        """
        seconds_before = self.seconds
        started = time.monotonic()
        schedule = CheckpointSchedule(self.config.checkpoint_seconds)
        log = self._open_log(directory)
        with log or nullcontext(), naming_checkpoint(directory.checkpoint):
            for _ in self.loop.updates(log, reporter):
                self.seconds = seconds_before + time.monotonic() - started
                if self._is_quantized(self.loop.step):
                    self._begin_quantization()
                if schedule.is_due():
                    self.loop.check_finite()
                    self._write_checkpoint(directory, log)
            self.loop.check_finite()
        if log is not None:
            self._lines = log.lines

    def _write_checkpoint(self, directory: RunDirectory, log: MetricsLog | None) -> None:
        """Write a checkpoint, all ranks together. The earlier one stays until it is complete."""
        state, shards = self._state(log), None
        if is_sharded(self.loop.fabric):
            stored = None if directory.is_copied else write_rows(state, directory.path)
            if stored is None:
                state = whole_state(state, keep=log is not None)
            else:
                state, shards = stored
        if log is not None:
            write_checkpoint(directory.checkpoint, state)
            directory.remove_shards(keep=shards)

    def _is_quantized(self, step: int) -> bool:
        """Return whether the masks are final and the weights integers after this many updates."""
        return self.config.quantize is not None and step >= self._method_steps

    def _begin_quantization(self, *, resumed: bool = False) -> None:
        """Replace the sparsifier by a quantizer, unless that is done; see `_is_quantized`.

        If the run is resumed, the checkpoint has the weights and masks.
        """
        sparsifier, config = self.loop.sparsifier, self.config
        assert config.quantize is not None
        if isinstance(sparsifier, Quantizer):
            return
        if resumed:
            sparsifier.discard()
        else:
            sparsifier.finalize()
        self.loop.sparsifier = Quantizer(
            self.model, config.quantize, include=config.include, exclude=config.exclude
        )

    def finish(self, directory: RunDirectory) -> dict[str, Any]:
        """Finalize the masks, measure the network, write artifact and record."""
        # The ranks share the examples, in batches of the size that each of them trains with.
        batch_size = self.config.batch_size
        batches = self.data.training(
            self.loop.epochs, batch_size=batch_size, seed=self.config.seed, shard=self.loop.shard
        )
        with closing(batches):  # ends the worker processes
            some = islice(batches, max(1, _EXAMPLES_FOR_BATCHNORM // batch_size))
            summary = self.loop.sparsifier.finalize(data=(batch.inputs for batch in some))
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
            earlier_versions=self._versions[:-1],
        )
        model = self._whole_model()
        if model is not None:
            save(
                model,
                directory.artifact,
                metadata=artifact_metadata(record),
                values=None if self.config.quantize is None else self.config.quantize.values,
                overwrite=True,
            )
            record["bytes"] = directory.artifact.stat().st_size
            record["history"] = thin_history(self._lines)
            directory.write_record(record)
            directory.remove_checkpoint()
        finished: dict[str, Any] = self.loop.fabric.broadcast(record)
        return finished

    def _whole_model(self) -> nn.Module | None:
        """Return the finished network with whole weights on the first rank, None on the others."""
        if not is_sharded(self.loop.fabric):
            return self.model if self._is_first_rank else None
        state = whole_state(self.model.state_dict(), keep=self._is_first_rank)
        if not self._is_first_rank:
            return None
        if self._blueprint is None:
            model = self._build()
            model.load_state_dict(state)
            return model
        with OnMeta():
            model = self._build()
        model.load_state_dict(state, assign=True)  # without a second copy of the weights
        return model

    def restore(self, directory: RunDirectory) -> None:
        """Continue from the checkpoint in ``directory``.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another run.
        """
        path = directory.checkpoint
        state = read_rows(read_checkpoint(path), path, list(self.model.parameters()))
        field = schema.Field(path)
        schema.table(field_rules(self.total_steps))(state, field)
        if not same_settings(state["config"], to_table(self.config)):
            raise CheckpointError(
                f"{path}: belongs to a run with another configuration; resume without changing "
                "settings."
            )
        if not self.data.matches(state["data"]):
            raise CheckpointError(
                f"{path}: was written while training on different data; restore the original data, "
                "or pass its new place as --data-dir."
            )
        if self._is_quantized(state["step"]):
            self._begin_quantization(resumed=True)
        check_together(state, self._state_rules(state["step"]), field)
        lines = self._checked_lines(state, path)
        try:
            self._load(state)
            self.loop.sparsifier.summary()  # computes the masks, and thus uses the method's state
            self.loop.sparsifier.metrics()
        except _LOADING_ERRORS as error:  # extra state of a module can raise anything
            raise field.error(f"cannot be loaded ({one_line(error)})") from error
        self.loop.load_state_dict(state)
        self.data.recall_unreadable(state["unreadable"])
        self.seconds = state["seconds"]
        self._lines = lines
        self._versions = joined_versions(state["versions"], path)

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load the states of network, optimizer and method; each rank takes its part of them."""
        model, sparsifier = self.model, self.loop.sparsifier
        optimizer = divided_by_shape(state["optimizer"], list(model.parameters()))
        model.load_state_dict(divided_like(state["model"], model.state_dict()))
        self.loop.optimizer.load_state_dict(optimizer)
        if isinstance(sparsifier, Quantizer):
            sparsifier.load_state_dict(state["sparsifier"])
        else:
            weights = [site.weight for site in sparsifier.sites]
            sparsifier.load_state_dict(divided_by_shape(state["sparsifier"], weights))

    def _state_rules(self, step: int) -> dict[str, schema.Rule]:
        """Return the rules of the states of the network, its optimizer and its method."""
        return {
            "model": schema.model_state(self.model.state_dict()),
            "optimizer": self._optimizer_rule(),
            "sparsifier": self._sparsifier_rule(step),
        }

    def _sparsifier_rule(self, step: int) -> schema.Rule:
        sparsifier = self.loop.sparsifier
        if isinstance(sparsifier, Quantizer):
            return schema.quantizer_state(sparsifier)
        return schema.sparsifier_state(sparsifier, self.model, step=step)

    def _optimizer_rule(self) -> schema.Rule:
        settings = self.config.optimizer
        if is_own_optimizer(settings.name):
            return schema.stored_values  # only the user's class knows its state
        return schema.optimizer_state(self.loop.optimizer, optimizer_factory(settings))

    def _checked_lines(self, state: Mapping[str, Any], path: Path) -> list[str]:
        try:
            epochs = state["step"] // self.steps_per_epoch
            return check_text(state["log"], epochs=epochs, where=f"{path}: log")
        except InputError as error:
            raise CheckpointError(str(error)) from error

    def _state(self, log: MetricsLog | None) -> dict[str, Any]:
        """Return everything that `restore` needs. Weights may be sharded, and so is their state.

        All ranks call this together; the one with the log has its lines.
        """
        return {
            "config": to_table(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.loop.optimizer.state_dict(),
            "sparsifier": self.loop.sparsifier.state_dict(),
            **self.loop.state_dict(),
            "seconds": self.seconds,
            "log": "" if log is None else log.text,
            "versions": self._versions,
            "data": self._fingerprint,
            "unreadable": self.data.unreadable,
        }

    def _open_log(self, directory: RunDirectory) -> MetricsLog | None:
        if not self._is_first_rank:
            return None
        tensorboard = directory.tensorboard if self.config.tensorboard else None
        return MetricsLog(
            directory.metrics, tensorboard, lines=self._lines, step=self.loop.step + 1
        )

    @property
    def _is_first_rank(self) -> bool:
        return self.loop.fabric.global_rank == 0


def load_run_data(config: TrainConfig) -> DataSource:
    """Load the data of a run, with validation examples held out if runs are selected by them."""
    if config.select_on == "val":
        return load_data(config.data, config.data_dir, config.data_args).with_validation()
    # Nothing is held out, so any number of validation examples is accepted.
    settings = {k: v for k, v in config.data_args.items() if not k.startswith("validation_")}
    return load_data(config.data, config.data_dir, settings)


def _common_fingerprint(data: DataSource) -> str:
    """Return the digest of the data, or raise if a rank has different data than the first one."""
    found: list[str] = gathered(data.fingerprint())
    different = [f"rank {rank}" for rank, digest in enumerate(found) if digest != found[0]]
    if different:
        ranks = f"{different[0]} has" if len(different) == 1 else f"{listed(different)} have"
        raise InputError(
            f"train(data={data.name!r}): {ranks} different data than rank 0; give all nodes the "
            "same files and the same version of probmask."
        )
    return found[0]


class _ProbeBatches:
    """Training batches for methods that read data before training; the same on every rank."""

    def __init__(self, config: TrainConfig, data: DataSource) -> None:
        self._config, self._data = config, data

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        batches = self._data.training(
            _PROBE_EPOCH, batch_size=self._config.batch_size, seed=self._config.seed
        )
        for batch in batches:
            yield batch.inputs, batch.labels


def _criterion(config: TrainConfig) -> nn.CrossEntropyLoss:
    return nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
