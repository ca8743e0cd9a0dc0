"""The training loop: one run from its first update to its record."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from probmask.artifact import save
from probmask.core import schedules
from probmask.core.noise import fold
from probmask.data import Batch, DataSource, Shard
from probmask.errors import CheckpointError, InputError, NonFiniteError
from probmask.masking.attach import attach
from probmask.masking.method import Phase
from probmask.masking.sparsifier import Sparsifier
from probmask.models import build_model, model_settings
from probmask.training.checkpoint import read_checkpoint, write_checkpoint
from probmask.training.config import TrainConfig, make_method, to_table
from probmask.training.metrics import MetricsLog, read_history
from probmask.training.preparation import suggested_settings, total_epochs, training_probe
from probmask.training.progress import Quiet, Reporter, Status
from probmask.training.record import make_record
from probmask.training.record_format import INDIFFERENT
from probmask.training.run_directory import RunDirectory

# Counters that keep the streams of random numbers apart.
_INIT, _STEP, _MASKS = 0, 1, 2
_SECONDS_BETWEEN_LOOKS = 0.2
# BatchNorm is estimated anew from at most so many images: all of CIFAR, but not all of ImageNet.
_IMAGES_FOR_BATCHNORM = 50_000

MakeReporter = Callable[[str, int], Reporter]


def train_run(
    config: TrainConfig,
    data: DataSource,
    directory: RunDirectory,
    fabric: Fabric,
    make_reporter: MakeReporter = Quiet,
) -> dict[str, Any]:
    """Train until the record is written, from the checkpoint if there is one; return the record."""
    if directory.finished:
        directory.checkpoint.unlink(missing_ok=True)  # killed between the record and this
        return directory.read_record()
    training = Training(config, data, directory, fabric)
    if directory.checkpoint.exists():
        training.restore(read_checkpoint(directory.checkpoint))
    reporter = make_reporter(str(config.method["name"]), training.total_steps)
    with reporter:
        training.run(reporter)
    return training.finish()


class Training:
    """A run in progress.

    All randomness is a function of the seed and of the position in the run: batches, noise of the
    masks, and the global generator (dropout), which is seeded anew at every update. A checkpoint
    therefore holds no generator state, and a resumed run repeats an uninterrupted one bit by bit.
    """

    def __init__(
        self, config: TrainConfig, data: DataSource, directory: RunDirectory, fabric: Fabric
    ) -> None:
        self.config, self.directory, self.fabric = config, directory, fabric
        self.data = data
        self.steps_per_epoch = self.data.steps_per_epoch(config.batch_size)
        method = make_method(config)
        self.phases = method.phases(config.epochs)
        self.epochs = total_epochs(self.phases)
        self.total_steps = self.epochs * self.steps_per_epoch
        self.shard = Shard(fabric.global_rank, fabric.world_size)
        if config.batch_size % fabric.world_size:
            raise InputError(
                f"train(batch_size={config.batch_size}): {fabric.world_size} processes share a "
                "batch evenly; choose a multiple."
            )
        self.model_args = model_settings(
            config.model, config.model_args, suggested=suggested_settings(data)
        )
        self.model = self._build_model()
        self.example = torch.zeros(1, *self.data.image_shape)
        optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config.optimizer.lr,
            momentum=config.optimizer.momentum,
            weight_decay=config.optimizer.weight_decay,
            nesterov=config.optimizer.nesterov,
        )
        self.sparsifier: Sparsifier = attach(
            self.model,
            method,
            optimizer=optimizer,
            total_steps=self.total_steps,
            steps_per_epoch=self.steps_per_epoch,
            include=config.include,
            exclude=config.exclude,
            example_inputs=self.example,
            phases=self.phases,
            probe=training_probe(config, data),
            seed=fold(config.seed, _MASKS),
        )
        self.raw_optimizer = optimizer
        self.network, self.optimizer = fabric.setup(self.model, optimizer)
        self.fingerprint = data.fingerprint() if fabric.global_rank == 0 else ""
        self.step = 0
        self.seconds = 0.0
        self.log_length = 0
        # Sums over the epoch so far: loss, correct, images; of this rank's share of the batches.
        # The log is the first rank's: what it takes to repeat it exactly after a kill is in the
        # checkpoint, which that rank writes without asking the others.
        self.sums = torch.zeros(3, dtype=torch.float64, device=fabric.device)
        self.sparsity = 0.0

    def _build_model(self) -> nn.Module:
        torch.manual_seed(fold(self.config.seed, _INIT))
        return build_model(self.config.model, self.model_args)

    def run(self, reporter: Reporter) -> None:
        """Train to the last update."""
        log = self._open_log()
        with log if log is not None else nullcontext():
            self._run(log, reporter)

    def _run(self, log: MetricsLog | None, reporter: Reporter) -> None:
        started = last_checkpoint = shown = time.monotonic()
        before = self.seconds
        self.network.train()
        for batch in self._batches():
            self._update(batch)
            self.step += 1
            now = time.monotonic()
            if self.step % self.steps_per_epoch == 0:
                self._end_epoch(log, reporter)
            elif now - shown >= _SECONDS_BETWEEN_LOOKS:
                self._show(reporter, self.sums.tolist())
                shown = now
            self.seconds = before + now - started
            if now - last_checkpoint >= self.config.checkpoint_seconds:
                self._write_checkpoint(log)
                last_checkpoint = now

    def finish(self) -> dict[str, Any]:
        """Make the network final, measure it, write artifact and record."""
        # All ranks go through the same images, in batches that fit on one of them.
        batch_size = self.config.batch_size // self.shard.ranks
        batches = self.data.training(self.epochs, batch_size=batch_size, seed=self.config.seed)
        with closing(batches):  # or processes would go on reading
            some = islice(batches, max(1, _IMAGES_FOR_BATCHNORM // batch_size))
            summary = self.sparsifier.finalize(data=(batch.images for batch in some))
        record = make_record(
            self.config,
            self.data,
            self.model,
            summary,
            model_args=self.model_args,
            phases=self.phases,
            updates=self.total_steps,
            seconds=self.seconds,
            device=self.fabric.device,
            devices=self.fabric.world_size,
        )
        if self.fabric.global_rank == 0:
            described = {
                key: record[key]
                for key in (
                    "model",
                    "model_args",
                    "data",
                    "data_args",
                    "image_shape",
                    "class_names",
                    "method",
                    "seed",
                    "epochs",
                    "sparsity",
                    "test",
                    "versions",
                )
            }
            described["macs_per_weight"] = {
                layer["name"]: layer["macs_per_weight"] for layer in record["layers"]
            }
            save(self.model, self.directory.artifact, metadata=described, overwrite=True)
            record["bytes"] = self.directory.artifact.stat().st_size
            record["history"] = read_history(self.directory.metrics)
            self.directory.write_record(record)
            self.directory.checkpoint.unlink(missing_ok=True)
        finished: dict[str, Any] = self.fabric.broadcast(record)
        return finished

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of this very run."""
        if _deciding(state["config"]) != _deciding(to_table(self.config)):
            raise CheckpointError(
                f"{self.directory.checkpoint}: belongs to a run with another configuration; "
                "resume without changing settings."
            )
        if state["data"] != self.data.fingerprint():
            raise CheckpointError(
                f"{self.directory.checkpoint}: was trained on other data than there is now; bring "
                "back what the run began with (--data-dir, if it has moved)."
            )
        try:
            self.model.load_state_dict(state["model"])
            self.raw_optimizer.load_state_dict(state["optimizer"])
            self.sparsifier.load_state_dict(state["sparsifier"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"{self.directory.checkpoint}: does not fit the model ({reason}); "
                "has its code changed since?"
            ) from error
        self.data.recall_unreadable(state["unreadable"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.log_length = state["log_length"]
        self.sums.copy_(state["sums"])

    def _write_checkpoint(self, log: MetricsLog | None) -> None:
        if log is None:  # another rank than the first; all hold the same state
            return
        state = {
            "config": to_table(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.raw_optimizer.state_dict(),
            "sparsifier": self.sparsifier.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "log_length": log.length,
            "sums": self.sums,
            "data": self.fingerprint,
            "unreadable": self.data.unreadable,
        }
        write_checkpoint(self.directory.checkpoint, state)

    def _open_log(self) -> MetricsLog | None:
        if self.fabric.global_rank != 0:
            return None
        board = self.directory.tensorboard if self.config.tensorboard else None
        return MetricsLog(self.directory.metrics, board, length=self.log_length, step=self.step + 1)

    def _batches(self) -> Iterator[Batch]:
        first_epoch, position = divmod(self.step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.epochs):
            yield from self.data.training(
                epoch,
                batch_size=self.config.batch_size,
                seed=self.config.seed,
                start=position,
                shard=self.shard,
            )
            position = 0

    def _update(self, batch: Batch) -> None:
        torch.manual_seed(fold(self.config.seed, _STEP, self.fabric.global_rank, self.step))
        images, labels = self.fabric.to_device((batch.images, batch.labels))
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        self._set_learning_rate()
        self.optimizer.zero_grad()
        draws = self.sparsifier.draw_count
        for draw, share in enumerate(self.sparsifier.draws()):
            with self.fabric.no_backward_sync(self.network, enabled=draw < draws - 1):
                logits = self.network(images)
                loss = nn.functional.cross_entropy(
                    logits, labels, label_smoothing=self.config.label_smoothing
                )
                self.fabric.backward(share * (loss + self.sparsifier.penalty()))
            self.sparsifier.observe(loss)
        if self.config.optimizer.clip_norm is not None:
            weights = [p for g in self.raw_optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(weights, self.config.optimizer.clip_norm)
        self.optimizer.step()
        self._count(loss.detach(), logits.detach(), labels)

    def _count(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.sums[0] += loss * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)

    def _phase(self) -> tuple[Phase, int]:
        """The phase that the run is in, and the update at which it began."""
        begin = 0
        for phase in self.phases:
            end = begin + phase.epochs * self.steps_per_epoch
            if self.step < end:
                return phase, begin
            begin = end
        raise AssertionError("the run is over")

    def _set_learning_rate(self) -> None:
        settings = self.config.optimizer
        phase, begin = self._phase()
        length = phase.epochs * self.steps_per_epoch
        position = self.step - begin
        if settings.every == "epoch":
            position -= self.step % self.steps_per_epoch
        rate = settings.lr * phase.rate_scale
        if phase.rate == "cosine":
            rate *= schedules.cosine(position / length)
            if settings.warmup_epochs > 0:
                until = settings.warmup_epochs / phase.epochs
                rate *= schedules.warm_up((self.step - begin + 1) / length, until=until)
        for group in self.raw_optimizer.param_groups:
            group["lr"] = rate

    def _end_epoch(self, log: MetricsLog | None, reporter: Reporter) -> None:
        loss, correct, images = self.sums.tolist()
        self.sums.zero_()
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"update {self.step}: the loss is {loss}; lower optimizer.lr, or clip gradients by "
                "optimizer.clip_norm."
            )
        metrics = self.sparsifier.metrics()
        epoch = self.step // self.steps_per_epoch
        values = {"epoch": epoch, "loss": loss / images, "train_accuracy": 100 * correct / images}
        rate = self.raw_optimizer.param_groups[0]["lr"]
        if log is not None:
            values = {**values, "learning_rate": rate, **metrics}
            log.write(self.step, values, self.sparsifier.histograms())
        self.sparsity = metrics.get("expected_sparsity", 0.0)
        self._show(reporter, [loss, correct, images])

    def _show(self, reporter: Reporter, sums: list[float]) -> None:
        loss, correct, images = sums
        epoch = math.ceil(self.step / self.steps_per_epoch)
        reporter.show(
            Status(
                step=self.step,
                epoch=epoch,
                epochs=self.epochs,
                loss=loss / images,
                accuracy=100 * correct / images,
                sparsity=self.sparsity,
            )
        )


def _deciding(table: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration has an influence on the result."""
    return {key: value for key, value in table.items() if key not in INDIFFERENT}
