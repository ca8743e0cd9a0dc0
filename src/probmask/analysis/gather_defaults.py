"""Write down the defaults of everything that a run can be set by, for reading records.

python -m probmask.analysis.gather_defaults

To be run whenever a default has changed, or a method, a data set or a network has come to it; a
test tells when. The file that it writes is part of the package.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

from probmask.analysis.deciding import DEFAULTS
from probmask.data import DATA
from probmask.files import write_atomically
from probmask.methods import METHODS
from probmask.methods.recipes import RECIPES
from probmask.models import MODELS
from probmask.training.config import OptimizerConfig, TrainConfig


def gathered_defaults() -> dict[str, Any]:
    """The defaults as they stand in the code, in the form of JSON.

    ``own_data`` names the data sets that are the user's: only their place tells them apart. Beside
    the defaults of ProbMask stand what its recipes make of them.
    """
    found = {
        "run": _defaults(TrainConfig),
        "methods": {name: _defaults(kind) for name, kind in METHODS.items()},
        "recipes": {name: asdict(recipe) for name, recipe in RECIPES.items()},
        "data": {name: asdict(entry.defaults) for name, entry in DATA.items()},
        "own_data": [name for name, entry in DATA.items() if entry.release is None],
        "models": {name: _arguments(entry.build) for name, entry in MODELS.items()},
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """The defaults of a dataclass."""
    assert is_dataclass(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.default_factory is not MISSING:
            value = field.default_factory()
            found[field.name] = asdict(value) if isinstance(value, OptimizerConfig) else value
        elif field.default is not MISSING:
            found[field.name] = field.default
    return found


def _arguments(build: Any) -> dict[str, Any]:
    """What the function that builds a network takes if it is not told otherwise."""
    parameters = inspect.signature(build).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty
    }


def _laid_out(tables: Mapping[str, Any]) -> str:
    """JSON with a line for each method, data set and network: what changes is seen."""
    parts = []
    for key, table in tables.items():
        if isinstance(table, dict):
            lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items()]
            parts.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(table)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    write_atomically(DEFAULTS, _laid_out(gathered_defaults()).encode(), overwrite=True)
    print(DEFAULTS)
