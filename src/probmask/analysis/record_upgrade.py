"""Reading records of earlier formats as if they were of today's.

Format 1 is from before ProbMask had recipes. Its default then was what is now the learned recipe,
with the values of every setting written out, and a ``freeze_at`` of None meant never. Read today,
such a record would be of another run than the same training now is.
"""

from collections.abc import Mapping
from typing import Any

from probmask.training.record_format import RECORD_FORMAT

# What ProbMask had by default in format 1, of what the learned recipe decides today.
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
# Methods whose gradients are clipped by default since format 2.
_NOW_CLIPPED = ("feather", "st3")


def upgraded(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record in today's format; as it is where no key of it has changed its meaning.

    Feather and ST-3 of format 1 did not clip. ProbMask of format 1 gets ``recipe="learned"``, but
    for runs that have this recipe without being told, and None for settings that have the recipe's
    values; a ``freeze_at`` of None becomes 1.
    """
    method = record["method"]
    if record["format"] == 1 and method["name"] in _NOW_CLIPPED and "clip_norm" not in method:
        return {**record, "format": RECORD_FORMAT, "method": {**method, "clip_norm": None}}
    if record["format"] > 1 or method["name"] != "probmask" or "recipe" in method:
        return record
    recipe = None if _is_learned_untold(method) else "learned"
    settings = {key: _today(key, value) for key, value in method.items() if key != "name"}
    # Its configuration stays what was said then: only the method tells one run from another.
    today = {"name": method["name"], "recipe": recipe, **settings}
    return {**record, "format": RECORD_FORMAT, "method": today}


def _today(key: str, value: Any) -> Any:
    if key == "freeze_at" and value is None:
        return 1.0
    return None if key in _LEARNED and value == _LEARNED[key] else value


def _is_learned_untold(method: Mapping[str, Any]) -> bool:
    """Whether recipe=None is the learned one, by the rule of `ProbMask.recipe_name`."""
    return (
        method.get("train_weights") is False
        or method.get("compat") is not None
        or method.get("prob_lr") is not None
        or method.get("draws", 1) != 1
        or method.get("select", "top") != "top"
    )
