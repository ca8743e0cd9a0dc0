"""Methods: the settings of a rule that decides which weights to keep.

A `Method` is a frozen dataclass whose keyword arguments are the method's settings, with the
defaults of its paper. `Method.begin` attaches it to the sites of one model and returns the `Masker`
that holds all state. A method that trains, prunes and trains again divides one training into
phases.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from torch import nn

from probmask.checks import Sparsity, check_fields, check_order
from probmask.core.allocation import Spread
from probmask.errors import InputError
from probmask.masking.masker import Masker
from probmask.masking.probe import Probe
from probmask.masking.sites import Site
from probmask.messages import suggestion

# Warn if one step reduces the number of kept weights by more than this factor.
_ABRUPT = 1.1


@dataclass(frozen=True)
class Phase:
    """A phase of the training with its own learning-rate schedule.

    The rate is ``rate_scale`` times the configured rate; it follows a cosine to 0 or is constant. A
    cosine may begin with the configured warm-up.
    """

    name: str
    epochs: int
    rate: Literal["cosine", "constant"] = "cosine"
    rate_scale: float = 1.0
    warm_up: bool = True


@dataclass(frozen=True)
class Context:
    """Information about the training that a method can use.

    Attributes:
        total_steps: Number of planned updates.
        steps_per_epoch: Number of updates per epoch.
        epochs_known: Whether the caller passed ``steps_per_epoch``.
        seed: Seed of all noise.
        macs_per_weight: Returns, per site, the number of multiplications that each of its weights
            takes part in for one example. It runs the model once on the ``example_inputs``.
        model: The model.
        phase_ends: The updates at which the phases end; the last is ``total_steps``.
        probe: Data that the caller passed, or None; see `required_probe`.
        pretrained: Whether the caller states that the weights are pretrained.
    """

    total_steps: int
    steps_per_epoch: int
    epochs_known: bool
    seed: int
    macs_per_weight: Callable[[], tuple[int, ...]]
    model: nn.Module
    phase_ends: tuple[int, ...]
    probe: Probe | None = None
    pretrained: bool = False

    def required_probe(self, method: str) -> Probe:
        """Return the probe.

        Raises:
            InputError: If the caller passed none.
        """
        if self.probe is None:
            raise InputError(
                f"attach({method}): this method needs data to measure before it prunes; pass "
                "probe=probmask.Probe(loader)."
            )
        return self.probe


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A rule that decides which weights to keep. Its settings are checked when it is built.

    A subclass states the constraints of its settings in their annotations (see `probmask.checks`)
    and lists settings that must not decrease in ``ordered``.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    group: ClassVar[str] = "yours"
    year: ClassVar[int | None] = None
    reference: ClassVar[str] = ""
    ordered: ClassVar[tuple[str, ...]] = ()

    sparsity: Sparsity

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Check the names of the settings: the error of a dataclass suggests none."""
        known = inspect.signature(cls.__init__).parameters
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        for name in settings:
            if name not in known and not any_name:
                hint = suggestion(name, set(known) - {"self"})
                raise TypeError(f"{cls.__name__}({name}=…): no such setting; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)
        check_order(self, *self.ordered)

    @abstractmethod
    def begin(self, sites: Sequence[Site], context: Context) -> Masker:
        """Attach the method to the sites of one model and return its masker."""

    def refuses_shards(self) -> str:
        """Return why the method cannot train weights that FSDP2 shards; empty if it can.

        A method that can sums over all shards wherever it needs whole weights: see ``shards``,
        ``shapes`` and ``weights`` of its masker.
        """
        return "it was written for whole weights"

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return the phases of a training with this number of epochs."""
        return (Phase("train", epochs),)

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, as the constructor takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def full_settings(self) -> dict[str, Any]:
        """Return the settings with None replaced by the values that a recipe gives them."""
        return self.settings()

    def keep_of(self, sites: Sequence[Site], spread: Spread | None = None) -> int:
        """Return the number of weights to keep of all sites.

        Raises:
            InputError: If it is zero, or if the layers that ``spread`` leaves dense exceed it.
        """
        sizes = [site.size for site in sites]
        keep = number_kept(self.sparsity, sum(sizes))
        caller = f"{type(self).__name__}(sparsity={self.sparsity})"
        if keep < 1:
            raise InputError(
                f"{caller}: none of the {sum(sizes)} weights would be kept; lower sparsity."
            )
        if spread is not None:
            spread.check(caller, sizes, keep)
        return keep


def number_kept(sparsity: float, size: int) -> int:
    """n - round(sparsity n): the number of ``size`` weights that are kept."""
    return size - round(sparsity * size)


def is_abrupt(kept_before: float, kept_after: float) -> bool:
    """Return whether pruning from one kept fraction to another in one step deserves a warning."""
    return kept_before > _ABRUPT * kept_after
