"""Data for methods that measure before they prune, and gradients on it without a training step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.modules.batchnorm import _BatchNorm

from probmask.core.noise import Stream, fold
from probmask.errors import InputError, NonFiniteError
from probmask.masking.batchnorm import evaluating
from probmask.masking.distributed import averaged, rank
from probmask.masking.model_call import call_model, move_inputs


@dataclass(frozen=True)
class Probe:
    """Batches of inputs and targets for methods that measure before they prune.

    Each rank may pass its own batches; the measurements are averaged over the ranks.

    Args:
        batches: An iterable that can be read repeatedly, such as a ``DataLoader``.
        criterion: The training loss, called with outputs and targets.

    Example:
        >>> import torch
        >>> batches = [(torch.randn(4, 8), torch.randint(2, (4,)))]
        >>> probe = probmask.Probe(batches)
    """

    batches: Iterable[Any]
    criterion: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def __post_init__(self) -> None:
        if not isinstance(self.batches, Iterable):
            raise InputError(
                f"Probe(batches={self.batches!r}): expected an iterable of batches, such as a "
                "DataLoader."
            )

    def __deepcopy__(self, _: dict[int, Any]) -> "Probe":
        return self  # copying a model must not copy the data


@contextmanager
def probing(model: nn.Module, seed: int) -> Iterator[None]:
    """Use batch statistics and no dropout; restore modes and random numbers afterwards.

    Inside, random numbers (such as those that shuffle batches) are a function of seed and rank.
    Buffers stay unchanged as long as the network is called through `network_at`.
    """
    with (
        evaluating(model),
        without_cudnn_rnn(model),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
    ):
        torch.default_generator.manual_seed(fold(seed, Stream.PROBE_BATCHES, rank()))
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.train()
        yield


@contextmanager
def without_cudnn_rnn(model: nn.Module) -> Iterator[None]:
    """Disable cuDNN if the model has recurrent layers: it differentiates them in training only."""
    enabled = cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = enabled


def batches_of(caller: str, probe: Probe, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield the probe's batches as inputs and targets on ``device``.

    Raises:
        InputError: If there is no batch, or a batch is not a pair of inputs and targets.
    """
    empty = True
    for batch in probe.batches:
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise InputError(
                f"{caller}: a batch of the probe is a {type(batch).__name__}; expected pairs of "
                "inputs and targets."
            )
        empty = False
        inputs, targets = (move_inputs(x, device) for x in batch[:2])
        yield inputs, targets
    if empty:
        raise InputError(f"{caller}: the probe contains no batch.")


def check_measured(caller: str, names: Sequence[str], scores: Sequence[Tensor]) -> None:
    """Raise unless the scores measured on a probe are finite.

    Raises:
        NonFiniteError: With the name of the first weight whose scores are not.
    """
    for name, score in zip(names, scores, strict=True):
        if not bool(score.isfinite().all()):
            raise NonFiniteError(
                f"{caller}: the scores of {name}, measured on the probe, contain NaN or infinity; "
                "look for such values in the probe's batches, and for a loss that overflows."
            )


def network_at(model: nn.Module, weights: dict[str, Tensor]) -> Callable[[Any], Any]:
    """Return the network as a function of its inputs, with these weights and copied buffers."""
    replaced = {**{name: b.clone() for name, b in model.named_buffers()}, **weights}
    return lambda inputs: call_model(model, inputs, weights=replaced)


def mean_gradient(losses: Iterable[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """Return ∂L/∂w in at least fp32, L the mean of these losses over all ranks.

    ``losses`` may be a generator: the graph of each loss is freed before the next is built.
    """
    sums = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights]
    count = 0
    for loss in losses:
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient
        count += 1
    return averaged([total / count for total in sums])
