"""What of a run's configuration decided its result, and so tells it from other runs.

What has its default is left out. The defaults are read from a file, for importing what they belong
to, PyTorch with it, would take longer than all else that is done with a record.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from probmask.training.record_format import INDIFFERENT

DEFAULTS = Path(__file__).with_name("defaults.json")
# What makes a run slower or faster and rounds its sums otherwise, but asks the same question: a run
# of another machine is not repeated for it. The dense twin is a run of its own, with a record.
_MACHINE = frozenset(
    ("accelerator", "channels_last", "devices", "strategy", "threads", "dense_twin")
)

# The method whose defaults are its recipe's, and the recipe that nobody has to name.
_OF_RECIPES, _USUAL_RECIPE = "probmask", "tied"


def deciding_settings(config: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration decides the result, without what has its default.

    A setting that a newer version has added is thereby not a difference to the records before it.
    """
    data, model = str(config.get("data")), str(config.get("model"))
    table: dict[str, Any] = {
        key: value for key, value in config.items() if key not in INDIFFERENT | _MACHINE
    }
    defaults = _defaults()["run"]
    kept = {key: value for key, value in table.items() if value != defaults.get(key)}
    # Whatever their defaults, a reader wants to see them.
    kept.update(data=data, model=model, seed=config.get("seed", 0))
    kept["optimizer"] = _differing(table.get("optimizer", {}), defaults["optimizer"])
    kept["data_args"] = _differing(table.get("data_args", {}), _defaults_of("data", data))
    if kept.get("select_on", "val") != "val":  # none is held out, whatever is asked for
        kept["data_args"].pop("validation_images", None)
    kept["model_args"] = _differing(table.get("model_args", {}), _defaults_of("models", model))
    kept["method"] = {"name": method["name"], **unusual_settings(method)}
    if data in _defaults()["own_data"] and config.get("data_dir") is not None:
        kept["data_dir"] = Path(str(config["data_dir"])).name
    plain: dict[str, Any] = json.loads(json.dumps(kept))
    return plain


def label_of(method: Mapping[str, Any]) -> str:
    """A method and those of its settings that are not the defaults, but for the sparsity."""
    settings = unusual_settings(method)
    shown = [f"{key}={_shown(value)}" for key, value in settings.items() if key != "sparsity"]
    return " ".join([str(method["name"]), *shown])


def digest(table: Mapping[str, Any]) -> str:
    """A short text that is the same for the same table, in whatever order, and for 1 and 1.0."""
    text = json.dumps(_canonical(table), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _defaults() -> dict[str, Any]:
    """The defaults of runs, methods, data sets and networks."""
    found: dict[str, Any] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found


def _defaults_of(kind: str, name: str) -> Mapping[str, Any]:
    """The defaults of one of ours; somebody else's has none that we know of."""
    found: Mapping[str, Any] = _defaults()[kind].get(name, {})
    return found


def unusual_settings(method: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method that are not its defaults."""
    given = {key: value for key, value in method.items() if key != "name"}
    usual = _defaults_of("methods", str(method["name"]))
    if method["name"] == _OF_RECIPES:
        given = {key: value for key, value in given.items() if value is not None}  # the recipe's
        if "recipe" in given:
            recipe = str(given["recipe"])
            usual = {**usual, **_defaults_of("recipes", recipe), "recipe": _USUAL_RECIPE}
    return _differing(given, usual)


def _differing(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in table.items() if key not in defaults or defaults[key] != value
    }


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_canonical(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
