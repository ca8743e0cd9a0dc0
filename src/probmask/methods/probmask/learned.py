"""ProbMask: a probability per weight, trained through a relaxed random mask, under one budget.

Zhou, Zhang, Xu, Zhang, "Effective Sparsification of Neural Networks with Global Sparsity
Constraint", CVPR 2021. Minimize the expected loss of the network w ∘ m, m ~ Bernoulli(s), over the
weights w and the probabilities s, subject to Σ s ≤ K and s in [0, 1].

`ProbMasker` follows the paper's Algorithm 1; comments name its lines. One update: `before_forward`
sets τ and k and samples the noise (lines 3 to 7), `ProbMaskedWeight.training_weight` computes w m̃,
the sparsifier steps the optimizer of s (`trainables`), and `after_update` projects s (line 8).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from probmask.checks import Positive, Range, Temperature, TrainingFraction, WeightCount
from probmask.core import schedules
from probmask.core.noise import draw_key, logistic
from probmask.core.projection import project_
from probmask.core.relaxation import masked_draw
from probmask.core.selection import select_top
from probmask.core.shards import WHOLE
from probmask.errors import InputError
from probmask.masking.distributed import rank
from probmask.masking.masker import Histogram, Masker, Progress, Trainables
from probmask.masking.method import Context, Method
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site
from probmask.methods.families.clipping import clip_joint_norm_
from probmask.methods.families.kaiming import check_fan_in, fix_weights, kaiming_normal_
from probmask.methods.probmask.budget import Budget, warn_of_early_choice
from probmask.methods.probmask.normalized_sgd import NormalizedSGD
from probmask.methods.probmask.official import OfficialMasker
from probmask.methods.probmask.probabilities import (
    COLLAPSE_ADVICE,
    prob_histogram,
    prob_metrics,
    sample_masks,
)

# The rate of the probabilities, and the number of updates it was tuned for (CIFAR, 300 epochs).
PAPER_RATE = 6e-3
_PAPER_UPDATES = 58_800
_FUSED_DEVICES = ("cpu", "cuda", "xpu")  # where Adam makes one pass over memory

Draws = Annotated[int, Range(1, meaning="a number of masks sampled per update")]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Default values for the settings that are None."""

    draws: int
    temperature_start: float
    temperature_end: float
    ramp_begin: float
    ramp_end: float
    every: Literal["step", "epoch"]
    freeze_at: float
    select: Literal["top", "sample"]
    estimator: Literal["relaxed", "straight-through"]


