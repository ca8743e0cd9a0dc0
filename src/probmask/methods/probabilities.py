"""ProbMask at work: the probabilities of one model, their noise, budget and projection."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from probmask.core import schedules
from probmask.core.noise import draw_key, logistic, logistic_
from probmask.core.projection import project_
from probmask.core.relaxation import bernoulli_mask, masked_draw
from probmask.core.selection import select_top
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.protocol import Context, Progress, Trainables
from probmask.masking.ranks import rank
from probmask.masking.sites import Site
from probmask.methods.deciding import DecidingMasker, count_undecided

if TYPE_CHECKING:
    from probmask.methods.probmask import ProbMask

# Adam's rate for the probabilities, and the number of updates it was found for (CIFAR, 300 epochs).
PAPER_RATE = 6e-3
_PAPER_UPDATES = 58_800
_FUSED = ("cpu", "cuda", "xpu")  # devices on which Adam takes one pass over memory


class ProbMaskedWeight(MaskedWeight):
    """One site: its probabilities, and the key and temperature of the current draw.

    Key and temperature are tensors, so that a compiled graph depends on neither's value, but not
    buffers, so that every rank keeps its own. Probabilities are fp32 whatever the weight is: in
    bf16 one of 0.98 could not move by less than 0.004.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.prob = nn.Parameter(torch.ones_like(site.weight, dtype=torch.float32))
        self.key = torch.zeros(2, dtype=torch.int64, device=site.weight.device)
        self.temperature = torch.ones((), device=site.weight.device)

    @property
    def noise(self) -> Tensor:
        """The noise of the current draw, computed when asked for."""
        return logistic(self.prob.shape, self.key)

    def draw(self, seed: int, *counters: int) -> None:
        """Take the noise that these numbers stand for."""
        first, second = draw_key(seed, *counters)
        self.key[0], self.key[1] = first, second

    def training_weight(self, weight: Tensor) -> Tensor:
        """The relaxed network: w m."""
        return masked_draw(weight, self.prob, self.key, self.temperature)


