"""What a run needs before its first update: its data, the settings of its network, its probe."""

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from probmask.data import DataSource, load_data
from probmask.errors import AbsentClassWarning, InputError
from probmask.masking.attach import attach
from probmask.masking.batchnorm import evaluating
from probmask.masking.macs import count_macs
from probmask.masking.method import Phase
from probmask.masking.probe import Probe
from probmask.masking.sites import find_sites
from probmask.models import build_model
from probmask.training.config import TrainConfig, make_method

_MOST_NAMED = 5
_PROBE_EPOCH = -1  # no epoch of the training has this order


def load_run_data(config: TrainConfig) -> DataSource:
    """The data of a run, with images held out if runs are compared by them."""
    if config.select_on == "val":
        return load_data(config.data, config.data_dir, config.data_args).with_validation()
    # None is held out, so that how many it would be need not be possible.
    settings = {key: v for key, v in config.data_args.items() if key != "validation_images"}
    return load_data(config.data, config.data_dir, settings)


def check_runnable(config: TrainConfig, data: DataSource) -> None:
    """Build everything that a run needs, so that what is wrong is said before a file is made.

    A method that looks at data is shown one batch: what it makes of more is not wanted yet.
    """
    steps = data.steps_per_epoch(config.batch_size)
    model = build_model(config.model, config.model_args, suggested=suggested_settings(data))
    example = torch.zeros(1, *data.image_shape)
    _check_takes(model, data, config)
    method = make_method(config)
    phases = method.phases(config.epochs)
    attach(
        model,
        method,
        total_steps=total_epochs(phases) * steps,
        steps_per_epoch=steps,
        include=config.include,
        exclude=config.exclude,
        example_inputs=example,
        phases=phases,
        probe=training_probe(config, data, most=1),
        seed=config.seed,
    )


def _check_takes(model: nn.Module, data: DataSource, config: TrainConfig) -> None:
    """Refuse images that the network is not made for, and a network with too few outputs."""
    example = torch.zeros(1, *data.image_shape)
    shape = "×".join(str(size) for size in data.image_shape)
    try:
        with evaluating(model):
            output = model(example)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--model {config.model}: does not take the {shape} images of {config.data}: {reason}."
        ) from error
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[1] < data.classes:
        found = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(
            f"--model {config.model}: gives {found} for an image, but {config.data} has "
            f"{data.classes} classes; it must give a number for each."
        )
    count_macs(model, find_sites(model), example)


def warn_of_absent_classes(data: DataSource) -> None:
    """Name the classes that no training image is of."""
    counts = data.train_labels.bincount(minlength=data.classes)
    absent = counts.eq(0).nonzero().flatten().tolist()
    if absent:
        names = [str(label) for label in absent]
        if data.class_names is not None:
            names = [f"{label} ({data.class_names[label]})" for label in absent]
        more = f" and {len(absent) - _MOST_NAMED} more" if len(absent) > _MOST_NAMED else ""
        warnings.warn(
            f"--data {data.name}: of its {data.classes} classes {', '.join(names[:_MOST_NAMED])}"
            f"{more} {'has' if len(absent) == 1 else 'have'} no training image and cannot be "
            "learnt; classes are counted from 0.",
            AbsentClassWarning,
            stacklevel=2,
        )


def total_epochs(phases: Sequence[Phase]) -> int:
    """The epochs of all phases together: what the training costs."""
    return sum(phase.epochs for phase in phases)


def training_probe(config: TrainConfig, data: DataSource, *, most: int | None = None) -> Probe:
    """Training batches for methods that look at some, the same on every rank; ``most`` of them."""

    def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
        smoothing = config.label_smoothing
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=smoothing)

    return Probe(_ProbeBatches(config, data, most), criterion)


class _ProbeBatches:
    """The training batches in an order of their own, from the beginning whenever asked."""

    def __init__(self, config: TrainConfig, data: DataSource, most: int | None) -> None:
        self._config, self._data, self._most = config, data, most

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._data.training(
            _PROBE_EPOCH, batch_size=self._config.batch_size, seed=self._config.seed
        )
        for batch in islice(batches, self._most):
            yield batch.images, batch.labels


def suggested_settings(data: DataSource) -> dict[str, Any]:
    """What a network may want to know of the data."""
    channels, height, width = data.image_shape
    size = height if height == width else [height, width]
    return {"classes": data.classes, "channels": channels, "image_size": size}
