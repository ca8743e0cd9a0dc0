"""Reading records of earlier formats as if they were of today's.

Format 1 is from before ProbMask had recipes. Its default then was what is now the learned recipe,
and a ``freeze_at`` of None meant never. Feather and ST-3 did not clip gradients.

Format 2 left None where the recipe decided, whose values have changed since.
"""

from collections.abc import Mapping
from typing import Any

from probmask.training.record_format import RECORD_FORMAT

# What the recipes decided up to format 2.
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
# Methods whose gradients are clipped by default since format 2.
_NOW_CLIPPED = ("feather", "st3")


def upgraded(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record in today's format; as it is where no key of it has changed its meaning."""
    method, written = record["method"], record["format"]
    if written == 1 and method["name"] in _NOW_CLIPPED and "clip_norm" not in method:
        method = {**method, "clip_norm": None}
    elif written <= 2 and method["name"] == "probmask":
        method = _in_full(_renamed(method) if written == 1 else method)
    else:
        return record
    # Its configuration stays what was said then: only the method tells one run from another.
    return {**record, "format": RECORD_FORMAT, "method": method}


def _renamed(method: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of format 1 in the words of format 2."""
    never_frozen = "freeze_at" in method and method["freeze_at"] is None
    return {"recipe": "learned", **method, **({"freeze_at": 1.0} if never_frozen else {})}


def _in_full(method: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of format 2 with what the recipe decided then."""
    recipe = method.get("recipe") or ("learned" if _is_learned_untold(method) else "tied")
    rest = {key: value for key, value in method.items() if key != "recipe"}
    given = {key: value for key, value in rest.items() if value is not None}
    full = {"name": method["name"], "recipe": recipe, **rest, **_RECIPES[recipe], **given}
    # The threshold stayed until the masks were frozen.
    return full | ({"choose_at": full["freeze_at"]} if recipe == "tied" else {})


def _is_learned_untold(method: Mapping[str, Any]) -> bool:
    """Whether no recipe meant the learned one, by the rule of `ProbMask.recipe_name`."""
    return (
        method.get("train_weights") is False
        or method.get("compat") is not None
        or method.get("prob_lr") is not None
        or method.get("draws") not in (None, 1)
        or method.get("select") not in (None, "top")
    )
