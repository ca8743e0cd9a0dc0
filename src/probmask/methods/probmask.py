"""ProbMask: a probability per weight, one budget over all layers, projected at every update.

Zhou et al., "Effective Sparsification of Neural Networks with Global Sparsity Constraint",
CVPR 2021. Minimise the expected loss of the network w ∘ m, m ~ Bernoulli(s), over weights w and
probabilities s subject to Σ s ≤ K, s in [0, 1]: train both through a relaxed mask, project s onto
the budget after each update, and let budget and temperature fall.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from probmask.checks import check_choice, check_count, check_ramp, check_within
from probmask.errors import InputError
from probmask.masking.initialization import check_fans, kaiming_normal_
from probmask.masking.protocol import Context, Method
from probmask.masking.sites import Site
from probmask.methods.probabilities import ProbMasker
from probmask.methods.probmask_official import OfficialProbMasker


@dataclass(frozen=True, kw_only=True)
class ProbMask(Method):
    """Learn which weights to keep as probabilities under one budget.

    ``scope="global"`` is the paper's method (GSB); ``"layer"`` gives each layer its own budget of
    the same fraction (LSB). ``cost="flops"`` budgets multiplications instead of weights: sparsity
    is then the fraction of multiplications removed, and ``attach`` needs ``example_inputs``.
    ``draws`` masks are sampled per update. ``train_weights=False`` looks for a supermask: weights
    stay as they are, by default drawn anew from Kaiming's normal distribution (``reinitialize``).

    Schedules have the paper's form, per update (``every="step"``) or per epoch: the budget
    falls from ``ramp_begin`` to ``ramp_end`` of the training, the temperature over all of it.
    From ``freeze_at`` on (None: never, as in the paper) the exact top-K mask is fixed and only
    its weights train on; K is the final budget, also where the ramp has not got there yet.
    ``prob_lr`` is Adam's rate for the probabilities; None takes the paper's 6e-3 and raises it
    for trainings shorter than the paper's. The mask at the end is the exact top-K by
    probability, ties by weight magnitude (``select="top"``), or one Bernoulli draw, as in the
    paper, of about K (``"sample"``).

    ``compat="official"`` steps exactly as the released code does, accidents included: its epsilon
    and two uniforms in the relaxed mask, 21 bisections in fp32, the joint gradient of weights and
    probabilities clipped to norm 3, everything scheduled per epoch; ``ramp_begin``, ``ramp_end``,
    ``every``, ``freeze_at`` and ``clip_norm`` then are the release's.
    """

    name: ClassVar[str] = "probmask"
    summary: ClassVar[str] = "a probability per weight under one global budget (CVPR 2021)"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2021
    reference: ClassVar[str] = (
        "Zhou, Zhang, Xu, Zhang: Effective Sparsification of Neural Networks with Global Sparsity "
        "Constraint, CVPR 2021"
    )

    scope: Literal["global", "layer"] = "global"
    cost: Literal["params", "flops"] = "params"
    draws: int = 1
    train_weights: bool = True
    reinitialize: bool | None = None
    prob_lr: float | None = None
    temperature_start: float = 1.0
    temperature_end: float = 0.03
    ramp_begin: float = 0.05
    ramp_end: float = 0.5
    every: Literal["step", "epoch"] = "step"
    freeze_at: float | None = 0.6
    select: Literal["top", "sample"] = "top"
    min_keep_per_layer: int = 0
    clip_norm: float | None = None
    compat: Literal["official"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("ProbMask", "scope", self.scope, ("global", "layer"))
        check_choice("ProbMask", "cost", self.cost, ("params", "flops"))
        check_choice("ProbMask", "every", self.every, ("step", "epoch"))
        check_choice("ProbMask", "select", self.select, ("top", "sample"))
        check_choice("ProbMask", "compat", self.compat, (None, "official"))
        check_count("ProbMask", "draws", self.draws, least=1, meaning="masks sampled per update")
        check_count(
            "ProbMask", "min_keep_per_layer", self.min_keep_per_layer, least=0, meaning="weights"
        )
        check_choice("ProbMask", "train_weights", self.train_weights, (True, False))
        check_choice("ProbMask", "reinitialize", self.reinitialize, (None, True, False))
        for name in ("prob_lr", "clip_norm"):
            self._check(name, 1e-9, math.inf, "a positive number")
        for name in ("temperature_start", "temperature_end"):
            self._check(name, 1e-3, 1, "a temperature")
        self._check("freeze_at", 0, 1, "a part of the training")
        check_ramp(
            "ProbMask",
            ramp_begin=self.ramp_begin,
            ramp_end=self.ramp_end,
            meaning="the budget falls",
        )
        if self.compat == "official" and self.cost != "params":
            raise InputError(
                f"ProbMask(compat='official', cost={self.cost!r}): the released code budgets "
                "parameters only; drop one of the two."
            )
        if self.select == "sample" and self.min_keep_per_layer > 0:
            raise InputError(
                f"ProbMask(select='sample', min_keep_per_layer={self.min_keep_per_layer}): a "
                "sample promises no layer anything; drop one of the two."
            )
        if self.temperature_end > self.temperature_start:
            raise InputError(
                f"ProbMask(temperature_start={self.temperature_start}, temperature_end="
                f"{self.temperature_end}): the temperature falls; end must not be above start."
            )

    def _check(self, name: str, low: float, high: float, meaning: str) -> None:
        value = getattr(self, name)
        if value is None and name in ("prob_lr", "clip_norm", "freeze_at"):
            return
        check_within("ProbMask", name, value, low, high, meaning=meaning)

    def begin(self, sites: Sequence[Site], context: Context) -> "ProbMasker":
        """Give every weight the probability 1; freeze weights if they are not to be trained."""
        if not context.epochs_known and (self.every == "epoch" or self.compat == "official"):
            raise InputError(
                f"attach(ProbMask(every={self.every!r}, compat={self.compat!r})): its schedules "
                "count in epochs; pass steps_per_epoch= to attach."
            )
        fresh = self.reinitialize or (self.reinitialize is None and not self.train_weights)
        if fresh:
            check_fans("ProbMask(reinitialize)", sites)
        kind = OfficialProbMasker if self.compat == "official" else ProbMasker
        masker = kind(self, sites, context)  # refuses what it must before weights change
        if fresh:
            kaiming_normal_(sites, context.seed)
        if not self.train_weights:
            for site in sites:
                site.weight.requires_grad_(False)
                site.weight.grad = None
        return masker
