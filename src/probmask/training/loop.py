"""The training loop: the updates of one run, in order."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import Tensor, nn

from probmask.core import schedules
from probmask.core.noise import RunStream, fold
from probmask.data import Batch, DataSource, Inputs, Shard
from probmask.errors import NonFiniteError
from probmask.masking.distributed import gathered, stacked, summed
from probmask.masking.method import Phase
from probmask.masking.model_call import call_model
from probmask.masking.sharding import rows_of
from probmask.masking.sparsifier import Sparsifier
from probmask.training.config import TrainConfig
from probmask.training.devices import is_sharded
from probmask.training.metrics import MetricsLog
from probmask.training.progress import Reporter, Status
from probmask.training.quantization import Quantizer

_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(kw_only=True)
class Loop:
    """Updates the weights and masks of a model, batch by batch.

    All randomness is a function of the seed and of the position in the run: the batches, the noise
    of the masks, and the global generator (dropout), which is reseeded before every update. A
    checkpoint therefore stores no generator state, and a resumed run repeats an uninterrupted one
    bit for bit.

    ``network`` is the model as Fabric has set it up. ``optimizer`` is the plain optimizer that the
    sparsifier is attached to. After the last update of the method, a `Quantizer` may replace the
    sparsifier. ``step`` counts the updates so far.
    """

    config: TrainConfig
    data: DataSource
    fabric: Fabric
    model: nn.Module
    network: _FabricModule
    optimizer: torch.optim.Optimizer
    sparsifier: Sparsifier | Quantizer
    phases: Sequence[Phase]
    step: int = 0
    _sparsity: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.steps_per_epoch = self.data.steps_per_epoch(self.config.batch_size)
        self.epochs = sum(phase.epochs for phase in self.phases)
        self.total_steps = self.epochs * self.steps_per_epoch
        self.shard = Shard(self.fabric.global_rank, self.fabric.world_size)
        optimizer = self.fabric.setup_optimizers(self.optimizer)
        assert isinstance(optimizer, _FabricOptimizer)  # of one optimizer
        self._fabric_optimizer = optimizer
        # Sums over the current epoch: loss, correct answers, examples. They cover this rank's share
        # of the batches. Checkpoints store those of all ranks, so that a resumed run writes the
        # same lines to the log.
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.fabric.device)

    def updates(self, log: MetricsLog | None, reporter: Reporter) -> Iterator[None]:
        """Train to the last update; yield after each one.

        Every epoch adds a line to ``log``, which only the first rank has.
        """
        reported = time.monotonic()
        self.network.train()
        for batch in self.batches():
            self.update(batch)
            if self.step % self.steps_per_epoch == 0:
                self._end_epoch(log, reporter)
            elif time.monotonic() - reported >= _SECONDS_BETWEEN_REPORTS:
                self._report(reporter, self._sums.tolist())
                reported = time.monotonic()
            yield

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's share of every batch that is left, from the current step on."""
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

    def update(self, batch: Batch) -> None:
        """Make one update of weights and masks."""
        self._reseed()
        inputs, labels = self.fabric.to_device((batch.inputs, batch.labels))
        if self.config.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self._set_learning_rate()
        self._fabric_optimizer.zero_grad()
        loss, logits = self._accumulate_gradients(inputs, labels)
        if self.config.optimizer.clip_norm is not None:
            weights = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(weights, self.config.optimizer.clip_norm)
        self._fabric_optimizer.step()
        self._count(loss.detach(), logits.detach(), labels)
        self.step += 1

    def check_finite(self) -> None:
        """Raise `NonFiniteError` if the loss, a trained weight or its momentum is not finite.

        All ranks call this and raise together.
        """
        problem = next((text for text in gathered(self._not_finite()) if text is not None), None)
        if problem is not None:
            raise self._diverged(problem)

    def _not_finite(self) -> str | None:
        """Return what is not finite on this rank."""
        loss = self._sums[0].item()
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {}).values()
            found = [parameter.detach(), *(value for value in state if isinstance(value, Tensor))]
            if parameter.requires_grad and not all(rows_of(t).isfinite().all() for t in found):
                return f"{name} is not finite"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the run and the sums over the current epoch, of every rank."""
        return {"step": self.step, "sums": stacked(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position that `state_dict` returned on any number of ranks."""
        self.step = state["step"]
        sums = state["sums"].reshape(-1, 3)  # earlier versions stored those of the first rank
        if len(sums) != self.shard.ranks:  # another number of ranks: the first one has the total
            rest = sums.new_zeros((self.shard.ranks - 1, 3))
            sums = torch.cat([sums.sum(0, keepdim=True), rest])
        self._sums.copy_(sums[self.shard.rank])

    def _reseed(self) -> None:
        """Seed the global generator for this update."""
        seed = fold(self.config.seed, RunStream.UPDATE, self.fabric.global_rank, self.step)
        if self.fabric.device.type == "cpu":
            # torch.manual_seed also queues the seed for devices that are not in use, which takes
            # half a millisecond.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _accumulate_gradients(self, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Run forward and backward once per draw of the masks; return the last loss and logits."""
        draws = self.sparsifier.draw_count
        for draw, weight in enumerate(self.sparsifier.draws()):
            # The masked weights of each draw are gathered, so the gradients of each are divided.
            waits = draw < draws - 1 and not is_sharded(self.fabric)
            with self._no_backward_sync() if waits else nullcontext():
                logits = call_model(self.network, inputs)
                loss = nn.functional.cross_entropy(
                    logits, labels, label_smoothing=self.config.label_smoothing
                )
                self.fabric.backward(weight * (loss + self.sparsifier.penalty()))
            self.sparsifier.observe(loss)
        return loss, logits

    def _no_backward_sync(self) -> AbstractContextManager[None]:
        return self.fabric.no_backward_sync(self.network)

    def _count(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self._sums[0] += loss * len(labels)
        self._sums[1] += (logits.argmax(1) == labels).sum()
        self._sums[2] += len(labels)

    def _current_phase(self) -> tuple[Phase, int]:
        """Return the current phase and the step at which it starts."""
        begin = 0
        for phase in self.phases:
            end = begin + phase.epochs * self.steps_per_epoch
            if self.step < end:
                return phase, begin
            begin = end
        raise AssertionError("there is no update after the last phase")

    def _set_learning_rate(self) -> None:
        settings = self.config.optimizer
        phase, begin = self._current_phase()
        length = phase.epochs * self.steps_per_epoch
        position = self.step - begin
        if settings.every == "epoch":
            position -= self.step % self.steps_per_epoch
        rate = settings.rate * phase.rate_scale
        if phase.rate == "cosine":
            rate *= schedules.cosine(position / length)
            if settings.warmup_epochs > 0 and phase.warm_up:
                until = settings.warmup_epochs / phase.epochs
                rate *= schedules.warm_up((self.step - begin + 1) / length, until=until)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _end_epoch(self, log: MetricsLog | None, reporter: Reporter) -> None:
        loss, correct, examples = summed(self._sums).tolist()
        self._sums.zero_()
        if not math.isfinite(loss):
            raise self._diverged(f"the loss is {loss}")
        metrics = self.sparsifier.metrics()
        histograms = self.sparsifier.histograms()  # on all ranks, which may count together
        if log is not None:
            values = {
                "epoch": self.step // self.steps_per_epoch,
                "loss": loss / examples,
                "train_accuracy": 100 * correct / examples,
                "learning_rate": self.optimizer.param_groups[0]["lr"],
                **metrics,
            }
            log.write(self.step, values, histograms)
        self._sparsity = metrics.get("expected_sparsity", 0.0)
        self._report(reporter, [loss, correct, examples])

    def _diverged(self, problem: str) -> NonFiniteError:
        return NonFiniteError(
            f"update {self.step}: {problem}; lower optimizer.lr, or clip gradients with "
            "optimizer.clip_norm."
        )

    def _report(self, reporter: Reporter, sums: list[float]) -> None:
        loss, correct, examples = sums
        reporter.show(
            Status(
                step=self.step,
                epoch=math.ceil(self.step / self.steps_per_epoch),
                epochs=self.epochs,
                loss=loss / examples,
                accuracy=100 * correct / examples,
                sparsity=self._sparsity,
            )
        )
