"""GraSP: keep the weights that preserve the flow of gradients, chosen before training."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from probmask.checks import Range
from probmask.core.noise import Stream, fold
from probmask.errors import InputError
from probmask.masking.distributed import averaged
from probmask.masking.method import Context, Method
from probmask.masking.probe import Probe, batches_of, mean_gradient, network_at, probing
from probmask.masking.sites import Site, is_linear
from probmask.methods.families.stored import StoredMasker, keep_largest_scores


@dataclass(frozen=True, kw_only=True)
class GraSP(Method):
    """Score weights once by the change of the gradient's norm if they are pruned.

        s = -w (H g),  g = ∂L/∂w,  H = ∂²L/∂w² at the initial weights

    To first order, s is the change of g·g / 2 if the weight is pruned. The weights with the largest
    s of all layers are pruned. L is the mean loss of the examples, with the outputs divided by
    ``temperature``.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        samples_per_class: Number of examples of each class per pass. None takes whole batches.
        passes: Number of passes, each with its own examples.
        temperature: Divisor of the outputs.
        xavier_linear: Score linear layers at weights drawn from Xavier's distribution, as the
            released code does. They are trained from their own initial weights.
    """

    name: ClassVar[str] = "grasp"
    summary: ClassVar[str] = "scores -w (Hg) on balanced samples before training"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "C. Wang, G. Zhang and R. Grosse, Picking Winning Tickets Before Training by Preserving "
        "Gradient Flow, ICLR 2020"
    )

    samples_per_class: Annotated[int, Range(1, meaning="a number of examples")] | None = 10
    passes: Annotated[int, Range(1, meaning="a number of passes")] = 1
    temperature: Annotated[float, Range(1e-3, 1e6, "a divisor of the outputs")] = 200.0
    xavier_linear: bool = False

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "it measures whole weights on a probe"

    def begin(self, sites: Sequence[Site], context: Context) -> StoredMasker:
        """Measure the scores and choose the final masks."""
        return keep_largest_scores(self, sites, lambda: self._merits(sites, context))

    def _merits(self, sites: Sequence[Site], context: Context) -> list[Tensor]:
        """w (H g), the negative of the score: the largest are kept."""
        probe = context.required_probe("GraSP")
        weights = self._scored_weights(sites, context.seed)
        parameters = list(weights.values())
        with probing(context.model, context.seed), sdpa_kernel(SDPBackend.MATH):
            # sdpa_kernel: the other kernels of attention have no second derivative.
            network = network_at(context.model, weights)
            portions = self._portions(probe, network, sites[0].weight.device)

            def losses() -> Iterator[Tensor]:
                for inputs, targets in portions:
                    yield probe.criterion(network(inputs) / self.temperature, targets)

            products = hessian_gradient(losses, parameters)
        merits = [w.detach() * hg for w, hg in zip(parameters, products, strict=True)]
        return averaged(merits)  # ranks may still have different weights

    def _scored_weights(self, sites: Sequence[Site], seed: int) -> dict[str, Tensor]:
        weights = {site.name: site.weight.detach().clone() for site in sites}
        for index, site in enumerate(sites):
            if self.xavier_linear and is_linear(site.holders[0][0]):
                weight = weights[site.name]
                generator = torch.Generator(weight.device).manual_seed(
                    fold(seed, Stream.GRASP_XAVIER, index)
                )
                nn.init.xavier_normal_(weight, generator=generator)
        return {name: weight.requires_grad_() for name, weight in weights.items()}

    def _portions(
        self, probe: Probe, network: Callable[[Any], Any], device: torch.device
    ) -> list[tuple[Any, Any]]:
        batches = batches_of("attach(GraSP)", probe, device)
        if self.samples_per_class is None:
            return list(islice(batches, self.passes))
        first = next(batches)
        _check_labels(*first)
        with torch.no_grad():
            classes = network(first[0]).shape[-1]
        return balanced(chain([first], batches), classes, self.samples_per_class, self.passes)


def hessian_gradient(
    losses: Callable[[], Iterable[Tensor]], weights: Sequence[Tensor]
) -> list[Tensor]:
    """H g for the mean L of the losses, g = ∂L/∂w, H = ∂²L/∂w²: the derivative of g(w)·g by w.

    ``losses`` computes the losses each time it is called.
    """
    gradient = mean_gradient(losses(), weights)

    def inner_products() -> Iterator[Tensor]:
        for loss in losses():
            at_w = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
            yield torch.stack(
                [(g * fixed).sum() for g, fixed in zip(at_w, gradient, strict=True)]
            ).sum()

    return mean_gradient(inner_products(), weights)


def balanced(
    batches: Iterable[tuple[Tensor, Tensor]], classes: int, per_class: int, portions: int
) -> list[tuple[Tensor, Tensor]]:
    """Return portions of the first ``per_class`` examples of each class, fewer if there are fewer.

    Batches are read until every class has enough examples, or to the end.
    """
    missing = [per_class * portions] * classes
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(classes)]
    for inputs, targets in batches:
        _check_labels(inputs, targets)
        for label in sorted(set(targets.tolist())):
            if not 0 <= label < classes:
                raise InputError(
                    f"attach(GraSP): the data has a label {label}, but the network has {classes} "
                    "outputs; pass samples_per_class=None to take whole batches."
                )
            where = (targets == label).nonzero().flatten()[: missing[label]]
            missing[label] -= len(where)
            found[label] += [(inputs[i : i + 1], targets[i : i + 1]) for i in where.tolist()]
        if not any(missing):
            break
    parts = [
        [pair for pairs in found for pair in pairs[i * per_class : (i + 1) * per_class]]
        for i in range(portions)
    ]
    return [
        (torch.cat([x for x, _ in part]), torch.cat([y for _, y in part])) for part in parts if part
    ]


def _check_labels(inputs: Any, targets: Any) -> None:
    if (
        not isinstance(inputs, Tensor)
        or not isinstance(targets, Tensor)
        or targets.is_floating_point()
        or targets.shape != inputs.shape[:1]
    ):
        raise InputError(
            "attach(GraSP): it takes the same number of examples of each class, but a batch is not "
            "one tensor of inputs with one label per input; pass samples_per_class=None to take "
            "whole batches (command line: --set method.samples_per_class=none)."
        )
