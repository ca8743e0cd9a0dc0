"""Convert records of earlier formats to the current one.

In format 1, ProbMask had no recipes: its default was the adaptive recipe, then called "learned",
and ``freeze_at=None`` meant never. Feather and ST-3 did not clip gradients.

Format 2 stored None for settings that the recipe determined. The values of the recipes have changed
since.

Up to format 3, one method "probmask" had three recipes. The recipe "tied", its default, is now the
method "probmask-tied"; "learned" is now the recipe "adaptive" of "probmask"; "paper" is unchanged.

Up to format 4, every ProbMask had the paper's estimator. The adaptive recipe now has another one.
"""

from collections.abc import Mapping
from typing import Any

from probmask.errors import InputError
from probmask.messages import shown
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
# Settings that up to format 3 were allowed for one of the two forms of ProbMask only.
_NOT_OF_TIED = frozenset(
    ("recipe", "draws", "prob_lr", "select", "train_weights", "reinitialize", "compat")
)
_NOT_OF_LEARNED = frozenset(("outside", "forget_by", "choose_at"))
# How probabilities were learned up to format 4.
_FORMER = {"estimator": "relaxed"}


def upgrade_record(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the record in the current format, or unchanged if no key changed its meaning.

    Raises:
        InputError: The method has a recipe that its format does not have.
    """
    method, written = record["method"], record["format"]
    if written == 1 and method["name"] in _NOW_CLIPPED and "clip_norm" not in method:
        method = {**method, "clip_norm": None}
    elif written <= 4 and method["name"] == "probmask":
        if written == 1:
            method = _from_format_1(method)
        if written <= 2:
            method = _completed(method)
        if written <= 3:
            method = _split(method)
        if method["name"] == "probmask":
            method = {**method, **_FORMER}
    else:
        return record
    # The configuration stays as it was written: identity reads the settings from "method".
    return {**record, "format": RECORD_FORMAT, "method": method}


def upgrade_method(method: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a method as artifacts store them, under the current names.

    Artifacts store no format, but since format 4 the settings of "probmask" have a recipe that is
    not "tied", "learned" or None, and since format 5 they have an estimator.
    """
    if method.get("name") != "probmask" or "recipe" not in method or "estimator" in method:
        return method
    if method["recipe"] != "adaptive":
        method = _split(method)
    return method if method["name"] != "probmask" else {**method, **_FORMER}


def _from_format_1(method: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of format 1 to format 2."""
    never_frozen = "freeze_at" in method and method["freeze_at"] is None
    return {"recipe": "learned", **method, **({"freeze_at": 1.0} if never_frozen else {})}


def _completed(method: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the values that the recipe had in format 2."""
    recipe = _recipe(method)
    rest = {key: value for key, value in method.items() if key != "recipe"}
    given = {key: value for key, value in rest.items() if value is not None}
    full = {"name": method["name"], "recipe": recipe, **rest, **_RECIPES[recipe], **given}
    # The threshold was applied until the masks were frozen.
    return full | ({"choose_at": full["freeze_at"]} if recipe == "tied" else {})


def _split(method: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings of format 3 to those of "probmask-tied" or "probmask"."""
    recipe = _recipe(method)
    if recipe == "tied":
        # None meant the default, as it does in a setting that is absent.
        settings = {
            key: value
            for key, value in method.items()
            if key not in _NOT_OF_TIED and value is not None
        }
        return {**settings, "name": "probmask-tied"}
    settings = {key: value for key, value in method.items() if key not in _NOT_OF_LEARNED}
    return {**settings, "recipe": "adaptive" if recipe == "learned" else recipe}


def _recipe(method: Mapping[str, Any]) -> str:
    """Return the recipe up to format 3, which the other settings imply if it is None."""
    implied = (
        method.get("train_weights") is False
        or method.get("compat") is not None
        or method.get("prob_lr") is not None
        or method.get("draws") not in (None, 1)
        or method.get("select") not in (None, "top")
    )
    recipe = method.get("recipe") or ("learned" if implied else "tied")
    if not isinstance(recipe, str) or recipe not in _RECIPES:
        raise InputError(f"method.recipe = {shown(recipe)} is not one of {', '.join(_RECIPES)}")
    return recipe
