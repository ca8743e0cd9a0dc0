"""Edge-popup: find a subnetwork of a random network by training scores, not weights.

Ramanujan et al., "What's Hidden in a Randomly Weighted Neural Network?", CVPR 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import Momentum, Range
from probmask.core.allocation import Spread
from probmask.core.noise import Stream, uniform_
from probmask.masking.masker import Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.gates import gate_parameter, straight_through_mask
from probmask.methods.families.kaiming import check_fan_in, fan_in, fix_weights, kaiming_normal_


@dataclass(frozen=True, kw_only=True)
class EdgePopup(Method):
    """Learn which weights of a random network to use, without training them.

        w_e = w 1[|s| among the k n largest of its layer]        ∂L/∂s = ∂L/∂w_e · w · sign(s)

    k is the fraction kept and n the size of the layer. The gradient passes straight through the
    mask. Scores are trained by SGD at the rate of the model's own optimizer, which trains biases
    and norms.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        weights: The weights of the random network: drawn from Kaiming's normal distribution,
            only their signs times its standard deviation ("signed"), or unchanged ("given").
        scaled: Multiply the weights by 1/√k.
        scope: ``"layer"`` keeps the same fraction of each layer, ``"global"`` compares the scores
            of all layers.
        momentum: The momentum of SGD on the scores.
        weight_decay: The weight decay of the scores.
    """

    name: ClassVar[str] = "edge-popup"
    summary: ClassVar[str] = "finds a subnetwork of a random network by scores"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2020
    reference: ClassVar[str] = (
        "Ramanujan, Wortsman, Kembhavi, Farhadi, Rastegari: What's Hidden in a Randomly Weighted "
        "Neural Network?, CVPR 2020"
    )

    weights: Literal["kaiming", "signed", "given"] = "kaiming"
    scaled: bool = False
    scope: Literal["layer", "global"] = "layer"
    momentum: Momentum = 0.9
    weight_decay: Annotated[float, Range(0, meaning="a weight decay")] = 1e-4

    def refuses_shards(self) -> str:
        """Return why shards are not supported."""
        return "it does not train the weights, and FSDP2 computes no gradient for them"

    def begin(self, sites: Sequence[Site], context: Context) -> "EdgePopupMasker":
        """Draw weights and scores; the weights are fixed from now on."""
        if self.weights != "given":
            check_fan_in(f"EdgePopup(weights={self.weights!r})", "pass weights='given'", sites)
        masker = EdgePopupMasker(self, sites, context)
        self._draw_weights(sites, context.seed, masker.kept_fractions)
        fix_weights(sites)
        return masker

    @torch.no_grad()
    def _draw_weights(self, sites: Sequence[Site], seed: int, kept: Sequence[float]) -> None:
        if self.weights != "given":
            kaiming_normal_(sites, seed)
        for site, fraction in zip(sites, kept, strict=True):
            if self.weights == "signed":
                site.weight.sign_().mul_(math.sqrt(2 / fan_in(site)))
            if self.scaled:
                site.weight.div_(math.sqrt(fraction))


class PopupWeight(MaskedWeight):
    """One site: w m, with the scores as the gate and their mask as ``drawn``."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.gate = gate_parameter(site, _score_bound(site))
        self.drawn = torch.zeros_like(self.gate, requires_grad=False)

    def training_weight(self, weight: Tensor) -> Tensor:
        """Return the weights of the subnetwork."""
        return weight * straight_through_mask(self.drawn, self.gate.abs()).to(weight.dtype)


class EdgePopupMasker(Masker):
    """Masker of edge-popup."""

    masked: tuple[PopupWeight, ...]

    def __init__(self, method: EdgePopup, sites: Sequence[Site], context: Context) -> None:
        super().__init__(sites, [PopupWeight(site) for site in sites], method.keep_of(sites))
        self.method = method
        self.spread = Spread.over(method.scope)
        for index, masked in enumerate(self.masked):
            noise = torch.empty_like(masked.gate)
            uniform_(noise, context.seed, Stream.EDGE_POPUP_SCORES, index)
            masked.gate.data.mul_(2 * noise - 1)

    @property
    def kept_fractions(self) -> list[float]:
        """The fraction of each layer that is kept; with one budget for all, that of the network."""
        if self.method.scope == "global":
            return [self.keep / self.size] * len(self.weights)
        counts = self.spread.counts([tuple(weight.shape) for weight in self.weights], self.keep)
        pairs = zip(counts, self.weights, strict=True)
        return [max(1, count) / weight.numel() for count, weight in pairs]

    def trainables(self) -> list[Trainables]:
        """Train the scores by SGD, at the rate of the model's own optimizer."""
        optimizer = torch.optim.SGD(
            [masked.gate for masked in self.masked],
            lr=0.1,
            momentum=self.method.momentum,
            weight_decay=self.method.weight_decay,
        )
        return [Trainables(optimizer, lambda _, rate: rate)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Select the subnetwork of the current scores."""
        if not self.frozen:
            for masked, chosen in zip(self.masked, self.choose(), strict=True):
                masked.drawn.copy_(chosen)

    def choose(self) -> list[Tensor]:
        """Return the weights with the largest |s|."""
        scores = [masked.gate.detach().abs() for masked in self.masked]
        return self.spread.select(scores, self.keep, self.names)

    def metrics(self) -> dict[str, float]:
        """Return the sparsity, which is constant."""
        return {"expected_sparsity": 1 - self.keep / self.size}


def _score_bound(site: Site) -> Tensor:
    """1/√fan_in, the bound of Kaiming's uniform distribution with a = √5."""
    bound = 1 / math.sqrt(fan_in(site))
    return torch.full_like(site.weight, bound, dtype=torch.float32, requires_grad=False)
