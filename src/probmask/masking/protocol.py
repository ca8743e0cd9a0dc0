"""The protocol between a training loop and a method: three moments of a step, and the end.

A `Method` is a configuration: a frozen dataclass whose keyword arguments are the method's settings,
with the defaults of its paper. Put to work on the sites of one model it becomes a `Masker`, which
holds all state. Training then passes through three moments, over and over:

    before_forward   masks for the coming forward pass: temperature, noise
    after_backward   gradients are there, nothing is updated yet: clip them, look at them, grow
    after_update     weights and extra trainables are updated: project, prune, schedule

The sparsifier (`probmask.attach`) calls them; a method never hooks an optimizer itself. A method
that trains, prunes and trains again divides one training into phases (`Method.phases`): they are
stretches of the same run, so that a checkpoint at any update resumes in the right one, and the
epochs of all of them are counted.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from probmask.checks import check_sparsity
from probmask.errors import InputError, LayerCollapseWarning
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight
from probmask.masking.sites import Site


@dataclass(frozen=True)
class Progress:
    """How far the training is: updates done, updates planned, updates per epoch."""

    step: int
    total_steps: int
    steps_per_epoch: int

    @property
    def fraction(self) -> float:
        """The part of the training that is done, in [0, 1]."""
        return min(1.0, self.step / self.total_steps)

    @property
    def epoch(self) -> int:
        """The number of epochs that are done."""
        return self.step // self.steps_per_epoch

    @property
    def epochs(self) -> int:
        """The number of epochs planned."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def epoch_fraction(self) -> float:
        """The part of the training that was done when this epoch began."""
        return min(1.0, self.epoch / self.epochs)


@dataclass(frozen=True)
class Phase:
    """A stretch of the training with a learning-rate schedule of its own.

    The rate falls along a cosine to zero or stays; ``rate_scale`` times the rate asked for.
    """

    name: str
    epochs: int
    rate: Literal["cosine", "constant"] = "cosine"
    rate_scale: float = 1.0


@dataclass(frozen=True)
class Probe:
    """Data for methods that look at some before they decide: batches of inputs and targets.

    ``batches`` is any iterable that can be gone through again and again, as a DataLoader can;
    ``criterion`` is the loss that is trained, of outputs and targets. With several ranks every one
    may bring batches of its own: what is measured is averaged.
    """

    batches: Iterable[Any]
    criterion: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy

    def __deepcopy__(self, _: dict[int, Any]) -> "Probe":
        return self  # a copy of a model does not copy its data


@dataclass(frozen=True)
class Context:
    """What a method may know of the training it is put into.

    ``phase_ends`` are the updates at which the phases end, the last of them ``total_steps``.
    ``probe`` is there if the caller gave one: ask by `required_probe`.

    ``macs_per_weight`` counts, per site, the multiplications each of its weights takes part in for
    one example; it runs the model once and needs the example inputs given to ``attach``.
    ``epochs_known`` tells whether the caller said what an epoch is.
    """

    total_steps: int
    steps_per_epoch: int
    epochs_known: bool
    seed: int
    macs_per_weight: Callable[[], tuple[int, ...]]
    model: nn.Module
    phase_ends: tuple[int, ...]
    probe: Probe | None = None

    def required_probe(self, method: str) -> Probe:
        """The probe, or a refusal that says how to give one."""
        if self.probe is None:
            raise InputError(
                f"attach({method}): looks at data to decide what stays; pass "
                "probe=probmask.Probe(loader)."
            )
        return self.probe


