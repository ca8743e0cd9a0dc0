"""Build frozen dataclasses from tables of TOML and JSON; unknown keys and wrong types are errors.

Pydantic and msgspec do this too, but their errors can neither name the origin of each value (a
file, a flag, a default) nor suggest the nearest key, and commands would have to import them.
"""

import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from probmask.errors import InputError
from probmask.messages import suggestion

T = TypeVar("T")
# The origin of a table, or a function that returns the origin of each key.
Source = str | Callable[[str], str]


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid TOML: {error}.") from error


def parse(kind: type[T], table: Mapping[str, Any], *, prefix: str, source: Source) -> T:
    """Build a ``kind`` from a table.

    ``prefix`` precedes each key in an error message. ``source`` is the origin of the table or of
    its keys.

    Raises:
        InputError: If a key is unknown or missing, or a value has the wrong type.
    """
    values = parse_fields(kind, table, prefix=prefix, source=source)
    missing = [
        item.name
        for item in fields(kind)  # type: ignore[arg-type]
        if item.name not in values and item.default is MISSING and item.default_factory is MISSING
    ]
    if missing:
        raise InputError(_of(source, f"{prefix}{missing[0]}") + " is missing.")
    return kind(**values)


def parse_fields(
    kind: type[Any], table: Mapping[str, Any], *, prefix: str, source: Source
) -> dict[str, Any]:
    """Return the fields of a ``kind`` that the table has, checked and converted."""
    hints = get_type_hints(kind)
    names = {item.name for item in fields(kind)}
    for key in table:
        if key not in names:
            raise unknown_key(f"{prefix}{key}", suggestion(key, names), source)
    values = {}
    for key, value in table.items():
        hint = hints[key]
        if is_dataclass(hint) and isinstance(hint, type):
            if not isinstance(value, Mapping):
                raise InputError(
                    _of(source, f"{prefix}{key}") + f" must be a table, not {value!r}."
                )
            values[key] = parse(hint, value, prefix=f"{prefix}{key}.", source=source)
        else:
            values[key] = _typed(value, hint, key=f"{prefix}{key}", source=source)
    return values


def unknown_key(key: str, hint: str, source: Source) -> InputError:
    """Return the error for an unknown key."""
    where = source if isinstance(source, str) else source(key)
    return InputError(f"{where}: unknown key {key}; {hint}")


def _of(source: Source, key: str) -> str:
    return f"{source if isinstance(source, str) else source(key)}: {key}"


def _typed(value: Any, hint: Any, *, key: str, source: Source) -> Any:
    """Check a value against the annotation of its field; convert integers to float if needed."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        if kind is types.NoneType and value == "none":
            return None
        if get_origin(kind) is tuple and isinstance(value, list | tuple):
            item = get_args(kind)[0]
            return tuple(_typed(each, item, key=key, source=source) for each in value)
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            with suppress(OverflowError):  # TOML's integers have any size
                return float(value)
        plain = get_origin(kind) or kind
        if plain is int and isinstance(value, bool):
            continue
        if isinstance(plain, type) and isinstance(value, plain):
            return value
    raise InputError(f"{_of(source, key)} = {value!r}: expected {_describe(kinds)}.")


def _describe(kinds: Sequence[Any]) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
    }
    words = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            words += [repr(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            words.append("a list of texts" if get_args(kind)[0] is str else "a list of numbers")
        elif kind is not types.NoneType:
            words.append(names.get(kind, "a table"))
    return " or ".join(words)
