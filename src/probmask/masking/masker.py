"""The masker: a method attached to one model, and the moments of an update in which it acts.

    before_forward   prepare the next forward passes: temperature, noise, masks
    after_backward   gradients exist, nothing is updated yet: clip, inspect, grow
    after_update     weights and the method's own parameters are updated: project, prune

The sparsifier calls them. Inside ``optimizer.step()`` it runs, in this order: `after_backward`, the
optimizer of the weights, the optimizers of the method's own parameters (`Masker.trainables`),
`after_update`, and `before_forward` of the next update. A masker never hooks an optimizer itself.
All of them are called after the masks are frozen too.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from probmask.errors import LayerCollapseWarning
from probmask.masking.divergence import diagnosing
from probmask.masking.optimizers import WeightOptimizers
from probmask.masking.parametrization import MaskedWeight, map_tensors, restore_attribute
from probmask.masking.sharding import rows_of, shards_of, whole_like
from probmask.masking.sites import Site


@dataclass(frozen=True)
class Progress:
    """Position in the training: updates done, updates planned, updates per epoch."""

    step: int
    total_steps: int
    steps_per_epoch: int

    @property
    def fraction(self) -> float:
        """Fraction of the training that is done, in [0, 1]; without the current update."""
        return min(1.0, self.step / self.total_steps)

    @property
    def next_fraction(self) -> float:
        """Fraction of the training that is done after the current update. It may exceed 1."""
        return (self.step + 1) / self.total_steps

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.step // self.steps_per_epoch

    @property
    def epochs(self) -> int:
        """Number of planned epochs."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    @property
    def epoch_fraction(self) -> float:
        """Fraction of the training that was done at the start of the current epoch."""
        return min(1.0, self.epoch / self.epochs)


