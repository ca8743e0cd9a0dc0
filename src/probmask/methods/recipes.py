"""How ProbMask learns its probabilities: three recipes, and the settings that each decides."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

RecipeName = Literal["tied", "learned", "paper"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings whose best values depend on how the probabilities are learned."""

    draws: int
    temperature_start: float
    temperature_end: float
    ramp_begin: float
    ramp_end: float
    every: Literal["step", "epoch"]
    freeze_at: float
    select: Literal["top", "sample"]

    def with_given(self, settings: dict[str, Any]) -> "Recipe":
        """The recipe, but for what the user has said."""
        names = {field.name for field in fields(self)}
        given = {key: value for key, value in settings.items() if value is not None}
        return replace(self, **{key: value for key, value in given.items() if key in names})


RECIPES: dict[RecipeName, Recipe] = {
    "tied": Recipe(
        draws=1,
        temperature_start=1 / 3,
        temperature_end=1 / 3,
        ramp_begin=0.0,
        ramp_end=0.5,
        every="step",
        freeze_at=0.95,
        select="top",
    ),
    "learned": Recipe(
        draws=1,
        temperature_start=1.0,
        temperature_end=0.03,
        ramp_begin=0.05,
        ramp_end=0.5,
        every="step",
        freeze_at=0.6,
        select="top",
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
    ),
}
