"""Identity of a run: a hash of the settings that affect its result and differ from the defaults.

The defaults are read from a file, because importing the code that defines them also imports
PyTorch, which would dominate the time of every command that only reads records.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.training.record_format import NEUTRAL_KEYS

if TYPE_CHECKING:
    from probmask.training.config import TrainConfig

DEFAULTS = Path(__file__).with_name("defaults.json")
# Keys that change speed and rounding, but not the experiment: runs of two machines are the same.
# The dense twin is a run of its own with its own record.
_MACHINE = frozenset(
    ("accelerator", "channels_last", "devices", "strategy", "threads", "dense_twin")
)
# The method whose recipe sets defaults, and the recipe that it has by default.
_WITH_RECIPES, _DEFAULT_RECIPE = "probmask", "adaptive"


def run_identity(config: "TrainConfig") -> str:
    """Return the identity that the record of a run with this configuration will have.

    Every setting that affects the result counts, with its default if it is not given. These do
    not count: the location of the data and how it is read, checkpoints and logs, the machine
    (accelerator, devices, strategy, threads), versions, and whether a dense twin is trained. The
    user's own data ("folder", "npz", "tsv") is identified by the last part of its path, initial
    weights by the digest of their file, and a tokenizer by the digest in the settings or else by
    the last part of its path.
    """
    from probmask.training.config import make_method, to_table

    settings = {"name": config.method["name"], **make_method(config).full_settings()}
    return digest(relevant_settings(to_table(config), settings))


def relevant_settings(config: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the result and differ from their defaults.

    Because defaults are omitted, a setting that a newer version adds does not change the identity
    of older records.

    Args:
        config: The configuration of a run, as in its record.
        method: The name and all settings of its method.
    """
    data, model = str(config.get("data")), str(config.get("model"))
    table: dict[str, Any] = {
        key: value for key, value in config.items() if key not in NEUTRAL_KEYS | _MACHINE
    }
    defaults = _defaults()["run"]
    found = {key: value for key, value in table.items() if value != defaults.get(key)}
    # These are always shown, even if they have their defaults.
    found.update(data=data, model=model, seed=config.get("seed", 0))
    found["optimizer"] = _differing(table.get("optimizer", {}), defaults["optimizer"])
    found["data_args"] = _differing(table.get("data_args", {}), _defaults_of("data", data))
    if found.get("select_on", "val") != "val":  # then no validation examples are held out
        for key in ("validation_images", "validation_sentences"):
            found["data_args"].pop(key, None)
    if found["data_args"].get("tokenizer_sha256") is not None:
        found["data_args"].pop("tokenizer", None)
    elif "tokenizer" in found["data_args"]:  # its place does not count
        found["data_args"]["tokenizer"] = Path(str(found["data_args"]["tokenizer"])).name
    found["model_args"] = _differing(table.get("model_args", {}), _defaults_of("models", model))
    found["method"] = {"name": method["name"], **non_default_settings(method)}
    if data in _defaults()["own_data"] and config.get("data_dir") is not None:
        found["data_dir"] = Path(str(config["data_dir"])).name
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def method_label(method: Mapping[str, Any]) -> str:
    """Return the name of a method and its non-default settings, without the sparsity."""
    settings = non_default_settings(method)
    shown = [f"{key}={_value_text(value)}" for key, value in settings.items() if key != "sparsity"]
    return " ".join([str(method["name"]), *shown])


def non_default_settings(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a method that differ from their defaults."""
    given = {key: value for key, value in method.items() if key != "name"}
    defaults = _defaults_of("methods", str(method["name"]))
    if method["name"] == _WITH_RECIPES:
        # None means the value of the recipe.
        given = {key: value for key, value in given.items() if value is not None}
        if "recipe" in given:
            recipe = _defaults_of("recipes", str(given["recipe"]))
            defaults = {**defaults, **recipe, "recipe": _DEFAULT_RECIPE}
    return _differing(given, defaults)


def digest(table: Mapping[str, Any]) -> str:
    """Return a short hash that depends neither on the order of keys nor on 1 versus 1.0."""
    text = json.dumps(_canonical(table), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _defaults() -> dict[str, Any]:
    """Read the defaults of runs, methods, data sets and networks."""
    found: dict[str, Any] = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return found


def _defaults_of(kind: str, name: str) -> Mapping[str, Any]:
    """Return the defaults of a method, data set or network; empty for those of the user."""
    found: Mapping[str, Any] = _defaults()[kind].get(name, {})
    return found


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


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
