"""MLPrune: train, prune the least important weights by K-FAC Fisher information, fine-tune.

Zeng and Urtasun, "MLPrune: Multi-Layer Pruning for Automated Neural Network Compression", 2018.

`MLPrune` is the method. `importances` measures the Fisher information by hooks that exist only
during the measurement. Linear layers and convolutions (any rank, grouped, transposed) that are
called as modules get the two factors of K-FAC. All other weights (such as the projections of
attention, which are not called as modules) get the diagonal of the same matrix.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from probmask.checks import Range
from probmask.core.allocation import Spread
from probmask.core.kronecker import obs_importance, second_moment, unfold
from probmask.core.noise import Stream, fold, uniform_
from probmask.errors import InputError
from probmask.masking.batchnorm import evaluating
from probmask.masking.distributed import averaged, rank
from probmask.masking.masker import Histogram, Masker, Progress
from probmask.masking.method import Context, Method, Phase
from probmask.masking.model_call import call_model
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.probe import batches_of, check_measured, without_cudnn_rnn
from probmask.masking.sites import Site, is_linear, is_stored_in_out
from probmask.methods.families.fine_tuning import (
    EpochFraction,
    RateFactor,
    prune_and_freeze_,
    tuning_phases,
)
from probmask.methods.families.stored import (
    StoredWeight,
    active_sparsity,
    largest_active,
    zero_inactive_,
)

# Range and bins of the histograms, equal for all layers, so that they can be compared.
_LOG_LOW, _LOG_HIGH, _LOG_BINS = -14.0, 2.0, 32
# Number of examples to unfold at a time: patches take more memory than inputs.
_EXAMPLES = 16

Holders = Sequence[tuple[nn.Module, str]]


@dataclass(frozen=True, kw_only=True)
class MLPrune(Method):
    """Train, keep the K weights whose pruning would increase the loss most, fine-tune.

        cost of θ_ij = θ_ij² / (2 [G⁻¹]_ii [A⁻¹]_jj),  A = E[a aᵀ],  G = E[g gᵀ]

    This is the increase of the loss to second order. a are the inputs of a layer (patches, in a
    convolution), and g the gradients of its outputs.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        scope: One threshold for all layers, or the same kept fraction in each.
        normalize: Divide the costs of each layer by their sum.
        damping: Added to the diagonals of A and G, as a fraction of their means.
        labels: ``"sampled"`` draws labels from the trained network, which gives the Fisher
            information. ``"given"`` uses those of the data, for losses other than classification.
        probe_batches: Number of batches of the probe to measure on; None takes all.
        dense_first: Leave the first layer dense; its weights count as kept.
        dense_last: Leave the last layer dense.
        fine_tune: Fraction of all epochs that comes after the pruning.
        fine_tune_rate: Factor on the learning rate while fine-tuning.
        fine_tune_schedule: Whether that rate stays constant or falls to zero along a cosine.
        equal_epochs: The configured epochs are those of both phases together. False: they are
            those of the first phase, and fine-tuning comes in addition.
    """

    name: ClassVar[str] = "mlprune"
    summary: ClassVar[str] = "trains, prunes the cheapest weights by K-FAC curvature, fine-tunes"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2018
    reference: ClassVar[str] = (
        "W. Zeng, R. Urtasun, MLPrune: Multi-Layer Pruning for Automated Neural Network "
        "Compression, 2018"
    )

    scope: Literal["global", "layer"] = "global"
    normalize: bool = True
    damping: Annotated[float, Range(1e-6, meaning="a fraction of the diagonal")] = 1e-3
    labels: Literal["sampled", "given"] = "sampled"
    probe_batches: Annotated[int, Range(1, meaning="a number of batches")] | None = 100
    dense_first: bool = False
    dense_last: bool = False
    fine_tune: EpochFraction = 0.2
    fine_tune_rate: RateFactor = 0.01
    fine_tune_schedule: Literal["constant", "cosine"] = "constant"
    equal_epochs: bool = True

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return the training and the fine-tuning, or one dense training at sparsity 0."""
        if self.sparsity == 0:
            return super().phases(epochs)
        return tuning_phases(
            "MLPrune",
            epochs,
            fine_tune=self.fine_tune,
            rate=self.fine_tune_rate,
            schedule=self.fine_tune_schedule,
            equal_epochs=self.equal_epochs,
        )

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "it measures whole weights on a probe"

    def begin(self, sites: Sequence[Site], context: Context) -> "MLPruneMasker":
        """Start dense."""
        return MLPruneMasker(self, sites, context)


