"""GraSP: keep the weights that the flow of gradients lives on, before training."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from probmask.checks import check_choice, check_count, check_within
from probmask.core.noise import fold
from probmask.errors import InputError
from probmask.masking.probing import averaged, batches_of, mean_gradient, network_at, probing
from probmask.masking.protocol import Context, Method, Probe
from probmask.masking.sites import Site
from probmask.masking.stored import StoredMasker, chosen_at_once

# A counter that keeps this stream of random numbers apart from the noise of masks.
_XAVIER = -4


@dataclass(frozen=True, kw_only=True)
class GraSP(Method):
    """Score weights once by what the gradient's norm would lose with them.

    s = -w (H g), with g = ∂L/∂w and H = ∂²L/∂w² at the initial weights: to first order the change
    of g·g / 2 if the weight goes. The weights with the largest s go, of all layers; the others
    stay. L is the mean loss of ``samples_per_class`` examples of each class (None: whole batches as
    they come) with the outputs divided by ``temperature``, in ``passes`` portions of that size.
    ``xavier_linear`` draws linear layers from Xavier's distribution for the scoring, as the
    released code does; they are trained from what they were.
    """

    name: ClassVar[str] = "grasp"
    summary: ClassVar[str] = "scores -w (Hg) on balanced samples before training"
    group: ClassVar[str] = "discussed in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "C. Wang, G. Zhang and R. Grosse, Picking Winning Tickets Before Training by Preserving "
        "Gradient Flow, ICLR 2020"
    )

    samples_per_class: int | None = 10
    passes: int = 1
    temperature: float = 200.0
    xavier_linear: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_class is not None:
            check_count(
                "GraSP", "samples_per_class", self.samples_per_class, least=1, meaning="examples"
            )
        check_count("GraSP", "passes", self.passes, least=1, meaning="portions of examples")
        check_within(
            "GraSP", "temperature", self.temperature, 1e-3, 1e6, meaning="what divides the outputs"
        )
        check_choice("GraSP", "xavier_linear", self.xavier_linear, (True, False))

    def begin(self, sites: Sequence[Site], context: Context) -> StoredMasker:
        """Look at the data and choose, for good."""
        return chosen_at_once(self, sites, lambda: self._merits(sites, context))

    def _merits(self, sites: Sequence[Site], context: Context) -> list[Tensor]:
        """w (H g), the negative of the score: the largest stay."""
        probe = context.required_probe("GraSP")
        weights = self._scored_weights(sites, context.seed)
        parameters = list(weights.values())
        with probing(context.model, context.seed), sdpa_kernel(SDPBackend.MATH):
            # Other kernels of attention have no second derivative.
            network = network_at(context.model, weights)
            portions = self._portions(probe, network, sites[0].weight.device)

            def losses() -> Iterator[Tensor]:
                for inputs, targets in portions:
                    yield probe.criterion(network(inputs) / self.temperature, targets)

            products = hessian_gradient(losses, parameters)
        merits = [w.detach() * hg for w, hg in zip(parameters, products, strict=True)]
        return averaged(merits)  # ranks may not have the same weights yet

    def _scored_weights(self, sites: Sequence[Site], seed: int) -> dict[str, Tensor]:
        weights = {site.name: site.weight.detach().clone() for site in sites}
        for index, site in enumerate(sites):
            if self.xavier_linear and isinstance(site.holders[0][0], nn.Linear):
                weight = weights[site.name]
                generator = torch.Generator(weight.device).manual_seed(fold(seed, _XAVIER, index))
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

    ``losses`` makes them anew each time it is called.
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
    """The first examples of each class, ``per_class`` in each portion, as far as there are any.

    Batches are read until every class has enough, at most to their end.
    """
    missing = [per_class * portions] * classes
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(classes)]
    for inputs, targets in batches:
        _check_labels(inputs, targets)
        for label in sorted(set(targets.tolist())):
            if not 0 <= label < classes:
                raise InputError(
                    f"attach(GraSP): there is a label {label}, but the network has {classes} "
                    "outputs; pass samples_per_class=None to take batches as they come."
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
            "attach(GraSP): it takes as many examples of each class, but the targets are not one "
            "label for each input; pass samples_per_class=None to take batches as they come."
        )