RECIPES: dict[str, Recipe] = {
    "adaptive": Recipe(
        draws=1,
        temperature_start=1.0,
        temperature_end=0.03,
        ramp_begin=0.05,
        ramp_end=0.5,
        every="step",
        freeze_at=0.6,
        select="top",
        estimator="straight-through",
    ),
    "paper": Recipe(
        draws=2,
        temperature_start=1.0,
        temperature_end=0.03,
        ramp_begin=0.16,
        ramp_end=0.6,
        every="epoch",
        freeze_at=1.0,
        select="sample",
        estimator="relaxed",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ProbMask(Method):
    """Learn for each weight the probability that it is kept, under one budget.

    ``recipe="paper"`` uses exactly the paper's settings, for trainings as long as the paper's
    (58,800 updates). ``"adaptive"`` adapts to the number of updates: its schedules advance per
    update, the rate of the probabilities is higher in short trainings, their gradients have less
    variance, and the kept weights are still trained after the masks are final.

    Args:
        sparsity: The fraction of weights to prune, in [0, 1).
        recipe: The default values of all settings that are None.
        scope: ``"global"`` uses one budget for all layers (the paper's GSB), ``"layer"`` the same
            kept fraction in each layer (LSB).
        cost: The unit of the budget. With ``"flops"``, sparsity is the fraction of multiplications
            pruned, and ``attach`` needs ``example_inputs``.
        train_weights: False searches for a supermask: the weights are not trained.
        reinitialize: Redraw the weights from Kaiming's normal distribution first. None: only for
            supermasks.
        draws: Number of masks sampled per update (the paper's I).
        prob_lr: Learning rate of the probabilities; the paper's is 6e-3.
        temperature_start: The relaxation's temperature τ at the start.
        temperature_end: τ at the end; it falls linearly.
        ramp_begin: Fraction of the training at which the budget begins to fall.
        ramp_end: Fraction of the training at which it reaches ``sparsity``.
        every: Whether budget, temperature and rate change per update or per epoch.
        freeze_at: Fraction of the training after which the masks become final; 1 is the end. It
            counts updates.
        select: The final mask is the exact top-K by probability (ties by magnitude), or one
            Bernoulli sample of about K weights, as in the paper.
        estimator: How the probabilities are trained. ``"relaxed"`` is the paper's: their gradient
            passes through the relaxed mask, and Adam makes the step. ``"straight-through"`` takes
            the slope of the mask as 1, and SGD makes the step, with one step size for the network.
        min_keep_per_layer: The least number of weights that each layer keeps.
        clip_norm: Clip the joint gradient of weights and probabilities to this norm.
        compat: ``"official"`` repeats the arithmetic of the released code, defects included. It
            overrides ``ramp_begin``, ``ramp_end``, ``every``, ``freeze_at``, ``clip_norm``
            and ``estimator``.

    Raises:
        InputError: If a setting breaks its rule, or two settings contradict each other.

    Example:
        >>> method = probmask.ProbMask(sparsity=0.98, recipe="paper")
        >>> method.full_settings()["draws"]
        2
    """

    name: ClassVar[str] = "probmask"
    summary: ClassVar[str] = "a learned probability per weight under one global budget (CVPR 2021)"
    group: ClassVar[str] = "compared in the paper"
    year: ClassVar[int | None] = 2021
    reference: ClassVar[str] = (
        "Zhou, Zhang, Xu, Zhang: Effective Sparsification of Neural Networks with Global Sparsity "
        "Constraint, CVPR 2021"
    )

    recipe: Literal["adaptive", "paper"] = "adaptive"
    scope: Literal["global", "layer"] = "global"
    cost: Literal["params", "flops"] = "params"
    train_weights: bool = True
    reinitialize: bool | None = None
    draws: Draws | None = None
    prob_lr: Positive | None = None
    temperature_start: Temperature | None = None
    temperature_end: Temperature | None = None
    ramp_begin: TrainingFraction | None = None
    ramp_end: TrainingFraction | None = None
    every: Literal["step", "epoch"] | None = None
    freeze_at: TrainingFraction | None = None
    select: Literal["top", "sample"] | None = None
    estimator: Literal["relaxed", "straight-through"] | None = None
    min_keep_per_layer: WeightCount = 0
    clip_norm: Positive | None = None
    compat: Literal["official"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.resolved
        if settings.ramp_begin > settings.ramp_end:
            raise InputError(
                f"ProbMask({self._stated('ramp_begin')}, {self._stated('ramp_end')}): the ramp "
                "must not end before it begins."
            )
        if settings.temperature_end > settings.temperature_start:
            raise InputError(
                f"ProbMask({self._stated('temperature_start')}, "
                f"{self._stated('temperature_end')}): the temperature must not rise."
            )
        if settings.select == "sample" and self.min_keep_per_layer > 0:
            raise InputError(
                f"ProbMask(select='sample', min_keep_per_layer={self.min_keep_per_layer}): a "
                "sample does not guarantee a number of weights; pass only one of the two."
            )
        if self.compat == "official" and self.cost != "params":
            raise InputError(
                f"ProbMask(compat='official', cost={self.cost!r}): the released code budgets "
                "parameters only; pass only one of the two."
            )

    @property
    def resolved(self) -> Recipe:
        """The values of the recipe, replaced by the settings that are not None."""
        names = {field.name for field in fields(Recipe)}
        given = {k: v for k, v in self.settings().items() if k in names and v is not None}
        return replace(RECIPES[self.recipe], **given)

    def full_settings(self) -> dict[str, Any]:
        """Return the settings with the recipe's values."""
        return {**self.settings(), **asdict(self.resolved)}

    def refuses_shards(self) -> str:
        """Return the setting that needs whole weights, if there is one."""
        if self.compat == "official":
            return "compat='official' is written for whole weights"
        if self.cost == "flops":
            return "cost='flops' selects weights of different costs one by one"
        if not self.train_weights:
            return "train_weights=False gives FSDP2 no gradient to reduce"
        return ""

    def begin(self, sites: Sequence[Site], context: Context) -> Masker:
        """Start with every probability at 1."""
        per_epoch = self.resolved.every == "epoch" or self.compat == "official"
        if per_epoch and not context.epochs_known:
            raise InputError(
                f"attach(ProbMask(recipe={self.recipe!r}, every={self.every!r}, "
                f"compat={self.compat!r})): its schedules count epochs; pass steps_per_epoch= to "
                "attach."
            )
        redraw = self.reinitialize or (self.reinitialize is None and not self.train_weights)
        if redraw:
            check_fan_in("ProbMask(reinitialize)", "pass reinitialize=False", sites)
        masker = self._masker(sites, context)  # raises before any weight changes
        if redraw:
            kaiming_normal_(sites, context.seed)
        if not self.train_weights:
            fix_weights(sites)
        return masker

    def _masker(self, sites: Sequence[Site], context: Context) -> Masker:
        budget = Budget(
            self,
            sites,
            context,
            per_layer=self.scope == "layer",
            flops=self.cost == "flops",
            least_per_layer=self.min_keep_per_layer,
        )
        settings = self.resolved
        if self.compat == "official":
            return OfficialMasker(
                sites,
                budget,
                epochs=math.ceil(context.total_steps / context.steps_per_epoch),
                seed=context.seed,
                prob_lr=self.prob_lr or PAPER_RATE,
                draws=settings.draws,
                temperatures=(settings.temperature_start, settings.temperature_end),
                sample=settings.select == "sample",
                kept_fraction=1 - self.sparsity,
            )
        ramp = (settings.ramp_begin, settings.ramp_end)
        setting = f"freeze_at={settings.freeze_at:g}"
        warn_of_early_choice("ProbMask", setting, settings.freeze_at, ramp, final=1 - self.sparsity)
        return ProbMasker(self, sites, context, budget)

    def rate_for(self, total_steps: int) -> float:
        """Return the learning rate of the probabilities.

        A probability must be able to move from 1 to 0 in any number of updates. A rate inversely
        proportional to that number would follow the noise of single gradients; the adaptive recipe
        uses the cube root instead.
        """
        if self.prob_lr is not None:
            return self.prob_lr
        if self.recipe == "paper":
            return PAPER_RATE
        return PAPER_RATE * math.cbrt(max(1.0, _PAPER_UPDATES / total_steps))

    def _stated(self, name: str) -> str:
        """Return a setting with its value, and whether the value is the recipe's."""
        if (given := getattr(self, name)) is not None:
            return f"{name}={given:g}"
        return f"{name}={getattr(self.resolved, name):g} (of recipe {self.recipe!r})"


class ProbMaskedWeight(MaskedWeight):
    """One site: its probabilities s, and the noise key and temperature of the current draw.

    Key and temperature are tensors, so that a compiled graph does not depend on their values.
    """

    def __init__(self, site: Site, *, straight_through: bool) -> None:
        super().__init__(site)
        self.straight_through = straight_through
        self.prob = nn.Parameter(torch.ones_like(site.rows, dtype=torch.float32))
        self.key = torch.zeros(2, dtype=torch.int64, device=site.rows.device)
        self.temperature = torch.ones((), device=site.rows.device)

    @property
    def noise(self) -> Tensor:
        """The noise g₁ - g₀ of the current draw. It is computed, not stored."""
        return logistic(self.prob.shape, self.key)

    def training_weight(self, weight: Tensor) -> Tensor:
        """w σ((ln s - ln(1 - s) + g₁ - g₀) / τ): the weight under the relaxed mask."""
        through = self.straight_through
        return masked_draw(weight, self.prob, self.key, self.temperature, straight_through=through)


class ProbMasker(Masker):
    """Masker of ProbMask: Algorithm 1 of the paper."""

    saved = ("seed", "_temperature", "_kept_fraction")
    collapse_advice = COLLAPSE_ADVICE
    masked: tuple[ProbMaskedWeight, ...]

    def __init__(
        self, method: ProbMask, sites: Sequence[Site], context: Context, budget: Budget
    ) -> None:
        # Line 1: s = 1, τ = k = 1.
        self.settings = method.resolved
        through = self.settings.estimator == "straight-through"
        masked = [ProbMaskedWeight(site, straight_through=through) for site in sites]
        super().__init__(sites, masked, budget.keep)
        self.budget = budget
        self.draws = self.settings.draws
        self.seed = context.seed
        self.prob_lr = method.rate_for(context.total_steps)
        self.clip_norm = method.clip_norm
        self._temperature = self._kept_fraction = 1.0
        self._check_every = max(1, context.total_steps // 100)

    @property
    def probs(self) -> list[Tensor]:
        """The probabilities of all sites."""
        return [masked.prob for masked in self.masked]

    def fraction_done(self, now: Progress) -> float:
        """Return the fraction of the training that is done, per update or per epoch."""
        return now.epoch_fraction if self.settings.every == "epoch" else now.fraction

    def before_forward(self, now: Progress, draw: int) -> None:
        """Lines 3 to 7: anneal, update the budget, sample noise for the coming mini-batch."""
        if self.frozen:
            return
        done, settings = self.fraction_done(now), self.settings
        # Line 3: decrease the temperature τ.
        self._temperature = schedules.temperature(
            done, start=settings.temperature_start, end=settings.temperature_end
        )
        # Line 4: update the kept fraction k.
        self._kept_fraction = schedules.kept_fraction(
            done,
            self.budget.final / self.budget.total,
            begin=settings.ramp_begin,
            end=settings.ramp_end,
        )
        # Lines 5 and 6, the iteration and its mini-batch, are the user's training loop.
        # Line 7: sample g₁ - g₀, on each rank its own; g is a function of seed, rank, step, site.
        # Ranks that have shards of the weights sample one mask together, from that of rank 0.
        sampler = rank() if self.shards is WHOLE else 0
        for index, (masked, shape) in enumerate(zip(self.masked, self.shapes, strict=True)):
            masked.temperature.fill_(self._temperature)
            first, second = draw_key(self.seed, sampler, now.step, draw, index)
            # The noise of a position depends on its sum with the first word.
            masked.key[0] = (first + self.shards.first_position(shape)) % 2**32
            masked.key[1] = second

    def trainables(self) -> list[Trainables]:
        """Line 8: z = s - η ∂L/∂s. The sparsifier steps the optimizer; its rate follows a cosine.

        The gradients are those of `ProbMaskedWeight.training_weight`, summed over the draws.
        """
        optimizer: torch.optim.Optimizer
        if self.settings.estimator == "straight-through":
            optimizer = NormalizedSGD(self.probs, lr=self.prob_lr, shards=self.shards)
        else:
            fused = all(prob.device.type in _FUSED_DEVICES for prob in self.probs)
            optimizer = torch.optim.Adam(self.probs, lr=self.prob_lr, fused=fused or None)

        def learning_rate(now: Progress, _: float) -> float:
            return self.prob_lr * schedules.cosine(self.fraction_done(now))

        return [Trainables(optimizer, learning_rate)]

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Clip the joint gradient of weights and probabilities."""
        if self.clip_norm is not None and self.keep < self.size:
            parameters = [*optimizers.parameters, *self.probs]
            clip_joint_norm_(parameters, self.clip_norm, self.shards, also_rows=self.probs)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Line 8: project s onto C. Line 9, the step on w, was made by the user's optimizer."""
        if self.frozen:
            return
        self._project(self._kept_fraction)
        if now.step % self._check_every == 0:
            self._warn_unless_protected(self.shards.sums(self.probs))
        if now.fraction >= self.settings.freeze_at:
            self.freeze()

    def choose(self) -> list[Tensor]:
        """Return the final masks: exactly the budget by probability, or a sample ("return")."""
        if self.settings.select == "sample":
            return sample_masks(self.probs, self.seed, self.shapes, self.shards)
        ties = [weight.detach().abs() for weight in self.weights]
        return self.budget.select(self.probs, self.budget.final, ties=ties)

    def freeze(self) -> None:
        """Make the masks final; warn about layers that keep no weight."""
        super().freeze()
        self._warn_unless_protected(self.shards.counts([masked.mask for masked in self.masked]))

    def metrics(self) -> dict[str, float]:
        """Return temperature, budget, sparsity and undecided probabilities per kept weight."""
        return prob_metrics(self, self.probs, self._temperature, self._kept_fraction)

    def histograms(self) -> dict[str, Histogram]:
        """Return the histogram of the probabilities while they are trained."""
        return {} if self.frozen else prob_histogram(self, self.probs)

    def _project(self, fraction: float) -> None:
        sites = range(len(self.masked))
        if not self.budget.per_layer:
            self._project_sites(sites, fraction)
        else:
            for index in sites:
                self._project_sites(range(index, index + 1), fraction)

    def _project_sites(self, which: range, fraction: float) -> None:
        """Project the probabilities of these sites onto this fraction of their cost."""
        probs = [self.probs[i] for i in which]
        costs = self.budget.costs or (1.0,) * len(self.masked)
        amount = fraction * sum(costs[i] * self.budget.sizes[i] for i in which)
        project_(
            probs,
            amount,
            costs=[costs[i] for i in which] if self.budget.costs else None,
            names=[self.names[i] for i in which],
            shards=self.shards,
        )
        if any(self.budget.least):
            self._feed_starved(which, amount, costs)

    def _feed_starved(self, which: range, amount: float, costs: Sequence[float]) -> None:
        """In each layer that would keep too few weights, set the best to 1 and the rest to 0.

        The budget of the other layers shrinks accordingly. A layer whose probabilities are all zero
        passes no gradient: it would stop learning long before the final selection keeps any of its
        weights.
        """
        fed: set[int] = set()
        while starved := self._starved(which) - fed:
            fed |= starved
            for i in starved:
                tie = self.weights[i].detach().abs()
                (best,) = select_top(
                    [self.probs[i]], self.budget.least[i], ties=[tie], shards=self.shards
                )
                self.probs[i].copy_(best)
            others = [i for i in which if i not in fed]
            project_(
                [self.probs[i] for i in others],
                max(0.0, amount - sum(costs[i] * self.budget.least[i] for i in fed)),
                costs=[costs[i] for i in others],
                names=[self.names[i] for i in others],
                shards=self.shards,
            )

    def _starved(self, which: range) -> set[int]:
        sums = self.shards.sums([self.probs[i] for i in which])
        return {i for i, kept in zip(which, sums, strict=True) if kept < self.budget.least[i]}

    def _warn_unless_protected(self, kept: Sequence[float]) -> None:
        if not any(self.budget.least):  # otherwise every layer keeps some weights
            self.warn_of_collapse(kept)
