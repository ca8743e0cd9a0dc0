"""Keys of a configuration that there are not, and the ones that are probably meant."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from probmask.data import DATA
from probmask.messages import closest, suggestion
from probmask.methods import METHODS
from probmask.models import MODELS
from probmask.parsing import unknown_key
from probmask.training.origins import Origins


def refuse_unknown_keys(
    table: Mapping[str, Any], *, kind: type[Any], optimizer: type[Any], origins: Origins
) -> None:
    """Refuse a key that no ``kind`` has; for one that belongs into a table, say into which."""
    known = names_of(kind)
    for key in table:
        if key not in known:
            meant = {**_in_tables(table, optimizer), **{name: name for name in known}}
            close = closest(key, meant)
            hint = suggestion(key, known) if close is None else f"did you mean {meant[close]!r}?"
            raise unknown_key(key, hint, origins.of)


def names_of(kind: type[Any]) -> list[str]:
    """The names of a dataclass's fields."""
    return [field.name for field in fields(kind)]


def _in_tables(table: Mapping[str, Any], optimizer: type[Any]) -> dict[str, str]:
    """What may be set of the chosen method, network and data, with the table that it goes into."""
    method = table.get("method", {})
    chosen = METHODS.get(str(method.get("name", "probmask") if isinstance(method, Mapping) else ""))
    model, data = MODELS.get(str(table.get("model"))), DATA.get(str(table.get("data", "digits")))
    tables: dict[str, Iterable[str]] = {
        "data_args": () if data is None else names_of(type(data.defaults)),
        "model_args": () if model is None else inspect.signature(model.build).parameters,
        "method": ("name",) if chosen is None else ("name", *names_of(chosen)),
        "optimizer": names_of(optimizer),
    }
    return {name: f"{table}.{name}" for table, names in tables.items() for name in names}
