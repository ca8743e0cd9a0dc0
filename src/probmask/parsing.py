"""Read TOML and JSON that anybody may have written, and build frozen dataclasses from their tables.

What is read holds only values that a record can store: text, numbers of ordinary size, true and
false, and lists and tables of these. Unknown keys and wrong types of a dataclass are errors.

Pydantic and msgspec do this too, but their errors can neither name the origin of each value (a
file, a flag, a default) nor suggest the nearest key, and commands would have to import them.
"""

import json
import re
import sys
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from probmask.errors import InputError
from probmask.files import read_bounded
from probmask.messages import one_line, printable, shown, suggestion

T = TypeVar("T")
# The origin of a table, or a function that returns the origin of each key.
Source = str | Callable[[str], str]

# Limits on files: far above what probmask writes, and low enough for little time and memory.
_LARGEST_TOML = 2**20  # bytes
_DEEPEST = 32  # levels of lists and tables
_LARGEST = 1e300  # sums of such numbers are finite
_KEY_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(rf"""(?<![\w"'-])(?:{_KEY_PART}){{{_DEEPEST}}}""")
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        InputError: The file cannot be read, is not valid, or holds a value as in `check_plain`.
    """
    content = read_bounded(path, most=_LARGEST_TOML)
    return parse_toml(_decoded(content, f"{path}: not valid TOML"), source=str(path))


def parse_toml(text: str, *, source: str) -> dict[str, Any]:
    """Return the tables of a TOML text; ``source`` names its origin in errors.

    Raises:
        InputError: The text is not valid, or holds a value as in `check_plain`.
    """
    if _LONG_KEY.search(text):  # the time that tomllib takes grows with the square of the length
        raise InputError(f"{source}: not valid TOML: a key has more than {_DEEPEST} parts.")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not valid TOML: {_reason(error)}.") from error
    check_plain(tables, source=source)
    return tables


def parse_json(content: bytes, *, source: str) -> Any:
    """Return the value of a JSON text; ``source`` names its origin in errors.

    Raises:
        InputError: The text is not valid, has a key twice, or holds a value as in `check_plain`.
    """
    text = _decoded(content, f"{source}: not valid JSON")
    try:
        value = json.loads(text, object_pairs_hook=_table_of)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: not valid JSON: {_reason(error)}.") from error
    check_plain(value, source=source)
    return value


def check_plain(value: Any, *, source: str) -> None:
    """Check that decoded TOML or JSON holds only values that a record can store.

    Raises:
        InputError: A number is infinite, NaN or very large, a text is not Unicode, a value has
            another type (a date), or tables and lists are nested very deeply.
    """
    # Level by level, since decoded text can be nested more deeply than Python can recurse.
    level: list[Any] = [{"": value}]
    for _ in range(_DEEPEST + 2):
        inner: list[Any] = []
        for node in level:
            for child in node.values() if isinstance(node, dict) else node:
                if isinstance(child, dict | list):
                    inner.append(child)
                if _broken_rule(child) is not None:
                    raise _not_plain(value, child, source)
        level = inner
    if level:
        raise InputError(
            f"{source}: tables and lists are nested too deeply; at most {_DEEPEST} levels are "
            "allowed."
        )


def _not_plain(tree: Any, wrong: Any, source: str) -> InputError:
    """Return the error for a value in a tree."""
    left: list[tuple[Any, str]] = [(tree, "")]
    for node, key in left:  # it grows in the loop
        if node is wrong:
            break
        if isinstance(node, dict):
            left += [(each, f"{key}.{name}") for name, each in node.items()]
        elif isinstance(node, list):
            left += [(each, f"{key}[{index}]") for index, each in enumerate(node)]
    label = printable(key.removeprefix("."))
    return InputError(f"{source}: {label} = {shown(wrong)}: {_broken_rule(wrong)}.")


def _broken_rule(value: Any) -> str | None:
    """Return the rule that a value breaks, without the values in it, or None."""
    kind = type(value)
    if kind is float:
        finite = -_LARGEST <= value <= _LARGEST
        return None if finite else f"a number must be finite and below {_LARGEST:g}"
    if kind is int:
        fits = -(2**63) <= value < 2**64
        return None if fits else "a whole number must fit in 64 bits"
    if kind is str or kind is dict:
        text = value if isinstance(value, str) else "".join(value)
        valid = text.isascii() or _SURROGATE.search(text) is None
        return None if valid else "the text is not valid Unicode"
    if value is None or kind in (bool, list):
        return None
    return "expected text, a number, true or false, a list or a table"


def _decoded(content: bytes, problem: str) -> str:
    """Decode UTF-8; a byte-order mark, which some editors write, is skipped."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{problem}: line {line} is not UTF-8 text.") from error


def _table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return table


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "tables and lists are nested too deeply"
    if "int_max_str_digits" in str(error):
        return f"a number has more than {sys.get_int_max_str_digits():,} digits"
    return printable(one_line(error))


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
        hint = _nested_kind(hints[key])
        if is_dataclass(hint) and isinstance(hint, type):
            if not isinstance(value, Mapping):
                raise InputError(
                    _of(source, f"{prefix}{key}") + f" must be a table, not {shown(value)}."
                )
            values[key] = parse(hint, value, prefix=f"{prefix}{key}.", source=source)
        else:
            values[key] = _typed(value, hint, key=f"{prefix}{key}", source=source)
    return values


def _nested_kind(hint: Any) -> Any:
    """Return the dataclass of an annotation such as ``Settings | None``; others as they are."""
    nested = [kind for kind in get_args(hint) if is_dataclass(kind)]
    return nested[0] if get_origin(hint) in (Union, types.UnionType) and nested else hint


def unknown_key(key: str, hint: str, source: Source) -> InputError:
    """Return the error for an unknown key."""
    where = source if isinstance(source, str) else source(key)
    return InputError(f"{where}: unknown key {printable(key)}; {hint}")


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
    raise InputError(f"{_of(source, key)} = {shown(value)}: expected {_describe(kinds)}.")


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