class ProbMasker(DecidingMasker):
    """ProbMask at work on one model whose probabilities are parameters of their own."""

    masks: tuple[ProbMaskedWeight, ...]
    site_mask: type[ProbMaskedWeight] = ProbMaskedWeight
    fused = True  # Adam in one pass over memory, a few units of the last place from the plain one

    def __init__(self, method: "ProbMask", sites: Sequence[Site], context: Context) -> None:
        super().__init__(sites, [self.site_mask(site) for site in sites])
        self.method = method
        self.settings = method.resolved
        self.draws = self.settings.draws
        self.seed = context.seed
        self.prob_lr = method.prob_lr or self.usual_rate(context.total_steps)
        self._temperature = self._kept_fraction = 1.0
        self._check_every = max(1, context.total_steps // 100)
        self.budget = method.budget(sites, context)
        if method.sparsity == 0:
            self.freeze()  # everything is kept: there is nothing to learn and nothing to draw

    @property
    def clip_norm(self) -> float | None:
        """To which norm the joint gradient of weights and probabilities is clipped."""
        return self.method.clip_norm

    @property
    def freeze_at(self) -> float:
        """At which part of the training the mask becomes final."""
        return self.settings.freeze_at

    @property
    def probs(self) -> list[Tensor]:
        """The probabilities of all sites."""
        return [mask.prob for mask in self.masks]

    def trainables(self) -> list[Trainables]:
        """Adam on the probabilities, its rate on a cosine."""
        fused = self.fused and all(prob.device.type in _FUSED for prob in self.probs)
        optimizer = torch.optim.Adam(self.probs, lr=self.prob_lr, fused=fused or None)

        def learning_rate(now: Progress, _: float) -> float:
            return self.prob_lr * schedules.cosine(self.progress(now))

        return [Trainables(optimizer, learning_rate)]

    def before_forward(self, now: Progress, draw: int) -> None:
        """Set the temperature and draw noise that is this rank's own."""
        if self.frozen:
            return
        self._temperature = schedules.temperature(
            self.progress(now),
            start=self.settings.temperature_start,
            end=self.settings.temperature_end,
        )
        for index, mask in enumerate(self.masks):
            mask.temperature.fill_(self._temperature)
            mask.draw(self.seed, rank(), now.step, draw, index)

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Clip the joint gradient of weights and probabilities."""
        if self.clip_norm is not None and self.method.sparsity > 0:  # zero is dense training
            nn.utils.clip_grad_norm_([*optimizers.parameters, *self.probs], self.clip_norm)

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Project the probabilities onto the budget of this moment; freeze when it is time."""
        if self.frozen:
            return
        self._kept_fraction = self.scheduled_budget(now)
        self._project(self._kept_fraction)
        if now.step % self._check_every == 0:
            self.warn_of_collapse([float(prob.detach().sum()) for prob in self.probs])
        if now.fraction >= self.freeze_at:
            self.freeze()

    def choose(self) -> list[Tensor]:
        """Select exactly the budget by probability, ties by magnitude; or draw a sample."""
        return self._sample() if self.settings.select == "sample" else self._select()

    def metrics(self) -> dict[str, float]:
        """Budget, temperature, and how far the probabilities are from a decision."""
        size = sum(prob.numel() for prob in self.probs)
        expected = sum(float(prob.sum(dtype=torch.float64)) for prob in self.probs)
        return {
            "temperature": self._temperature,
            "kept_fraction": self._kept_fraction,
            "expected_sparsity": 1 - expected / size,
            "undecided_per_kept": count_undecided(self.probs) / max(1, self.budget.keep),
        }

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
        self.warn_of_collapse([float(mask.hard.sum()) for mask in self.masks])

    def usual_rate(self, total_steps: int) -> float:
        """Adam's rate where none is asked for: the paper's; learned, raised in short trainings.

        A probability has to travel from 1 to 0 or back however few updates there are. A rate in
        inverse proportion to them would follow the noise of single gradients; the cube root lies
        between.
        """
        if self.method.recipe_name == "paper":
            return PAPER_RATE
        return PAPER_RATE * math.cbrt(max(1.0, _PAPER_UPDATES / total_steps))

    def scheduled_budget(self, now: Progress) -> float:
        """The fraction of the budget's currency that is kept at this moment."""
        final = self.budget.final / self.budget.total
        begin, end = self.settings.ramp_begin, self.settings.ramp_end
        return schedules.kept_fraction(self.progress(now), final, begin=begin, end=end)

    def _project(self, fraction: float) -> None:
        if self.method.scope == "global":
            self.project_(slice(None), fraction)
        else:
            for index in range(len(self.masks)):
                self.project_(slice(index, index + 1), fraction)

    def project_(self, which: slice, fraction: float) -> None:
        """Project the probabilities of these sites onto a budget of this fraction of them."""
        probs = self.probs[which]
        costs = self.budget.costs[which] if self.budget.costs else tuple(1.0 for _ in probs)
        budget = fraction * sum(c * prob.numel() for c, prob in zip(costs, probs, strict=True))
        project_(probs, budget, costs=costs if self.budget.costs else None, names=self.names[which])
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
                if i not in fed
                and float(self.probs[i].sum(dtype=torch.float64)) < self.budget.least[i]
            }
            if not starved:
                return
            fed |= starved
            for i in starved:
                tie = self.weights[i].detach().abs()
                (best,) = select_top([self.probs[i]], self.budget.least[i], ties=[tie])
                self.probs[i].copy_(best)
            cost = self.budget.costs or (1.0,) * len(self.masks)
            others = [i for i in which if i not in fed]
            project_(
                [self.probs[i] for i in others],
                max(0.0, budget - sum(cost[i] * self.budget.least[i] for i in fed)),
                costs=[cost[i] for i in others],
                names=[self.names[i] for i in others],
            )

    def _sample(self) -> list[Tensor]:
        noise = [torch.empty_like(prob) for prob in self.probs]
        return [
            bernoulli_mask(prob, logistic_(out, self.seed, -1, index))
            for index, (prob, out) in enumerate(zip(self.probs, noise, strict=True))
        ]

    def _select(self) -> list[Tensor]:
        ties = [weight.detach().abs() for weight in self.weights]
        return self.budget.select(self.probs, self.budget.final, ties=ties)