@dataclass(frozen=True)
class Histogram:
    """How many values lie in each of some equally wide bins from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Trainables:
    """Tensors that a method trains beside the weights, and how.

    ``learning_rate`` gives the rate at each moment from the progress and the rate of the weights;
    the optimizer's other settings stay as made.
    """

    optimizer: Optimizer
    learning_rate: Callable[[Progress, float], float]


class Masker(ABC):
    """A method at work on one model: one `MaskedWeight` per site, and all state there is.

    It must survive ``copy.deepcopy`` together with the model, so it holds tensors and numbers, no
    optimizers and no hooks.
    """

    draws: int = 1
    against_collapse: str = ""  # what the user can do about a layer that loses all its weights

    def __init__(self, sites: Sequence[Site], masks: Sequence[MaskedWeight]) -> None:
        self._collapsed: set[str] = set()
        self.names = tuple(site.name for site in sites)
        self.weights = tuple(site.weight for site in sites)
        self.masks = tuple(masks)
        for index, mask in enumerate(self.masks):
            mask.follow(self, leads=index == 0)

    @abstractmethod
    def choose(self) -> list[Tensor]:
        """Decide the hard masks: which weights would stay if training ended now."""

    def trainables(self) -> list[Trainables]:
        """Make the optimizers for what the method trains beside the weights."""
        return []

    def before_forward(self, now: Progress, draw: int) -> None:
        """Prepare the masks for the next forward passes, up to the next update or draw."""

    def penalty(self) -> Tensor | float:
        """A term that the training loop adds to the loss."""
        return 0.0

    def observe(self, loss: Tensor, draw: int) -> None:
        """Take note of the loss of a draw, for methods that learn from it alone."""

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Act on gradients, before the optimizers do."""

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Act on updated weights and trainables."""

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Go over to the next phase; the first, 0, begins without a call."""

    def release(self) -> None:
        """Let go of the model's modules, if the method has put hooks on them."""

    def metrics(self) -> dict[str, float]:
        """Numbers worth a line in a log."""
        return {}

    def histograms(self) -> dict[str, Histogram]:
        """Distributions worth a plot, by name; none where there is nothing left to see."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resume needs beyond the model's own ``state_dict``.

        Here: the masks, once they are frozen. A method adds what it has.
        """
        return {"frozen": [mask.hard for mask in self.masks] if self.frozen else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for index, mask in enumerate(self.masks):
            mask.frozen = state["frozen"] is not None
            if mask.frozen:
                mask.take_hard(state["frozen"][index])

    def refresh_hard_masks(self) -> None:
        """Bring the hard masks up to date, if any tensor they are made from has changed."""
        pairs = list(zip(self.masks, self.weights, strict=True))
        if all(mask.is_current(weight) for mask, weight in pairs):
            return
        with torch.no_grad():
            for (mask, weight), hard in zip(pairs, self.choose(), strict=True):
                mask.harden(hard, weight)

    @torch.no_grad()
    def freeze(self) -> None:
        """Fix the hard masks as they are now, for training and evaluation alike."""
        self.refresh_hard_masks()
        for mask, weight in zip(self.masks, self.weights, strict=True):
            if not mask.frozen:
                settled = mask.settled_weight(weight)
                if settled is not weight:
                    weight.copy_(settled)
                mask.frozen = True

    def warn_of_collapse(self, kept: Sequence[float]) -> None:
        """Name each layer that has less than one weight left, once."""
        for name, count in zip(self.names, kept, strict=True):
            if count < 1 and name not in self._collapsed:
                self._collapsed.add(name)
                warnings.warn(
                    f"{name} is losing all of its weights{self.against_collapse}.",
                    LayerCollapseWarning,
                    stacklevel=2,
                )

    @property
    def frozen(self) -> bool:
        """Whether the masks are final."""
        return all(mask.frozen for mask in self.masks)


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A rule that decides which weights stay: its settings, checked when it is made."""

    name: ClassVar[str]
    summary: ClassVar[str]
    group: ClassVar[str] = "yours"
    year: ClassVar[int | None] = None
    reference: ClassVar[str] = ""

    sparsity: float

    def __post_init__(self) -> None:
        check_sparsity(type(self).__name__, self.sparsity)

    @abstractmethod
    def begin(self, sites: Sequence[Site], context: Context) -> Masker:
        """Put the method to work on the sites of one model."""

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """How a training is divided for which so many epochs were asked for."""
        return (Phase("train", epochs),)

    def settings(self) -> dict[str, Any]:
        """The method's settings by name, as its constructor takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def full_settings(self) -> dict[str, Any]:
        """The same, None replaced by what a recipe makes of it."""
        return self.settings()


def keep_of(sparsity: float, size: int) -> int:
    """n - round(sparsity n): how many of ``size`` weights are kept."""
    return size - round(sparsity * size)
