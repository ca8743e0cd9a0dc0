"""Looking at data before training: losses of a network that is left as it was."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from probmask.core.noise import fold
from probmask.errors import InputError
from probmask.masking.modes import evaluating
from probmask.masking.protocol import Probe
from probmask.masking.ranks import rank, running

# A counter that keeps this stream of random numbers apart from the noise of masks.
_BATCHES = -3


@contextmanager
def probing(model: nn.Module, seed: int) -> Iterator[None]:
    """Normalise by batch statistics, without dropout; modes and random numbers come back.

    Inside, random numbers (those that shuffle the batches) are a function of seed and rank.
    Statistics in buffers are safe as long as the network is called through `network_at`.
    """
    with evaluating(model), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(fold(seed, _BATCHES, rank()))
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.train()
        yield


def batches_of(caller: str, probe: Probe, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """The probe's batches as inputs and targets on ``device``; refused if there is none."""
    empty = True
    for batch in probe.batches:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise InputError(
                f"{caller}: a batch of the probe is a {type(batch).__name__}; it takes pairs of "
                "inputs and targets."
            )
        empty = False
        inputs, targets = (x.to(device) if isinstance(x, Tensor) else x for x in batch[:2])
        yield inputs, targets
    if empty:
        raise InputError(f"{caller}: there is no batch in the probe.")


def network_at(model: nn.Module, weights: dict[str, Tensor]) -> Callable[[Any], Any]:
    """The network as a function of its inputs, with these weights; its buffers stay as they are."""
    replaced = {**{name: b.clone() for name, b in model.named_buffers()}, **weights}
    return lambda inputs: functional_call(model, replaced, (inputs,))


def mean_gradient(losses: Iterable[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """∂L/∂w, in fp32 at least, of the mean L of these losses and of all ranks'; none has it stored.

    The losses may be made one after the other: each one's graph is let go before the next.
    """
    sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
    count = 0
    for loss in losses:
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient
        count += 1
    return averaged([total / count for total in sums])


def averaged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each tensor over all ranks."""
    if not running():
        return list(tensors)
    # NCCL takes no tensors of the CPU, where a model may still be when masks are attached.
    nccl = distributed.get_backend() == "nccl"
    means = []
    for tensor in tensors:
        total = (tensor.cuda() if nccl else tensor).clone()
        distributed.all_reduce(total)
        means.append((total / distributed.get_world_size()).to(tensor.device))
    return means
