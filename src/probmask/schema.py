"""Check JSON tables against a `typing.TypedDict`, which declares types, ranges and required keys.

    class Score(TypedDict):
        accuracy: Annotated[float, Range(0, 100, "a percentage")]
        total: NotRequired[int]

Keys that the type does not declare may hold anything, so that newer files stay readable.
"""

import functools
import math
from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from probmask.checks import Range, is_number
from probmask.messages import printable, shown

# Returns None for a valid value. Otherwise it returns the rest of the key, and what is wrong.
_Check = Callable[[Any], tuple[str, str] | None]
_NAMES: dict[type, str] = {dict: "a table", list: "a list", str: "text", bool: "true or false"}


def mismatch(value: Any, hint: Any) -> str | None:
    """Return why a value does not have the declared type, or None if it does.

    Supported are ``Any``, ``str``, ``bool``, numbers, ``Annotated`` numbers with a `Range`,
    ``list[…]``, ``dict[str, …]``, ``TypedDict``, and unions of one of these with None.

    Args:
        value: A value of decoded JSON.
        hint: The type that it should have.

    Example:
        >>> from probmask.schema import mismatch
        >>> mismatch({"counts": [1, "two"]}, dict[str, list[int]])
        "counts[1] = 'two' is not a whole number"
    """
    found = _check_of(hint)(value)
    if found is None:
        return None
    key, problem = found
    return f"{printable(key.removeprefix('.')) or 'the content'} {problem}"


@functools.cache
def _check_of(hint: Any) -> _Check:
    """Return the function that checks values of a type; finding it costs more than calling it."""
    kind = get_origin(hint)
    if kind in (Required, NotRequired):
        return _check_of(get_args(hint)[0])
    if kind in (Union, UnionType):
        (other,) = (each for each in get_args(hint) if each is not NoneType)
        check = _check_of(other)
        return lambda value: None if value is None else check(value)
    if hint is Any:
        return lambda _: None
    if is_typeddict(hint):
        return _check_of_table(hint)
    if kind in (dict, list):
        return _check_of_items(kind, _check_of(get_args(hint)[-1]))
    base, rule = get_args(hint) if kind is Annotated else (hint, Range(-math.inf))
    return _check_of_number(base, rule) if base in (int, float) else lambda v: _not_a(base, v)


def _check_of_table(kind: Any) -> _Check:
    required = sorted(kind.__required_keys__)
    hints = get_type_hints(kind, include_extras=True)
    checks = {f".{name}": (name, _check_of(hint)) for name, hint in hints.items()}

    def check(value: Any) -> tuple[str, str] | None:
        if not isinstance(value, dict):
            return _not_a(dict, value)
        for name in required:
            if name not in value:
                return f".{name}", "is missing"
        return _first(
            (key, each(value[name])) for key, (name, each) in checks.items() if name in value
        )

    return check


def _check_of_items(kind: type, each: _Check) -> _Check:
    def check(value: Any) -> tuple[str, str] | None:
        wrong = _not_a(kind, value)
        if wrong is not None:
            return wrong
        if kind is dict:
            return _first((f".{name}", each(item)) for name, item in value.items())
        return _first((f"[{index}]", each(item)) for index, item in enumerate(value))

    return check


def _check_of_number(base: type, rule: Range) -> _Check:
    low, high = rule.low, rule.high
    expected = "a whole number" if base is int and math.isinf(low) else rule.meaning
    if not math.isinf(low):
        expected += f", at least {low:g}" if math.isinf(high) else f", from {low:g} to {high:g}"

    def check(value: Any) -> tuple[str, str] | None:
        if is_number(value) and low <= value <= high and (base is float or isinstance(value, int)):
            return None
        return _wrong(value, expected)

    return check


def _first(
    found: Iterable[tuple[str, tuple[str, str] | None]],
) -> tuple[str, str] | None:
    for key, problem in found:
        if problem is not None:
            return key + problem[0], problem[1]
    return None


def _not_a(kind: type, value: Any) -> tuple[str, str] | None:
    return None if isinstance(value, kind) else _wrong(value, _NAMES[kind])


def _wrong(value: Any, expected: str) -> tuple[str, str]:
    return "", f"= {shown(value)} is not {expected}"
