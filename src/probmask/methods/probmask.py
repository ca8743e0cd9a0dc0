"""ProbMask: a probability per weight, one budget over all layers, projected at every update.

Zhou et al., "Effective Sparsification of Neural Networks with Global Sparsity Constraint",
CVPR 2021. Minimise the expected loss of the network w ∘ m, m ~ Bernoulli(s), over weights w and
probabilities s subject to Σ s ≤ K, s in [0, 1], while budget and temperature fall. The paper trains
both through a relaxed mask and projects s onto the budget after each update (`probabilities`); by
default s is a function of w, which a threshold keeps within the budget (`tied`).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from probmask.checks import check_choice, check_count, check_within
from probmask.core.schedules import kept_fraction
from probmask.errors import EarlyEndWarning, InputError
from probmask.masking.budgets import many_at_once
from probmask.masking.initialization import check_fans, kaiming_normal_
from probmask.masking.protocol import Context, Masker, Method
from probmask.masking.sites import Site
from probmask.methods.budget import Budget
from probmask.methods.probabilities import ProbMasker
from probmask.methods.probmask_official import OfficialProbMasker
from probmask.methods.recipes import RECIPES, Recipe, RecipeName
from probmask.methods.tied import TiedMasker

# Settings that only one way of learning has, but for values that ask for nothing.
_LEARNED_ONLY = ("draws", "prob_lr", "select")
_TIED_ONLY = ("outside", "forget_by", "choose_at")
# So much of the training before the masks are frozen the choice is final, if nothing else is said.
# Records hold None for it: for another value they need an upgrade, as recipes did before.
_CHOSEN_BEFORE = 0.05
_HARMLESS: dict[str, tuple[object, ...]] = {"draws": (1,), "select": ("top",)}


@dataclass(frozen=True, kw_only=True)
class ProbMask(Method):
    """Learn which weights to keep as probabilities under one budget.

    ``scope="global"`` is the paper's method (GSB); ``"layer"`` gives each layer its own budget of
    the same fraction (LSB). ``cost="flops"`` budgets multiplications instead of weights: sparsity
    is then the fraction of multiplications removed, and ``attach`` needs ``example_inputs``.
    ``train_weights=False`` looks for a supermask: weights stay as they are, by default drawn anew
    from Kaiming's normal distribution (``reinitialize``).

    ``recipe`` says where the probabilities come from. ``"tied"``: from the weights, a function of
    their magnitude and of one threshold, set at every update so that the budget is kept; good from
    a thousand updates on. ``"learned"``: trained by Adam through a relaxed random mask, as the
    paper does, with schedules for short trainings. ``"paper"``: the same with the paper's
    settings, for trainings as long as its. None is tied, but learned where that makes no sense:
    for supermasks, with ``compat``, and if ``prob_lr``, ``draws`` or ``select`` ask for it.

    Settings that are None have the recipe's value. The budget falls from ``ramp_begin`` to
    ``ramp_end`` of the training, per update (``every="step"``) or per epoch, the temperature from
    start to end. From ``freeze_at`` on (1: at the end) the exact top-K mask is fixed and only its
    weights train on; K is the final budget, also where the ramp has not got there yet. The mask at
    the end is the exact top-K by probability, ties by weight magnitude (``select="top"``), or one
    Bernoulli draw, as in the paper, of about K (``"sample"``).

    Learned probabilities: ``draws`` masks are sampled per update, ``prob_lr`` is Adam's rate; the
    learned recipe raises the paper's 6e-3 for trainings shorter than the paper's. Tied ones:
    weights that are removed get the ``outside`` part of the gradient (0.5 for a sparsity above
    0.95, else 1). By ``forget_by`` of the training the values that the weights began with have
    faded out, so that a magnitude shows what was learned (0: they stay); None forgets by 0.5 in a
    network that is fresh, which is one whose BatchNorm has seen no data, and trained by SGD. At
    ``choose_at`` (None: 0.05 before ``freeze_at``) the choice is final; from there to ``freeze_at``
    the threshold falls to zero, and the probabilities of the chosen weights go to 1.

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

    recipe: RecipeName | None = None
    scope: Literal["global", "layer"] = "global"
    cost: Literal["params", "flops"] = "params"
    train_weights: bool = True
    reinitialize: bool | None = None
    draws: int | None = None
    prob_lr: float | None = None
    outside: float | None = None
    forget_by: float | None = None
    choose_at: float | None = None
    temperature_start: float | None = None
    temperature_end: float | None = None
    ramp_begin: float | None = None
    ramp_end: float | None = None
    every: Literal["step", "epoch"] | None = None
    freeze_at: float | None = None
    select: Literal["top", "sample"] | None = None
    min_keep_per_layer: int = 0
    clip_norm: float | None = None
    compat: Literal["official"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_each()
        self._check_together()
        settings = self.resolved
        if settings.ramp_begin > settings.ramp_end:
            raise InputError(
                f"ProbMask({self._told('ramp_begin')}, {self._told('ramp_end')}): the budget falls "
                "from begin to end; begin must not come after end."
            )
        if settings.temperature_end > settings.temperature_start:
            raise InputError(
                f"ProbMask({self._told('temperature_start')}, {self._told('temperature_end')}): "
                "the temperature falls; end must not be above start."
            )
        if self.choose_at is not None and self.choose_at > settings.freeze_at:
            raise InputError(
                f"ProbMask(choose_at={self.choose_at:g}, {self._told('freeze_at')}): what is "
                "frozen has been chosen; choose_at must not be above freeze_at."
            )
        if settings.select == "sample" and self.min_keep_per_layer > 0:
            raise InputError(
                f"ProbMask(select='sample', min_keep_per_layer={self.min_keep_per_layer}): a "
                "sample promises no layer anything; drop one of the two."
            )

    def _check_each(self) -> None:
        check_choice("ProbMask", "recipe", self.recipe, (None, *RECIPES))
        check_choice("ProbMask", "scope", self.scope, ("global", "layer"))
        check_choice("ProbMask", "cost", self.cost, ("params", "flops"))
        check_choice("ProbMask", "every", self.every, (None, "step", "epoch"))
        check_choice("ProbMask", "select", self.select, (None, "top", "sample"))
        check_choice("ProbMask", "compat", self.compat, (None, "official"))
        check_choice("ProbMask", "train_weights", self.train_weights, (True, False))
        check_choice("ProbMask", "reinitialize", self.reinitialize, (None, True, False))
        least = self.min_keep_per_layer
        check_count("ProbMask", "min_keep_per_layer", least, least=0, meaning="weights")
        if self.draws is not None:
            meaning = "masks sampled per update"
            check_count("ProbMask", "draws", self.draws, least=1, meaning=meaning)
        for name in ("prob_lr", "clip_norm"):
            self._check(name, 1e-9, math.inf, "a positive number")
        for name in ("temperature_start", "temperature_end"):
            self._check(name, 1e-3, 1, "a temperature")
        for name in ("ramp_begin", "ramp_end", "freeze_at", "forget_by", "choose_at"):
            self._check(name, 0, 1, "a part of the training")
        self._check("outside", 0, 1, "a part of the gradient")

    def _check(self, name: str, low: float, high: float, meaning: str) -> None:
        value = getattr(self, name)
        if value is not None:
            check_within("ProbMask", name, value, low, high, meaning=meaning)

    def _check_together(self) -> None:
        if self.compat == "official" and self.cost != "params":
            raise InputError(
                f"ProbMask(compat='official', cost={self.cost!r}): the released code budgets "
                "parameters only; drop one of the two."
            )
        tied = self.recipe_name == "tied"
        if tied and self.compat is not None:
            raise InputError(
                "ProbMask(recipe='tied', compat='official'): the released code learns its "
                "probabilities; drop one of the two."
            )
        if tied and not self.train_weights:
            raise InputError(
                "ProbMask(recipe='tied', train_weights=False): probabilities that are tied to the "
                "weights are learned by training these; drop one of the two."
            )
        others = _LEARNED_ONLY if tied else _TIED_ONLY
        for name in others:
            if getattr(self, name) not in (None, *_HARMLESS.get(name, ())):
                raise InputError(
                    f"ProbMask({self._reason}, {name}={getattr(self, name)!r}): "
                    f"{name} is a setting of {'learned' if tied else 'tied'} probabilities; drop "
                    "one of the two."
                )

    @property
    def recipe_name(self) -> RecipeName:
        """The recipe asked for, or the one that goes with the other settings."""
        if self.recipe is not None:
            return self.recipe
        return "learned" if self._asking_for_learned else "tied"

    @property
    def _asking_for_learned(self) -> list[str]:
        """The settings that make sense with learned probabilities only."""
        asking = [
            name
            for name in _LEARNED_ONLY
            if getattr(self, name) not in (None, *_HARMLESS.get(name, ()))
        ]
        asking += [] if self.compat is None else ["compat"]
        return asking if self.train_weights else [*asking, "train_weights"]

    @property
    def _reason(self) -> str:
        """The setting that decided about the recipe."""
        asking = self._asking_for_learned
        name = "recipe" if self.recipe is not None or not asking else asking[0]
        return f"{name}={getattr(self, name)!r}"

    @property
    def resolved(self) -> Recipe:
        """What the recipe decides, but for what was said."""
        return RECIPES[self.recipe_name].with_given(self.settings())

    @property
    def chosen_at(self) -> float:
        """When the choice of tied probabilities is final, as a part of the training."""
        end = self.resolved.freeze_at
        return max(0.0, end - _CHOSEN_BEFORE) if self.choose_at is None else self.choose_at

    def _told(self, name: str) -> str:
        """A setting and its value, and whether that is the recipe's or was said by the user."""
        if (given := getattr(self, name)) is not None:
            return f"{name}={given:g}"
        return f"{name}={getattr(self.resolved, name):g} (the {self.recipe_name} recipe's)"

    def full_settings(self) -> dict[str, Any]:
        """The settings, with the recipe and what it decides."""
        return {**self.settings(), "recipe": self.recipe_name, **asdict(self.resolved)}

    def budget(self, sites: Sequence[Site], context: Context) -> Budget:
        """What may be kept of these sites."""
        return Budget(
            self,
            sites,
            context,
            per_layer=self.scope == "layer",
            flops=self.cost == "flops",
            least_per_layer=self.min_keep_per_layer,
        )

    def begin(self, sites: Sequence[Site], context: Context) -> Masker:
        """Keep every weight for certain; freeze weights if they are not to be trained."""
        if not context.epochs_known and (
            self.resolved.every == "epoch" or self.compat == "official"
        ):
            raise InputError(
                f"attach(ProbMask(recipe={self.recipe!r}, every={self.every!r}, "
                f"compat={self.compat!r})): its schedules count in epochs; pass steps_per_epoch= "
                "to attach."
            )
        fresh = self.reinitialize or (self.reinitialize is None and not self.train_weights)
        if fresh:
            check_fans("ProbMask(reinitialize)", sites)
        masker = self._masker(sites, context)  # refuses what it must before weights change
        self._warn_of_early_choice()
        if fresh:
            kaiming_normal_(sites, context.seed)
        if not self.train_weights:
            for site in sites:
                site.weight.requires_grad_(False)
                site.weight.grad = None
        return masker

    def _warn_of_early_choice(self) -> None:
        """Say so if the choice is final while the budget is still falling."""
        settings, final = self.resolved, 1 - self.sparsity
        at = self.chosen_at if self.recipe_name == "tied" else settings.freeze_at
        kept = kept_fraction(at, final, begin=settings.ramp_begin, end=settings.ramp_end)
        if many_at_once(kept, final):
            early = self._told("freeze_at" if self.choose_at is None else "choose_at")
            warnings.warn(
                f"ProbMask({early}, {self._told('ramp_end')}): the choice is final at {at:g} of "
                f"the training, while {100 * kept:.3g} % of the weights are kept; all but "
                f"{100 * final:.3g} % then go at once. Let the ramp end before.",
                EarlyEndWarning,
                stacklevel=5,  # where attach was called
            )

    def _masker(self, sites: Sequence[Site], context: Context) -> Masker:
        if self.recipe_name == "tied":
            return TiedMasker(self, sites, context)
        kind = OfficialProbMasker if self.compat == "official" else ProbMasker
        return kind(self, sites, context)
