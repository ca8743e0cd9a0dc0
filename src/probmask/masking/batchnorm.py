"""BatchNorm statistics, re-estimated for a network whose weights have changed."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from probmask.errors import InputError
from probmask.masking.distributed import several_ranks, summed
from probmask.messages import one_line


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients; restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def batches_for_batchnorm(
    model: nn.Module, data: Iterable[Any], *, shared: bool = False
) -> Iterator[Any]:
    """Return an iterator over ``data``, empty if the model has no BatchNorm.

    If it is ``shared``, every rank has its own part, and some parts may be empty.

    Raises:
        InputError: If ``data`` is not iterable, or contains no batch for the model's BatchNorm.
    """
    try:
        batches = iter(data)
    except TypeError as error:
        raise InputError(
            f"finalize(data={type(data).__name__}): expected an iterable of batches, such as a "
            "DataLoader."
        ) from error
    if not _layers(model):
        return iter(())
    first = list(islice(batches, 1))
    number = torch.tensor([len(first)])
    if int(summed(number) if shared else number) == 0:
        raise InputError(
            "finalize(data=…): it contains no batch to estimate the BatchNorm statistics from."
        )
    return chain(first, batches)


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def reestimate_batchnorm(
    model: nn.Module, data: Iterable[Any], *, shared: bool = False, in_step: bool = False
) -> int:
    """Replace all running statistics by the average over ``data``; return the number of batches.

    If the data is ``shared``, every rank calls this with its own part, and the statistics are
    averaged over the batches of all ranks. ``in_step`` means that the ranks run the network
    together, as FSDP2 and SyncBatchNorm do. They then stop when one of them has no batch left.

    A batch is a tensor, a sequence whose first element is the input (labels may follow), or a
    mapping of keyword arguments. All layers but BatchNorm run in evaluation mode. ``data`` is not
    read if the model has no BatchNorm.
    """
    layers = _layers(model)
    if not layers:
        return 0
    shared = shared and several_ranks()
    data = batches_for_batchnorm(model, data, shared=shared)
    synchronized = any(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
    if shared and (in_step or synchronized):
        data = _while_all_have_one(data)
    momenta = [layer.momentum for layer in layers]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    before = [{name: b.clone() for name, b in layer.named_buffers()} for layer in layers]
    batches = 0
    with evaluating(model):
        for layer in layers:
            layer.train()
            layer.reset_running_stats()
            layer.momentum = None  # PyTorch then computes the cumulative average
        try:
            for batch in data:
                _forward(model, batch, device)
                batches += 1
        except BaseException:
            for layer, buffers in zip(layers, before, strict=True):
                for name, buffer in layer.named_buffers():
                    buffer.copy_(buffers[name])
            raise
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
    return _share_statistics(layers, batches) if shared else batches


def _while_all_have_one(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield batches until a rank has none left."""
    while True:
        batch = list(islice(batches, 1))
        if int(summed(torch.tensor([1 - len(batch)]))) > 0:
            return
        yield batch[0]


@torch.no_grad()
def _share_statistics(layers: list[_BatchNorm], batches: int) -> int:
    """Average the running statistics over the batches of all ranks; return their number."""
    buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
    tensors = [buffer for buffer in buffers if buffer is not None]
    device = tensors[0].device
    sums = [batches * tensor.double().to(device).reshape(-1) for tensor in tensors]
    found = summed(torch.cat([*sums, sums[0].new_tensor([batches])]))
    total = int(found[-1])
    parts = torch.split(found[:-1] / total, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
    for layer in layers:
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.fill_(total)
    return total


def _forward(model: nn.Module, batch: Any, device: torch.device) -> None:
    try:
        if isinstance(batch, Mapping):
            model(**{name: _to(value, device) for name, value in batch.items()})
        elif isinstance(batch, list | tuple):
            model(_to(batch[0], device))
        else:
            model(_to(batch, device))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise InputError(
            f"finalize(data=…): the model cannot compute with a batch ({one_line(error)}). A batch "
            "is a tensor, a sequence whose first element is the input, or a dictionary of keyword "
            "arguments."
        ) from error


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
