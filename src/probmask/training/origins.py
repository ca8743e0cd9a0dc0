"""Where the settings of a run come from, so that errors name the file or the flag to correct."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
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


# Checks name the call that breaks a rule, as in "optimizer(lr=-1.0): …", "ProbMask(draws=0): …".
_CALL = re.compile(r"(\w+)\((\w+=.*?)\): (.+)", re.DOTALL)
_NESTED = ("optimizer", "quantize", "data_args", "model_args")
_TABLES = {"train": ""} | {name: f"{name}." for name in _NESTED}
# Errors of `parsing` about a key that the command line sets.
_WRONG_TYPE = re.compile(rf"{_COMMAND_LINE}: ([\w.]+) = .*?: (expected .+)", re.DOTALL)
_UNKNOWN = re.compile(rf"{_COMMAND_LINE}: (unknown key ([^;]*);.+)", re.DOTALL)


@dataclass(frozen=True)
class Origins:
    """Origin of every key: a source, and the keys that the command line overrides.

    Args:
        source: Name of the file or command. None if every key is from the command line.
        overridden: Dotted keys that the command line sets.
        has_flags: Whether the command has ``--data``, ``--model`` and ``--method``. Otherwise
            errors name ``--set``.
        written: What the user wrote for a key that the command line sets, as in ``--epochs 0`` or
            ``--set optimizer.lr=-1``. Errors repeat it.
    """

    source: str | None = None
    overridden: frozenset[str] = frozenset()
    has_flags: bool = True
    written: Mapping[str, str] = field(default_factory=dict)

    def source_of(self, key: str) -> str:
        """Return the name of the source that sets a key."""
        return str(self.source) if self._from_source(key) else _COMMAND_LINE

    def label(self, key: str) -> str:
        """Return the text that precedes the value of a key in an error."""
        if self._from_source(key):
            return f"{self.source}: {key} ="
        has_flag = self.has_flags and not self.written.get(key, "").startswith("--set")
        return _FLAGS[key] if has_flag else f"--set {key} ="

    @contextmanager
    def named(self) -> Iterator[None]:
        """Let an `InputError` about a setting name it as the user wrote it, or its source."""
        try:
            yield
        except InputError as error:
            message = self._rephrased(str(error))
            if message == str(error):
                raise
            raise InputError(message) from error

    def _rephrased(self, message: str) -> str:
        call = _CALL.fullmatch(message)
        if call is not None and (table := _table_of(call[1])) is not None:
            pairs = [pair.partition("=") for pair in re.split(r", (?=\w+=)", call[2])]
            return (
                self._setting_error(
                    {f"{table}{name}": value.removesuffix(".0") for name, _, value in pairs},
                    call[3],
                )
                or message
            )
        if wrong := _WRONG_TYPE.fullmatch(message):
            return self._setting_error({wrong[1]: ""}, wrong[2]) or message
        if unknown := _UNKNOWN.fullmatch(message):
            return self._setting_error({unknown[2]: ""}, unknown[1]) or message
        return message

    def _setting_error(self, values: Mapping[str, str], rule: str) -> str | None:
        """Return the error about these settings; None if their origin is unknown."""
        written = {key: self._written(key) for key in values}
        if not any(written.values()) and (
            self.source is None or not all(map(self._from_source, values))
        ):
            return None
        words = [written[key] or f"{key} = {value}" for key, value in values.items()]
        source = "" if any(written.values()) else f"{self.source}: "
        return f"{source}{', '.join(dict.fromkeys(words))}: {rule}"

    def _written(self, key: str) -> str | None:
        """Return what the user wrote for the key, or for a table that contains it."""
        parents = [key, *(key[:dot] for dot in range(len(key)) if key[dot] == ".")]
        return next((self.written[each] for each in parents if each in self.written), None)

    def _from_source(self, key: str) -> bool:
        """Return whether neither the key nor a table that contains it is overridden."""
        overridden = any(key == other or key.startswith(f"{other}.") for other in self.overridden)
        return self.source is not None and not overridden


def _table_of(caller: str) -> str | None:
    """Return the prefix of the keys that a call takes its settings from."""
    if any(method.__name__ == caller for method in METHODS.values()):
        return "method."
    return _TABLES.get(caller)


# For configurations that were checked before, so no error is expected.
CHECKED = Origins()


def reject_unknown_keys(
    table: Mapping[str, Any],
    *,
    kind: type[Any],
    nested: Mapping[str, type[Any]],
    origins: Origins,
) -> None:
    """Raise `InputError` for a key that ``kind`` does not have, and suggest a known key.

    A key that belongs to a nested table is suggested with the name of that table.

    Args:
        table: Configuration, with ``data`` and ``method.name`` filled in.
        kind: Dataclass of the configuration.
        nested: Dataclasses of nested tables, by the key of the table.
        origins: Origins of the keys.
    """
    known = _field_names(kind)
    for key in table:
        if key not in known:
            candidates = {**_nested_keys(table, nested), **{name: name for name in known}}
            close = closest(key, candidates)
            hint = (
                suggestion(key, known) if close is None else f"did you mean {candidates[close]!r}?"
            )
            raise unknown_key(key, hint, origins.source_of)


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind)]


def _nested_keys(table: Mapping[str, Any], nested: Mapping[str, type[Any]]) -> dict[str, str]:
    """Return the dotted name of every key of the nested tables, by its last part."""
    settings = table.get("method")
    name = settings.get("name") if isinstance(settings, Mapping) else None
    method = METHODS.get(str(name))
    model, data = MODELS.get(str(table.get("model"))), DATA.get(str(table.get("data")))
    tables: dict[str, Iterable[str]] = {
        "data_args": () if data is None else _field_names(type(data.defaults)),
        "model_args": () if model is None else inspect.signature(model.build).parameters,
        "method": ("name",) if method is None else ("name", *_field_names(method)),
        **{key: _field_names(each) for key, each in nested.items()},
    }
    return {key: f"{table}.{key}" for table, keys in tables.items() for key in keys}
