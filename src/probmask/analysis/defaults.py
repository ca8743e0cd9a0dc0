"""Write the defaults of every setting to defaults.json, from which records are read.

python -m probmask.analysis.defaults

Run it after adding a method, a data set or a network, or changing a default; a test fails
otherwise. The file is part of the package.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

from probmask.analysis.identity import DEFAULTS
from probmask.data import DATA
from probmask.files import write_atomically
from probmask.methods import METHODS
from probmask.methods.probmask.learned import RECIPES
from probmask.models import MODELS
from probmask.training.config import TrainConfig
from probmask.training.optimizer import OptimizerConfig


def collect_defaults() -> dict[str, Any]:
    """Return the defaults that the code defines, as JSON values.

    ``own_data`` lists the data sets that the user provides, which only their path identifies.
    ``recipes`` has the defaults that each recipe of ProbMask sets.
    """
    found = {
        "run": _field_defaults(TrainConfig),
        "methods": {name: _field_defaults(kind) for name, kind in METHODS.items()},
        "recipes": {name: asdict(recipe) for name, recipe in RECIPES.items()},
        "data": {name: asdict(entry.defaults) for name, entry in DATA.items()},
        "own_data": [name for name, entry in DATA.items() if entry.release is None],
        "models": {name: _argument_defaults(entry.build) for name, entry in MODELS.items()},
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _field_defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the defaults of a dataclass."""
    assert is_dataclass(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.default_factory is not MISSING:
            value = field.default_factory()
            found[field.name] = asdict(value) if isinstance(value, OptimizerConfig) else value
        elif field.default is not MISSING:
            found[field.name] = field.default
    return found


def _argument_defaults(build: Any) -> dict[str, Any]:
    """Return the default arguments of a function that builds a network."""
    parameters = inspect.signature(build).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }


def _to_json(tables: Mapping[str, Any]) -> str:
    """Write JSON with a line per method, data set and network, so that diffs are readable."""
    parts = []
    for key, table in tables.items():
        if isinstance(table, dict):
            lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items()]
            parts.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(table)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    write_atomically(DEFAULTS, _to_json(collect_defaults()).encode(), overwrite=True)
    print(DEFAULTS)
