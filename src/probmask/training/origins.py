"""Where the settings of a run come from, so that errors name the file or the flag to correct."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from probmask.data import DATA
from probmask.errors import InputError
from probmask.messages import closest, suggestion
from probmask.methods import METHODS
from probmask.models import MODELS
from probmask.parsing import unknown_key

_COMMAND_LINE = "the command line"
# Flags of `probmask train` for keys whose value is a registered name.
_FLAGS = {"data": "--data", "model": "--model", "method.name": "--method"}


@dataclass(frozen=True)
class Origins:
    """Origin of every key: a source, and the keys that the command line overrides.

    Args:
        source: Name of the file or command. None if every key is from the command line.
        overridden: Dotted keys that the command line sets.
        has_flags: Whether the command has ``--data``, ``--model`` and ``--method``. Otherwise
            errors name ``--set``.
    """

    source: str | None = None
    overridden: frozenset[str] = frozenset()
    has_flags: bool = True

    def source_of(self, key: str) -> str:
        """Return the name of the source that sets a key."""
        return str(self.source) if self._from_source(key) else _COMMAND_LINE

    def label(self, key: str) -> str:
        """Return the text that precedes the value of a key in an error."""
        if self._from_source(key):
            return f"{self.source}: {key} ="
        return _FLAGS[key] if self.has_flags else f"--set {key} ="

    @contextmanager
    def name_source(self, *keys: str) -> Iterator[None]:
        """Prefix an `InputError` with the source, if the source sets all of these keys.

        Errors that already start with a source stay as they are.
        """
        try:
            yield
        except InputError as error:
            overridden = any(key.partition(".")[0] in keys for key in self.overridden)
            sources = ("--", f"{_COMMAND_LINE}: ", f"{self.source}: ")
            if self.source is None or overridden or str(error).startswith(sources):
                raise
            raise InputError(f"{self.source}: {error}") from error

    def _from_source(self, key: str) -> bool:
        """Return whether neither the key nor a table that contains it is overridden."""
        overridden = any(key == other or key.startswith(f"{other}.") for other in self.overridden)
        return self.source is not None and not overridden


# For configurations that were checked before, so no error is expected.
CHECKED = Origins()


def reject_unknown_keys(
    table: Mapping[str, Any], *, kind: type[Any], optimizer: type[Any], origins: Origins
) -> None:
    """Raise `InputError` for a key that ``kind`` does not have, and suggest a known key.

    A key that belongs to a nested table is suggested with the name of that table.

    Args:
        table: Configuration, with ``data`` and ``method.name`` filled in.
        kind: Dataclass of the configuration.
        optimizer: Dataclass of the table ``optimizer``.
        origins: Origins of the keys.
    """
    known = _field_names(kind)
    for key in table:
        if key not in known:
            candidates = {**_nested_keys(table, optimizer), **{name: name for name in known}}
            close = closest(key, candidates)
            hint = (
                suggestion(key, known) if close is None else f"did you mean {candidates[close]!r}?"
            )
            raise unknown_key(key, hint, origins.source_of)


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _nested_keys(table: Mapping[str, Any], optimizer: type[Any]) -> dict[str, str]:
    """Return the dotted name of every key of the nested tables, by its last part."""
    settings = table.get("method")
    name = settings.get("name") if isinstance(settings, Mapping) else None
    method = METHODS.get(str(name))
    model, data = MODELS.get(str(table.get("model"))), DATA.get(str(table.get("data")))
    tables: dict[str, Iterable[str]] = {
        "data_args": () if data is None else _field_names(type(data.defaults)),
        "model_args": () if model is None else inspect.signature(model.build).parameters,
        "method": ("name",) if method is None else ("name", *_field_names(method)),
        "optimizer": _field_names(optimizer),
    }
    return {key: f"{table}.{key}" for table, keys in tables.items() for key in keys}