class MLPruneMasker(Masker):
    """Masker of MLPrune."""

    saved = ("seed",)
    masked: tuple[StoredWeight, ...]

    def __init__(self, method: MLPrune, sites: Sequence[Site], context: Context) -> None:
        self.spread = Spread.over(
            method.scope, dense_first=method.dense_first, dense_last=method.dense_last
        )
        keep = method.keep_of(sites, self.spread)
        super().__init__(sites, [StoredWeight(site) for site in sites], keep)
        self.method = method
        self.model = context.model
        self.holders = tuple(site.holders for site in sites)
        self.seed = context.seed
        self._histograms: dict[str, Histogram] = {}
        self._probe = None if keep == self.size else context.required_probe("MLPrune")

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Measure the cost of pruning each weight, and prune the cheapest."""
        if self._probe is None:
            return  # nothing is pruned
        costs = self.costs()
        self._histograms = {
            f"log10_cost/{name}": log_histogram(cost)
            for name, cost in zip(self.names, costs, strict=True)
        }
        chosen = self.spread.select(costs, self.keep, self.names)
        prune_and_freeze_(self, self.masked, chosen, optimizers)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Keep pruned weights at zero; discard the costs, which no longer hold."""
        zero_inactive_(self.masked, self.weights)
        self._histograms = {}

    def choose(self) -> list[Tensor]:
        """Return the kept weights; before the pruning, the largest weights."""
        return largest_active(self, self.masked, self.spread)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity."""
        return active_sparsity(self, self.masked)

    def histograms(self) -> dict[str, Histogram]:
        """Return the costs of each layer right after the pruning."""
        return self._histograms

    def costs(self) -> list[Tensor]:
        """Return the cost of pruning each weight now."""
        assert self._probe is not None
        batches = batches_of("MLPrune", self._probe, self.weights[0].device)
        with _all_kept(self.masked), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(fold(self.seed, Stream.MLPRUNE_BATCHES, rank()))
            costs = importances(
                self.model,
                self.weights,
                self.holders,
                islice(batches, self.method.probe_batches),
                self._loss,
                damping=self.method.damping,
            )
        check_measured("MLPrune", self.names, costs)
        if self.method.normalize:
            costs = [cost / cost.sum().clamp_min(1e-300) for cost in costs]
        return costs

    def _loss(self, outputs: Any, targets: Any, index: int) -> Tensor:
        """Return the loss of a batch, summed over its examples."""
        assert self._probe is not None
        if self.method.labels == "given":
            return self._probe.criterion(outputs, targets) * len(targets)
        if not isinstance(outputs, Tensor) or outputs.dim() < 2:
            raise InputError(
                "MLPrune(labels='sampled'): labels are drawn from the network's outputs, which "
                "must be logits, one row per example; pass labels='given'."
            )
        logits = outputs.float()
        labels = sample_labels(logits.detach(), self.seed, index)
        return functional.cross_entropy(logits, labels, reduction="sum")


@contextmanager
def _all_kept(masked: Sequence[MaskedWeight]) -> Iterator[None]:
    """Keep all weights, because in evaluation masks that are not final prune too."""
    before = [(each, each.frozen, each.mask) for each in masked]
    for each in masked:
        each.frozen = True
        each.set_mask(torch.ones_like(each.mask))
    try:
        yield
    finally:
        for each, frozen, mask in before:
            each.frozen, each.mask = frozen, mask


def log_histogram(costs: Tensor) -> Histogram:
    """Return the histogram of the decimal logarithms of a layer's costs.

    Costs outside the range, and zeros, are counted in the outermost bins.
    """
    logs = costs.double().log10().clamp(_LOG_LOW, _LOG_HIGH)
    counts = torch.histc(logs, _LOG_BINS, min=_LOG_LOW, max=_LOG_HIGH)
    return Histogram(_LOG_LOW, _LOG_HIGH, tuple(int(count) for count in counts))


def sample_labels(logits: Tensor, seed: int, index: int) -> Tensor:
    """Draw a class from softmax(logits) along dimension 1, by inverting the distribution."""
    ends = logits.softmax(dim=1).cumsum(dim=1)
    u = uniform_(torch.empty_like(ends[:, :1]), seed, index)
    # At most the last class: the cumulative sum may have been rounded to less than 1.
    return (ends <= u).sum(dim=1).clamp_max(logits.shape[1] - 1)


def importances(
    model: nn.Module,
    weights: Sequence[Tensor],
    holders: Sequence[Holders],
    batches: Iterable[tuple[Any, Any]],
    loss: Callable[[Any, Any, int], Tensor],
    *,
    damping: float,
) -> list[Tensor]:
    """θ² / (2 [F⁻¹]_qq) of each weight q, F the Fisher information in evaluation mode.

    ``loss(outputs, targets, index)`` returns the loss summed over the examples of batch ``index``.
    The model is left unchanged, gradients included.
    """
    sites = [_Curvature(w, held) for w, held in zip(weights, holders, strict=True)]
    examples = 0
    with ExitStack() as hooks, evaluating(model), without_cudnn_rnn(model):
        for site in sites:
            site.watch(hooks)
        for weight in weights:
            hooks.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(True)  # pruning a weight that is not trained has a cost, too
        for index, (inputs, targets) in enumerate(batches):
            with torch.enable_grad():
                total = loss(call_model(model, inputs), targets, index)
                gradients = torch.autograd.grad(total, weights, allow_unused=True)
            for site, gradient in zip(sites, gradients, strict=True):
                site.add_gradient(gradient)
            examples += len(inputs)
    return [site.importance(examples, damping) for site in sites]


class _Curvature:
    """Sums over all examples and positions that give the Fisher information of a site."""

    def __init__(self, weight: Tensor, holders: Holders) -> None:
        self.weight = weight
        self.modules = [module for module, _ in holders]
        self.factored = all(
            (is_linear(module) or isinstance(module, _ConvNd)) and name == "weight"
            for module, name in holders
        )
        self.inputs = _Moment()
        self.gradients = _Moment()
        self.squares = torch.zeros_like(weight, dtype=torch.float32, requires_grad=False)

    def watch(self, hooks: ExitStack) -> None:
        """Observe every call of the site's modules, until ``hooks`` is closed."""
        if self.factored:
            for module in self.modules:
                hook = module.register_forward_hook(self._add_call, with_kwargs=True)
                hooks.callback(hook.remove)

    def add_gradient(self, gradient: Tensor | None) -> None:
        """Add the weight's gradient, summed over a batch.

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
        rows, columns = (a, g) if is_stored_in_out(self.modules[0]) else (g, a)
        return obs_importance(weight, rows, columns, damping)

    def _add_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        x = next(iter((*args, *kwargs.values()))).detach()
        # Read the input now: a later module may change it in place.
        for part in torch.split(_batched(module, x), _EXAMPLES):
            self.inputs.add(input_vectors(module, part))
        positions = _batched(module, x).shape[2:]

        def add_output_gradient(grad: Tensor) -> None:
            for part in torch.split(_batched(module, grad.detach()), _EXAMPLES):
                self.gradients.add(gradient_vectors(module, part, positions))

        output.register_hook(add_output_gradient)  # type: ignore[no-untyped-call]


class _Moment:
    """Σ v vᵀ over vectors, and their number."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, vectors: Tensor) -> None:
        """Add vectors of shape (n, groups, d)."""
        moment = second_moment(vectors.float())
        self.total = moment if self.total is None else self.total + moment
        self.count += len(vectors)


