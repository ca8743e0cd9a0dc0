"""BatchNorm statistics, estimated anew for the network as it now is."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from probmask.errors import InputError
from probmask.masking.modes import evaluating


def batches_for_batchnorm(model: nn.Module, data: Iterable[Any]) -> Iterator[Any]:
    """The batches of ``data``, refused if the model has BatchNorm and there are none."""
    if not _layers(model):
        return iter(())
    batches = iter(data)
    for first in batches:
        return chain([first], batches)
    raise InputError("finalize(data=…): there is no batch in it to estimate BatchNorm from.")


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def reestimate_batchnorm(model: nn.Module, data: Iterable[Any]) -> int:
    """Replace all running statistics by the plain average over ``data``; return the batches used.

    Batches are what the model takes: a tensor, a sequence whose first element is the input (labels
    may follow), or a mapping of keyword arguments. Everything but BatchNorm runs in evaluation
    mode; a model without BatchNorm is left alone, its data unread.
    """
    layers = _layers(model)
    if not layers:
        return 0
    data = batches_for_batchnorm(model, data)
    momenta = [layer.momentum for layer in layers]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = 0
    with evaluating(model):
        for layer in layers:
            layer.train()
            layer.reset_running_stats()
            layer.momentum = None  # PyTorch's word for the cumulative average
        try:
            for batch in data:
                _forward(model, batch, device)
                batches += 1
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
    return batches


def _forward(model: nn.Module, batch: Any, device: torch.device) -> None:
    if isinstance(batch, Mapping):
        model(**{name: _to(value, device) for name, value in batch.items()})
    elif isinstance(batch, list | tuple):
        model(_to(batch[0], device))
    else:
        model(_to(batch, device))


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
