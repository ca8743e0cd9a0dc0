"""The Fisher information of each layer, measured by hooks that are there only meanwhile.

Linear layers and convolutions (any rank, grouped, transposed) that are called as modules get the
two factors of K-FAC. Everything else (attention's projections, which are used past any module, and
weights of other modules) gets the diagonal of the same matrix.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from probmask.core.kronecker import obs_importance, second_moment, unfold
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.probing import averaged

# Examples unfolded at a time: patches take as often the room of a batch as a kernel has entries.
_EXAMPLES = 16

Holders = Sequence[tuple[nn.Module, str]]


def importances(
    model: nn.Module,
    weights: Sequence[Tensor],
    holders: Sequence[Holders],
    batches: Iterable[tuple[Any, Any]],
    loss: Callable[[Any, Any, int], Tensor],
    *,
    damping: float,
) -> list[Tensor]:
    """θ² / (2 [F⁻¹]_qq) of each weight q, for the F of the network as it is in evaluation.

    ``loss`` gives the loss of outputs and targets, summed over the examples of the batch of this
    number; the model is left as it was, gradients included.
    """
    sites = [Curvature(w, held) for w, held in zip(weights, holders, strict=True)]
    examples = 0
    with ExitStack() as hooks, _evaluating_all_weights(model):
        for site in sites:
            site.watch(hooks)
        for weight in weights:
            hooks.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(True)  # also if it is not trained, removing it has a cost
        for index, (inputs, targets) in enumerate(batches):
            with torch.enable_grad():
                total = loss(model(inputs), targets, index)
                gradients = torch.autograd.grad(total, weights, allow_unused=True)
            for site, gradient in zip(sites, gradients, strict=True):
                site.see_gradient(gradient)
            examples += len(inputs)
    return [site.importance(examples, damping) for site in sites]


class Curvature:
    """What was seen of one site: sums over all examples and positions so far."""

    def __init__(self, weight: Tensor, holders: Holders) -> None:
        self.weight = weight
        self.modules = [module for module, _ in holders]
        self.factored = all(
            isinstance(module, nn.Linear | _ConvNd) and name == "weight" for module, name in holders
        )
        self.inputs = Moment()
        self.gradients = Moment()
        self.squares = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)

    def watch(self, hooks: ExitStack) -> None:
        """Look at every call of the site's modules, until ``hooks`` is closed."""
        if self.factored:
            for module in self.modules:
                hook = module.register_forward_hook(self._see_call, with_kwargs=True)
                hooks.callback(hook.remove)

    def see_gradient(self, gradient: Tensor | None) -> None:
        """Take note of the weight's gradient, summed over a batch.

        With labels drawn from the model, gradients of different examples are uncorrelated, so the
        square of their sum is, in expectation, the sum of their squares.
        """
        if gradient is not None:
            self.squares += gradient.float().square()

    def importance(self, examples: int, damping: float) -> Tensor:
        """θ² / (2 [F⁻¹]_qq), F = E[Σ a aᵀ] ⊗ E[mean g gᵀ] over positions, averaged over ranks."""
        weight = self.weight.detach()
        if self.inputs.total is None or self.gradients.total is None:
            (mean,) = averaged([self.squares / examples])
            return weight.double().square() * mean.double() / 2
        a, g = averaged([self.inputs.total / examples, self.gradients.total / self.gradients.count])
        rows, columns = (a, g) if isinstance(self.modules[0], _ConvTransposeNd) else (g, a)
        return obs_importance(weight, rows, columns, damping)

    def _see_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        assert isinstance(module, nn.Linear | _ConvNd)
        x = next(iter((*args, *kwargs.values()))).detach()
        # At once: a later module may change its input in place.
        for part in torch.split(_batched(module, x), _EXAMPLES):
            self.inputs.add(input_vectors(module, part))
        places = _batched(module, x).shape[2:]

        def see_output_gradient(grad: Tensor) -> None:
            for part in torch.split(_batched(module, grad.detach()), _EXAMPLES):
                self.gradients.add(gradient_vectors(module, part, places))

        output.register_hook(see_output_gradient)  # type: ignore[no-untyped-call]


class Moment:
    """Σ v vᵀ over vectors, and their number."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, vectors: Tensor) -> None:
        """Add vectors of shape (n, groups, d)."""
        moment = second_moment(vectors.float())
        self.total = moment if self.total is None else self.total + moment
        self.count += len(vectors)


def input_vectors(module: nn.Linear | _ConvNd, x: Tensor) -> Tensor:
    """What a weight's gradient has from the input: (n, groups, d), one vector per position."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, 1, x.shape[-1])
    if isinstance(module, _ConvTransposeNd):
        return _channels(x, module.groups)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return _patches(module, functional.pad(x, module._reversed_padding_repeated_twice, mode=mode))


def gradient_vectors(module: nn.Linear | _ConvNd, grad: Tensor, places: Sequence[int]) -> Tensor:
    """What a weight's gradient has from the gradient of the output; ``places`` of the input."""
    if isinstance(module, nn.Linear):
        return grad.reshape(-1, 1, grad.shape[-1])
    if isinstance(module, _ConvTransposeNd):
        padded = functional.pad(grad, module._reversed_padding_repeated_twice)
        return _patches(module, padded, places)
    return _channels(grad, module.groups)


def _patches(module: _ConvNd, x: Tensor, places: Sequence[int] | None = None) -> Tensor:
    seen = unfold(x, module.kernel_size, module.stride, module.dilation)
    for axis, size in enumerate(places or (), start=2):
        seen = seen.narrow(axis, 0, size)  # output_padding may have room for one more
    width = seen.shape[1] // module.groups * math.prod(module.kernel_size)
    channels_last = seen.movedim(1, 1 + len(module.kernel_size))
    return channels_last.reshape(-1, module.groups, width)


def _channels(x: Tensor, groups: int) -> Tensor:
    return x.movedim(1, -1).reshape(-1, groups, x.shape[1] // groups)


def _batched(module: nn.Linear | _ConvNd, x: Tensor) -> Tensor:
    """With a batch dimension: a convolution also takes a single example without one."""
    if isinstance(module, _ConvNd) and x.dim() == 1 + len(module.kernel_size):
        return x.unsqueeze(0)
    return x


@contextmanager
def _evaluating_all_weights(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, but for its masks, which would remove weights there."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = isinstance(module, MaskedWeight)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
