"""Convert records of earlier formats to the current one.

In format 1, ProbMask had no recipes: its default was today's learned recipe, and
``freeze_at=None`` meant never. Feather and ST-3 did not clip gradients.

Format 2 stored None for settings that the recipe determined. The values of the recipes have changed
since.
"""

from collections.abc import Mapping
from typing import Any

from probmask.training.record_format import RECORD_FORMAT

# Values of the recipes up to format 2.
_LEARNED = {
    "draws": 1,
    "temperature_start": 1.0,
    "temperature_end": 0.03,
    "ramp_begin": 0.05,
    "ramp_end": 0.5,
    "every": "step",
    "freeze_at": 0.6,
    "select": "top",
}
_RECIPES: dict[str, dict[str, Any]] = {
    "tied": {
        **_LEARNED,
        "temperature_start": 1 / 3,
        "temperature_end": 0.01,
        "ramp_begin": 0.0,
        "freeze_at": 1.0,
    },
    "learned": _LEARNED,
    "paper": {
        **_LEARNED,
        "draws": 2,
        "ramp_begin": 0.16,
        "ramp_end": 0.6,
        "every": "epoch",
        "freeze_at": 1.0,
        "select": "sample",
    },
}
# Methods that clip gradients by default since format 2.
_NOW_CLIPPED = ("feather", "st3")


def upgrade_record(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record in the current format, or unchanged if no key changed its meaning."""
    method, written = record["method"], record["format"]
    if written == 1 and method["name"] in _NOW_CLIPPED and "clip_norm" not in method:
        method = {**method, "clip_norm": None}
    elif written <= 2 and method["name"] == "probmask":
        method = _completed(_from_format_1(method) if written == 1 else method)
    else:
        return record
    # The configuration stays as it was written: identity reads the settings from "method".
    return {**record, "format": RECORD_FORMAT, "method": method}


def _from_format_1(method: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of format 1 to format 2."""
    never_frozen = "freeze_at" in method and method["freeze_at"] is None
    return {"recipe": "learned", **method, **({"freeze_at": 1.0} if never_frozen else {})}


def _completed(method: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the values that the recipe had in format 2."""
    recipe = method.get("recipe") or ("learned" if _implies_learned(method) else "tied")
    rest = {key: value for key, value in method.items() if key != "recipe"}
    given = {key: value for key, value in rest.items() if value is not None}
    full = {"name": method["name"], "recipe": recipe, **rest, **_RECIPES[recipe], **given}
    # The threshold was applied until the masks were frozen.
    return full | ({"choose_at": full["freeze_at"]} if recipe == "tied" else {})


def _implies_learned(method: Mapping[str, Any]) -> bool:
    """Return whether the settings imply the learned recipe, as in `ProbMask.recipe_name`."""
    return (
        method.get("train_weights") is False
        or method.get("compat") is not None
        or method.get("prob_lr") is not None
        or method.get("draws") not in (None, 1)
        or method.get("select") not in (None, "top")
    )
