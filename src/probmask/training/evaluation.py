"""Accuracy of a network on test or validation examples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from probmask.data import Batch, DataSource
from probmask.errors import InputError
from probmask.masking.batchnorm import evaluating
from probmask.masking.distributed import rank, summed, world_size
from probmask.masking.macs import count_macs
from probmask.masking.model_call import call_model, move_inputs
from probmask.masking.sharding import is_dtensor
from probmask.masking.sites import find_sites
from probmask.messages import one_line
from probmask.training.config import TrainConfig

# What a network raises for inputs that it cannot process.
_CALL_ERRORS = (RuntimeError, TypeError, IndexError, KeyError, AttributeError)


@dataclass(frozen=True)
class Score:
    """Number of correctly classified examples."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Top-1 accuracy in percent."""
        return 100 * self.correct / self.total

    def as_table(self) -> dict[str, Any]:
        """Return the score as records store it."""
        return {"correct": self.correct, "total": self.total, "accuracy": self.accuracy}


def evaluate_model(
    model: nn.Module,
    data: DataSource,
    *,
    part: Literal["val", "test"] = "test",
    device: torch.device | None = None,
) -> Score:
    """Classify all examples of a part of the data, in evaluation mode.

    The ranks of a distributed training share the batches.

    Args:
        model: Network on ``device``. Every module's mode is restored afterwards.
        data: Data set, whose batches are moved to ``device``.
        part: "test", or "val" for the examples that were held out from training.
        device: Device of the model; the default is the CPU.

    Returns:
        The number of correct answers and of examples.

    Raises:
        InputError: No example of the part can be read.
    """
    correct = total = 0
    parts = data.testing if part == "test" else data.validation
    batches = parts(batch_size=data.examples_per_pass)
    in_step = any(is_dtensor(parameter) for parameter in model.parameters())
    with evaluating(model):
        for batch, is_own in _share_of_rank(batches):
            if not is_own and not in_step:
                continue
            predicted = call_model(model, move_inputs(batch.inputs, device)).argmax(1)
            if not is_own:
                continue
            correct += int((predicted == batch.labels.to(device)).sum())
            total += len(batch.labels)
    correct, total = summed(torch.tensor([correct, total])).tolist()
    if total == 0:
        raise InputError(f"--data {data.name}: none of its {part} {data.examples} can be read.")
    return Score(correct, total)


def _share_of_rank(batches: Iterable[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield the same number of batches on every rank, and whether each is of this rank.

    The ranks of a sharded network run it together, so one that has no batch left borrows one.
    """
    pair: tuple[Batch, bool] | None = None
    for index, batch in enumerate(batches):
        place = index % world_size()
        if place == 0 and pair is not None:
            yield pair
        if place in (0, rank()):
            pair = batch, place == rank()
    if pair is not None:
        yield pair


def check_model(
    model: nn.Module,
    data: DataSource,
    config: TrainConfig,
    *,
    device: torch.device | None = None,
) -> None:
    """Raise `InputError` unless the model on ``device`` can be trained on the data and measured."""
    name = config.model
    try:
        output = _output_for_one_example(model, data, device)
    except _CALL_ERRORS as error:
        raise InputError(
            f"--model {name}: cannot process the {data.description} of {data.name}: "
            f"{one_line(error)}."
        ) from error
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < data.classes:
        found = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(
            f"--model {name}: returns {found} for one {data.examples.removesuffix('s')}, but "
            f"{data.name} has {data.classes} classes; it must return one number per class."
        )
    sites = find_sites(model, include=config.include, exclude=config.exclude)
    count_macs(model, sites, move_inputs(data.example(), device))


def check_fits(
    model: nn.Module,
    data: DataSource,
    *,
    device: torch.device | None = None,
    trained_on: Any = None,
) -> None:
    """Raise `InputError` unless a trained network can be evaluated on the data.

    ``trained_on`` lists the names of the classes that the network was trained on, if known.
    """
    try:
        output = _output_for_one_example(model, data, device)
    except _CALL_ERRORS as error:
        raise InputError(
            f"--data {data.name}: the network cannot process its {data.description}: "
            f"{one_line(error)}."
        ) from error
    if output.shape != (1, data.classes):
        raise InputError(
            f"--data {data.name}: has {data.classes} classes, but the network returns an output of "
            f"shape {tuple(output.shape[1:])}; pass the data it was trained on."
        )
    if isinstance(trained_on, list) and data.class_names is not None:
        for ours, theirs in zip(trained_on, data.class_names, strict=False):
            if ours != theirs:
                raise InputError(
                    f"--data {data.name}: has a class {theirs!r} where the network was trained on "
                    f"{ours!r}; pass the data it was trained on."
                )


def _output_for_one_example(
    model: nn.Module, data: DataSource, device: torch.device | None = None
) -> Any:
    with evaluating(model):
        return call_model(model, move_inputs(data.example(largest=True), device))