def input_vectors(module: nn.Module, x: Tensor) -> Tensor:
    """Return the input's factors of the weight's gradient: (n, groups, d), one per position."""
    if not isinstance(module, _ConvNd):
        return x.reshape(-1, 1, x.shape[-1])
    if isinstance(module, _ConvTransposeNd):
        return _channels(x, module.groups)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return _patches(module, functional.pad(x, module._reversed_padding_repeated_twice, mode=mode))


def gradient_vectors(module: nn.Module, grad: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the factors from the output's gradient; ``positions`` is the input's shape."""
    if not isinstance(module, _ConvNd):
        return grad.reshape(-1, 1, grad.shape[-1])
    if isinstance(module, _ConvTransposeNd):
        padded = functional.pad(grad, module._reversed_padding_repeated_twice)
        return _patches(module, padded, positions)
    return _channels(grad, module.groups)


def _patches(module: _ConvNd, x: Tensor, positions: Sequence[int] | None = None) -> Tensor:
    seen = unfold(x, module.kernel_size, module.stride, module.dilation)
    for axis, size in enumerate(positions or (), start=2):
        seen = seen.narrow(axis, 0, size)  # output_padding may add room for one more position
    width = seen.shape[1] // module.groups * math.prod(module.kernel_size)
    channels_last = seen.movedim(1, 1 + len(module.kernel_size))
    return channels_last.reshape(-1, module.groups, width)


def _channels(x: Tensor, groups: int) -> Tensor:
    return x.movedim(1, -1).reshape(-1, groups, x.shape[1] // groups)


def _batched(module: nn.Module, x: Tensor) -> Tensor:
    """Add a batch dimension to a single example, which a convolution takes without one."""
    if isinstance(module, _ConvNd) and x.dim() == 1 + len(module.kernel_size):
        return x.unsqueeze(0)
    return x
