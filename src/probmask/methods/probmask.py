"""ProbMask: a probability per weight, one budget over all layers, projected at every update.

Zhou et al., "Effective Sparsification of Neural Networks with Global Sparsity Constraint",
CVPR 2021. Minimise the expected loss of the network w ∘ m, m ~ Bernoulli(s), over weights w and
probabilities s subject to Σ s ≤ K, s in [0, 1]: train both through a relaxed mask, project s onto
the budget after each update, and let budget and temperature fall.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from probmask.checks import check_choice, check_count, check_ramp, check_within
from probmask.core import schedules
from probmask.core.allocation import largest_remainder
from probmask.core.noise import logistic_, uniform_
from probmask.core.official import official_mask, official_noise, official_project_
from probmask.core.projection import project_
from probmask.core.relaxation import bernoulli_mask, relaxed_mask
from probmask.core.selection import select_top, select_within
from probmask.errors import InputError, LayerCollapseWarning
from probmask.masking.budgets import checked_keep
from probmask.masking.initialization import check_fans, kaiming_normal_
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Context, Histogram, Masker, Method, Progress, Trainables
from probmask.masking.ranks import rank
from probmask.masking.sites import Site

# Adam's rate for the probabilities, and the number of updates it was found for (CIFAR, 300 epochs).
_PAPER_RATE = 6e-3
_PAPER_UPDATES = 58_800
# Between which parts of the training the paper's budget falls.
_PAPER_RAMP = (0.16, 0.6)
_BINS = 20  # of the histogram of probabilities


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
        masker = ProbMasker(self, sites, context)  # refuses what it must before weights change
        if fresh:
            kaiming_normal_(sites, context.seed)
        if not self.train_weights:
            for site in sites:
                site.weight.requires_grad_(False)
                site.weight.grad = None
        return masker


class ProbMaskedWeight(MaskedWeight):
    """One site: its probabilities, and the noise and temperature of the current draw.

    Noise and temperature are tensors, so that a compiled graph depends on neither's value, but not
    buffers, so that every rank keeps its own. All are fp32 whatever the weight is: in bf16 a
    probability of 0.98 could not move by less than 0.004.
    """

    def __init__(self, site: Site, mask: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(site)
        self.prob = nn.Parameter(torch.ones_like(site.weight, dtype=torch.float32))
        self.noise = torch.zeros_like(site.weight, dtype=torch.float32, requires_grad=False)
        self.temperature = torch.ones((), device=site.weight.device)
        self._mask = mask

    def training_weight(self, weight: Tensor) -> Tensor:
        """The relaxed network: w m."""
        return weight * self._mask(self.prob, self.noise, self.temperature).to(weight.dtype)


class ProbMasker(Masker):
    """ProbMask at work on one model."""

    masks: tuple[ProbMaskedWeight, ...]

    def __init__(self, method: ProbMask, sites: Sequence[Site], context: Context) -> None:
        mask = official_mask if method.compat == "official" else relaxed_mask
        super().__init__(sites, [ProbMaskedWeight(site, mask) for site in sites])
        self.method = method
        self.draws = method.draws
        self.seed = context.seed
        self.prob_lr = _learning_rate(method, context.total_steps)
        self._temperature = self._kept_fraction = 1.0
        self._warned: set[str] = set()
        self._check_every = max(1, context.total_steps // 100)
        sizes = [site.size for site in sites]
        self.costs = (
            tuple(float(c) for c in context.macs_per_weight()) if method.cost == "flops" else None
        )
        self.keep = checked_keep(method, sites)
        self.least = [min(method.min_keep_per_layer, size) for size in sizes]
        if self.costs is not None and self._spent(self.least) > self._allowed():
            raise InputError(
                f"ProbMask(min_keep_per_layer={method.min_keep_per_layer}): that many weights of "
                f"each layer take {self._spent(self.least):g} multiplications, the budget is "
                f"{self._allowed():g}; lower it."
            )
        if self.costs is None and sum(self.least) > self.keep:
            raise InputError(
                f"ProbMask(min_keep_per_layer={method.min_keep_per_layer}): {len(sizes)} layers "
                f"would keep {sum(self.least)} weights, the budget is {self.keep}; lower it."
            )
        if method.sparsity == 0:
            self.freeze()  # everything is kept: there is nothing to learn and nothing to draw

    def _spent(self, kept: Sequence[int]) -> float:
        assert self.costs is not None
        return math.fsum(c * k for c, k in zip(self.costs, kept, strict=True))

    def _allowed(self) -> float:
        return (1 - self.method.sparsity) * self._spent([prob.numel() for prob in self.probs])

    @property
    def probs(self) -> list[Tensor]:
        """The probabilities of all sites."""
        return [mask.prob for mask in self.masks]

    def trainables(self) -> list[Trainables]:
        """Adam on the probabilities, its rate on a cosine."""
        optimizer = torch.optim.Adam(self.probs, lr=self.prob_lr)

        def learning_rate(now: Progress, _: float) -> float:
            return self.prob_lr * schedules.cosine(self._progress(now))

        return [Trainables(optimizer, learning_rate)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set the temperature and draw noise that is this rank's own."""
        if self.frozen:
            return
        self._temperature = schedules.temperature(
            self._progress(now),
            start=self.method.temperature_start,
            end=self.method.temperature_end,
        )
        for index, mask in enumerate(self.masks):
            mask.temperature.fill_(self._temperature)
            counters = (rank(), now.step, draw, index)
            if self.method.compat == "official":
                first = uniform_(torch.empty_like(mask.noise), self.seed, *counters, 0)
                second = uniform_(torch.empty_like(mask.noise), self.seed, *counters, 1)
                mask.noise.copy_(official_noise(first, second))
            else:
                logistic_(mask.noise, self.seed, *counters)

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Clip the joint gradient of weights and probabilities."""
        limit = 3.0 if self.method.compat == "official" else self.method.clip_norm
        if limit is not None:
            nn.utils.clip_grad_norm_([*optimizers.parameters, *self.probs], limit)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Project the probabilities onto the budget of this moment; freeze when it is time."""
        if self.frozen:
            return
        self._kept_fraction = self._schedule_budget(now)
        self._project(self._kept_fraction)
        if now.step % self._check_every == 0:
            self._warn_of_collapse([float(prob.detach().sum()) for prob in self.probs])
        freeze_at = None if self.method.compat == "official" else self.method.freeze_at
        if freeze_at is not None and now.fraction >= freeze_at:
            self.freeze()

    def choose(self) -> list[Tensor]:
        """Select exactly the budget by probability, ties by magnitude; or draw a sample."""
        return self._sample() if self.method.select == "sample" else self._select()

    def metrics(self) -> dict[str, float]:
        """Budget, temperature, and how far the probabilities are from a decision."""
        size = sum(prob.numel() for prob in self.probs)
        expected = sum(float(prob.sum(dtype=torch.float64)) for prob in self.probs)
        undecided = sum(int(((prob > 0.05) & (prob < 0.95)).count_nonzero()) for prob in self.probs)
        return {
            "temperature": self._temperature,
            "kept_fraction": self._kept_fraction,
            "expected_sparsity": 1 - expected / size,
            "undecided_per_kept": undecided / max(1, self.keep),
        }

    def histograms(self) -> dict[str, Histogram]:
        """The probabilities of all layers, as long as they are learned."""
        if self.frozen:
            return {}
        counts = sum(torch.histc(prob, _BINS, min=0, max=1).double() for prob in self.probs)
        assert isinstance(counts, Tensor)
        return {"prob": Histogram(0, 1, tuple(int(count) for count in counts))}

    def state_dict(self) -> dict[str, Any]:
        """The seed of the noise, the budget and temperature last used, and the frozen masks."""
        return {
            **super().state_dict(),
            "seed": self.seed,
            "kept_fraction": self._kept_fraction,
            "temperature": self._temperature,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self.seed = state["seed"]
        self._kept_fraction = state["kept_fraction"]
        self._temperature = state["temperature"]

    def freeze(self) -> None:
        """Fix the masks; a layer that has none of its weights left is named."""
        super().freeze()
        self._warn_of_collapse([float(mask.hard.sum()) for mask in self.masks])

    def _progress(self, now: Progress) -> float:
        per_epoch = self.method.every == "epoch" or self.method.compat == "official"
        return now.epoch_fraction if per_epoch else now.fraction

    def _schedule_budget(self, now: Progress) -> float:
        begin, end = self.method.ramp_begin, self.method.ramp_end
        if self.method.compat == "official":
            begin, end = (math.floor(part * now.epochs) / now.epochs for part in _PAPER_RAMP)
        in_weights = self.costs is None and self.method.compat is None
        size = sum(prob.numel() for prob in self.probs)
        final = self.keep / size if in_weights else 1 - self.method.sparsity
        return schedules.kept_fraction(self._progress(now), final, begin=begin, end=end)

    def _project(self, fraction: float) -> None:
        project = (
            self._project_official if self.method.compat == "official" else self._project_exact
        )
        if self.method.scope == "global":
            project(slice(None), fraction)
        else:
            for index in range(len(self.masks)):
                project(slice(index, index + 1), fraction)

    def _project_exact(self, which: slice, fraction: float) -> None:
        probs = self.probs[which]
        costs = self.costs[which] if self.costs else tuple(1.0 for _ in probs)
        budget = fraction * sum(c * prob.numel() for c, prob in zip(costs, probs, strict=True))
        project_(probs, budget, costs=costs if self.costs else None, names=self.names[which])
        if self.method.min_keep_per_layer > 0:
            self._feed_starved(range(len(self.masks))[which], budget)

    def _feed_starved(self, which: range, budget: float) -> None:
        """Give layers with less than they must keep their best weights for good, at others' cost.

        A layer whose probabilities are all zero passes no gradient: it would be dead, and the
        network with it, long before the final selection gave it anything.
        """
        fed: set[int] = set()
        while True:
            starved = {
                i
                for i in which
                if i not in fed and float(self.probs[i].sum(dtype=torch.float64)) < self.least[i]
            }
            if not starved:
                return
            fed |= starved
            for i in starved:
                tie = self.weights[i].detach().abs()
                (best,) = select_top([self.probs[i]], self.least[i], ties=[tie])
                self.probs[i].copy_(best)
            cost = self.costs or (1.0,) * len(self.masks)
            others = [i for i in which if i not in fed]
            project_(
                [self.probs[i] for i in others],
                max(0.0, budget - sum(cost[i] * self.least[i] for i in fed)),
                costs=[cost[i] for i in others],
                names=[self.names[i] for i in others],
            )

    def _project_official(self, which: slice, fraction: float) -> None:
        probs = self.probs[which]
        official_project_(probs, fraction * sum(prob.numel() for prob in probs))

    def _sample(self) -> list[Tensor]:
        noise = [torch.empty_like(prob) for prob in self.probs]
        return [
            bernoulli_mask(prob, logistic_(out, self.seed, -1, index))
            for index, (prob, out) in enumerate(zip(self.probs, noise, strict=True))
        ]

    def _select(self) -> list[Tensor]:
        probs = self.probs
        ties = [weight.detach().abs() for weight in self.weights]
        if self.method.scope == "layer":
            budget = self._layer_budgets()
            return [
                select_top([prob], keep, ties=[tie], names=[name])[0]
                for prob, keep, tie, name in zip(probs, budget, ties, self.names, strict=True)
            ]
        if self.costs is not None:
            allowed = self._allowed()
            return select_within(probs, self.costs, allowed, ties=ties, minimum=self.least)
        return select_top(probs, self.keep, ties=ties, minimum=self.least, names=self.names)

    def _layer_budgets(self) -> list[int]:
        """The same kept fraction in each layer, but the least that each must keep."""
        sizes = [prob.numel() for prob in self.probs]
        share = self.keep / sum(sizes)
        above = [max(0.0, share * size - low) for size, low in zip(sizes, self.least, strict=True)]
        caps = [size - low for size, low in zip(sizes, self.least, strict=True)]
        extra = largest_remainder(above, self.keep - sum(self.least), caps)
        return [low + more for low, more in zip(self.least, extra, strict=True)]

    def _warn_of_collapse(self, kept: Sequence[float]) -> None:
        for name, count, least in zip(self.names, kept, self.least, strict=True):
            if count < 1 and least < 1 and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"{name} is losing all of its weights; min_keep_per_layer=1 forbids it.",
                    LayerCollapseWarning,
                    stacklevel=2,
                )


def _learning_rate(method: ProbMask, total_steps: int) -> float:
    """The rate asked for, or the paper's, raised for trainings shorter than the paper's.

    A probability has to travel from 1 to 0 or back however few updates there are. A rate in inverse
    proportion to them would follow the noise of single gradients; the cube root lies between.
    """
    if method.prob_lr is not None:
        return method.prob_lr
    if method.compat == "official":
        return _PAPER_RATE
    return _PAPER_RATE * math.cbrt(max(1.0, _PAPER_UPDATES / total_steps))
