"""Edge-popup: train scores, not weights, and find a subnetwork of a random network.

Ramanujan et al., "What's Hidden in a Randomly Weighted Neural Network?", CVPR 2020.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from probmask.checks import check_choice, check_within
from probmask.core.allocation import uniform
from probmask.core.noise import uniform_
from probmask.core.selection import select_top
from probmask.errors import InputError
from probmask.masking.budgets import checked_keep
from probmask.masking.gated import GatedWeight, straight_through
from probmask.masking.initialization import kaiming_normal_
from probmask.masking.protocol import Context, Masker, Method, Progress, Trainables
from probmask.masking.sites import Site

# A counter that keeps the scores' stream of random numbers apart from others.
_SCORES = -3


@dataclass(frozen=True, kw_only=True)
class EdgePopup(Method):
    """Learn which weights of a random network to use, without training them.

        w_e = w 1[|s| among the k n largest of its layer]        ∂L/∂s = ∂L/∂w_e · w · sign(s)

    The mask's own slope, zero almost everywhere, is passed over. Weights stay as drawn at the start
    (``weights="kaiming"``: normal; ``"signed"``: their signs times Kaiming's standard deviation;
    ``"given"``: as they are), times 1/√k if ``scaled``. ``scope="global"`` lets the layers compete
    for one budget. Scores are trained by SGD at the rate of the model's own optimizer, which goes
    on training biases and norms.
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
    momentum: float = 0.9
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("EdgePopup", "weights", self.weights, ("kaiming", "signed", "given"))
        check_choice("EdgePopup", "scaled", self.scaled, (True, False))
        check_choice("EdgePopup", "scope", self.scope, ("layer", "global"))
        check_within("EdgePopup", "momentum", self.momentum, 0, 0.999, meaning="of SGD on scores")
        check_within(
            "EdgePopup", "weight_decay", self.weight_decay, 0, math.inf, meaning="of the scores"
        )

    def begin(self, sites: Sequence[Site], context: Context) -> "EdgePopupMasker":
        """Draw weights and scores; from here on weights do not change."""
        self._check(sites)
        masker = EdgePopupMasker(self, sites, context)
        self._draw_weights(sites, context.seed, masker.kept_fractions)
        for site in sites:
            site.weight.requires_grad_(False)
            site.weight.grad = None
        return masker

    def _check(self, sites: Sequence[Site]) -> None:
        for site in sites:
            if self.weights != "given" and site.weight.dim() < 2:
                raise InputError(
                    f"EdgePopup(weights={self.weights!r}): {site.name} has {site.weight.dim()} "
                    "dimension and so no fan-in to draw it by; exclude it or pass weights='given'."
                )

    @torch.no_grad()
    def _draw_weights(self, sites: Sequence[Site], seed: int, kept: Sequence[float]) -> None:
        if self.weights != "given":
            kaiming_normal_(sites, seed)
        for site, fraction in zip(sites, kept, strict=True):
            if self.weights == "signed":
                site.weight.sign_().mul_(math.sqrt(2 / _fan_in(site.weight)))
            if self.scaled:
                site.weight.div_(math.sqrt(fraction))


class PopupWeight(GatedWeight):
    """One site: its scores, and as ``drawn`` the mask they stand for."""

    def training_weight(self, weight: Tensor) -> Tensor:
        """The subnetwork's weights."""
        return weight * straight_through(self.drawn, self.gate.abs()).to(weight.dtype)


class EdgePopupMasker(Masker):
    """Edge-popup at work on one model."""

    masks: tuple[PopupWeight, ...]

    def __init__(self, method: EdgePopup, sites: Sequence[Site], context: Context) -> None:
        super().__init__(sites, [PopupWeight(site, _scores(site)) for site in sites])
        for index, mask in enumerate(self.masks):
            noise = uniform_(torch.empty_like(mask.gate), context.seed, _SCORES, index)
            mask.gate.data.mul_(2 * noise - 1)
        self.method = method
        self.sizes = [site.size for site in sites]
        self.keep = checked_keep(method, sites)
        self.layer_keep = uniform(self.sizes, self.keep)
        if self.keep == sum(self.sizes):
            self.freeze()

    @property
    def kept_fractions(self) -> list[float]:
        """What part of each layer is kept, as far as that is known beforehand."""
        if self.method.scope == "global":
            return [self.keep / sum(self.sizes)] * len(self.sizes)
        return [max(1, keep) / size for keep, size in zip(self.layer_keep, self.sizes, strict=True)]

    def trainables(self) -> list[Trainables]:
        """SGD on the scores, at the rate of the model's own optimizer."""
        optimizer = torch.optim.SGD(
            [mask.gate for mask in self.masks],
            lr=0.1,
            momentum=self.method.momentum,
            weight_decay=self.method.weight_decay,
        )
        return [Trainables(optimizer, lambda _, rate: rate)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Find the subnetwork that the scores stand for."""
        if not self.frozen:
            for mask, chosen in zip(self.masks, self.choose(), strict=True):
                mask.drawn.copy_(chosen)

    def choose(self) -> list[Tensor]:
        """The largest |s|: of each layer, or of all."""
        scores = [mask.gate.detach().abs() for mask in self.masks]
        if self.method.scope == "global":
            return select_top(scores, self.keep, names=self.names)
        layers = zip(scores, self.layer_keep, self.names, strict=True)
        return [select_top([score], keep, names=[name])[0] for score, keep, name in layers]

    def metrics(self) -> dict[str, float]:
        """The sparsity, which does not change."""
        return {"expected_sparsity": 1 - self.keep / sum(self.sizes)}


def _scores(site: Site) -> Tensor:
    """The bound of the scores, Kaiming's uniform distribution with a = √5: 1/√fan_in."""
    bound = 1 / math.sqrt(_fan_in(site.weight))
    return torch.full_like(site.weight, bound, dtype=torch.float32, requires_grad=False)


def _fan_in(weight: Tensor) -> int:
    return weight[0].numel() if weight.dim() > 1 else weight.numel()