@dataclass(frozen=True)
class Histogram:
    """Number of values in each of several equally wide bins from ``low`` to ``high``."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Trainables:
    """Parameters that a method trains in addition to the weights.

    ``learning_rate`` returns the rate of the current update, given the progress and the rate of the
    weights. The other settings of the optimizer stay unchanged.
    """

    optimizer: Optimizer
    learning_rate: Callable[[Progress, float], float]


class Masker(ABC):
    """A method attached to one model: one `MaskedWeight` per site, and the method's whole state.

    ``copy.deepcopy`` copies it together with the model. It therefore holds tensors and numbers,
    but no optimizers.
    """

    saved: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that a resumed training needs, apart from those of the sites."""
    draws: int = 1
    collapse_advice: ClassVar[str] = ""
    """Advice that the warning about a layer without weights adds."""

    def __init__(self, sites: Sequence[Site], masked: Sequence[MaskedWeight], keep: int) -> None:
        self.names = tuple(site.name for site in sites)
        self.shapes = tuple(site.shape for site in sites)
        self.shards = shards_of([site.weight for site in sites])
        self.masked = tuple(masked)
        self._weights = tuple(site.weight for site in sites)
        self.keep = keep
        self.size = sum(site.size for site in sites)
        self._collapsed: set[str] = set()
        self._prepared: tuple[Progress, int] | None = None
        for index, each in enumerate(self.masked):
            each.follow(self, leads=index == 0, last=index == len(self.masked) - 1)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The weights of all sites; if FSDP2 shards them, their rows on this rank."""
        return tuple(rows_of(weight) for weight in self._weights)

    @abstractmethod
    def choose(self) -> list[Tensor]:
        """Return the masks that all sites would have if training ended now: exactly ``keep``."""

    def trainables(self) -> list[Trainables]:
        """Build the optimizers of the method's own parameters."""
        return []

    def prepare(self, now: Progress, draw: int) -> None:
        """Call `before_forward`, and again if ``load_state_dict`` replaces the model's weights."""
        self._prepared = now, draw
        self.before_forward(now, draw)

    @torch.no_grad()
    def weights_loaded(self) -> None:
        """Prepare the next forward passes again, from the weights that have been loaded."""
        if self._prepared is not None:
            self.before_forward(*self._prepared)

    def before_forward(self, now: Progress, draw: int) -> None:
        """Prepare the forward passes until the next update or draw."""

    def penalty(self) -> Tensor | float:
        """Return the term that the training loop adds to the loss."""
        return 0.0

    def observe(self, loss: Tensor, draw: int) -> None:
        """Record the loss of a draw, for methods that learn from its value."""

    def gradients_arrived(self, gradients: Mapping[int, Tensor]) -> None:
        """Compute sums over the gradients of sharded weights that their masked weights need.

        This is called only if FSDP2 shards the weights, at the end of a backward pass, with the
        rows of the gradients of the effective weights, by the index of the site.
        """

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Act on the gradients, before the optimizers do.

        Gradients are unscaled and averaged over the ranks. The gradient of a weight may be None. An
        optimizer that evaluates a closure repeatedly calls this once per evaluation.
        """

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        """Act on the updated weights and parameters."""

    def begin_phase(self, phase: int, now: Progress, optimizers: WeightOptimizers) -> None:
        """Begin the next phase. Phase 0 begins without a call."""

    def release(self) -> None:
        """Remove hooks that the method has put on the model's modules."""

    def metrics(self) -> dict[str, float]:
        """Return numbers for the log. ``expected_sparsity`` is the current sparsity."""
        return {}

    def histograms(self) -> dict[str, Histogram]:
        """Return distributions for the log, by name."""
        return {}

    @property
    def frozen(self) -> bool:
        """Whether the masks are final."""
        return all(each.frozen for each in self.masked)

    def keep_everything(self) -> None:
        """Freeze masks that prune nothing: the training is dense."""
        for each in self.masked:
            each.frozen = True

    def refresh_masks(self) -> None:
        """Recompute the masks if any tensor that they depend on has changed."""
        pairs = list(zip(self.masked, self.weights, strict=True))
        if all(each.is_current(weight) for each, weight in pairs):
            return
        with torch.no_grad(), self.diagnosing("choosing the masks"):
            for (each, weight), mask in zip(pairs, self.choose(), strict=True):
                each.update_mask(mask, weight)

    def diagnosing(self, moment: str) -> AbstractContextManager[None]:
        """Return a context in which errors caused by NaNs name the weight that contains them."""
        return diagnosing(moment, self.names, self.weights, self.masked)

    def move_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` to the tensors in ``saved``: the model moves to another device."""
        for name in self.saved:
            setattr(self, name, map_tensors(getattr(self, name), fn))

    @torch.no_grad()
    def freeze(self) -> None:
        """Make the current masks final, for training and evaluation."""
        self.refresh_masks()
        for each, weight in zip(self.masked, self.weights, strict=True):
            if not each.frozen:
                final = each.final_weight(weight) if each.trained else weight
                if final is not weight:
                    weight.copy_(final)
                each.frozen = True

    def warn_of_collapse(self, kept: Sequence[float]) -> None:
        """Warn once about each layer that keeps less than one weight."""
        for name, count in zip(self.names, kept, strict=True):
            if count < 1 and name not in self._collapsed:
                self._collapsed.add(name)
                warnings.warn(
                    f"{name} is losing all of its weights{self.collapse_advice}.",
                    LayerCollapseWarning,
                    stacklevel=2,
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a bit-exact resume needs besides the model's ``state_dict``.

        A method declares it in ``saved``, here and in its `MaskedWeight`. The parameters that it
        trains are included, because the model's ``state_dict`` has only the plain model's names.
        """
        pairs = list(zip(self.masked, self._weights, strict=True))
        return {
            "values": {name: getattr(self, name) for name in self.saved},
            "sites": [
                map_tensors(each.state(), partial(whole_like, weight=weight))
                for each, weight in pairs
            ],
            "trained": [
                [whole_like(p.detach(), weight) for p in each.parameters()]
                for each, weight in pairs
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        state = map_tensors(dict(state), rows_of)
        for name in self.saved:
            restore_attribute(self, name, state["values"][name], like=self.weights[0])
        sites = zip(self.masked, self.weights, state["sites"], state["trained"], strict=True)
        for each, weight, site, trained in sites:
            for parameter, value in zip(each.parameters(), trained, strict=True):
                parameter.copy_(value)
            each.load_state(site, weight)
